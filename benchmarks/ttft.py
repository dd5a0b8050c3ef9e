"""Time to first token of every method on one RAG prompt of six 512-token chunks, split by stage.

    python -m benchmarks.ttft [--ratio 0.15] [--chunks 6] [--chunk-tokens 512] [--repeats 7] [--threads N]

Chunks are cut from MuSiQue contexts (wherever `experiments.datasets` finds them), repeated if they are too short.
K/V are in memory. All methods are warmed up, then timed in interleaved rounds; medians and quartiles over rounds; the
speed-up is the median of the rounds' own ratios, so that a slow round slows both sides.
"""

from __future__ import annotations

import json

from tqdm import tqdm

import kvreuse as kr
from benchmarks.arguments import add_prompt, load, parser_of, save
from benchmarks.tables import stage_table, timed_stages
from experiments.environment import origin
from experiments.timed import equal_chunks


def methods(ratio: float) -> list[kr.ReuseMethod]:
    """What is timed; the first is the reference."""
    return [
        kr.FullRecompute(),
        kr.PrefixCaching(insert=False),
        kr.FullReuse(context="bare"),
        kr.FullReuse(context="prefix"),
        kr.CacheBlend(ratio=ratio, schedule="constant", context="bare"),
        kr.CacheBlend(ratio=ratio, schedule="gradual", context="bare"),
        kr.CacheBlend(ratio=ratio, schedule="constant", context="prefix"),
        kr.CacheBlend(ratio=ratio, schedule="gradual", context="prefix"),
        kr.LegoLink(k=16, context="bare"),
    ]


def main() -> None:
    """Measure, print the table, save the rounds as JSON."""
    parser = parser_of(__doc__, "ttft")
    add_prompt(parser)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    model = load(args)
    prompt, source = equal_chunks(model, args.chunks, args.chunk_tokens, data_dir=args.data_dir)
    store = kr.KVStore("8GiB")
    timed = methods(args.ratio)
    for method in tqdm(timed, desc="encoding and warm-up", leave=False):
        method.encode(model, prompt, store)
        method.prefill(model, prompt, store)
    rounds: list[dict[str, dict[str, float]]] = []
    for number in tqdm(range(args.repeats), desc="rounds"):
        shift = number % len(timed)
        rounds.append({repr(m): timed_stages(m.prefill(model, prompt, store)) for m in timed[shift:] + timed[:shift]})

    header = {"prompt": repr(prompt), "source": source, **origin(args.model, model)}
    save(args.out, {"header": header, "rounds": rounds})
    print(json.dumps(header))
    print(stage_table({repr(m): short_name(repr(m)) for m in timed}, rounds))
    print(f"rounds saved to {args.out}")


def short_name(name: str) -> str:
    """A method's repr without what is as by default."""
    defaults = ("selector=None", "as_released=False", "position='rotate'", "metric='kv'", "offline_chunks=1")
    for default in (f", {d}" for d in defaults):
        name = name.replace(default, "")
    return name


if __name__ == "__main__":
    main()
