"""RAGCache, figure 2: inference time over the input's length, prefill and decoding apart.

python -m experiments.ragcache.fig02 --model demo --threads 1
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import kvreuse as kr
from experiments.plotting import tidy
from experiments.results import Results
from experiments.timed import Records, TimedConfig, TimedExperiment, prompt_of, timed_app
from kvreuse.ragcache.batch import DecodeBatch

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

HALVINGS = 6  # lengths: the prompt's, a half of it, ... down to a 32nd
NEW_TOKENS = 8
DECODED = 32  # tokens of an answer, as drawn
NOTES = (
    f"Prefill: the whole prompt up to its first token. Decoding: {DECODED} tokens, as {NEW_TOKENS} measured ones "
    "take (an end token ends none of them). Medians over interleaved rounds with quartiles."
)


def lengths_of(total: int) -> list[int]:
    """Input lengths, shortest first."""
    return sorted({max(1, total >> step) for step in range(HALVINGS)})


def measure(config: TimedConfig, model: kr.ReuseModel) -> Records:
    """Rounds over all lengths, behind a warm-up."""
    whole = prompt_of(config, model)
    ids = whole.input_ids[: config.num_chunks * config.chunk_tokens]
    lengths = lengths_of(ids.numel())
    for number in tqdm(range(-1, config.repeats), desc="rounds"):
        shift = max(0, number) % len(lengths)
        rows = []
        for length in [lengths[0]] if number < 0 else lengths[shift:] + lengths[:shift]:
            prompt = kr.RagPrompt([], [ids[: length - 1]] if length > 1 else [], ids[length - 1 : length])
            result = kr.FullRecompute().prefill(model, prompt, kr.KVStore())
            rows.append(
                {
                    "case_id": f"round-{number}",
                    "method": f"{length} tokens",
                    "tokens": length,
                    "prefill_s": result.ttft_s,
                    "decode_s_per_token": decode_seconds(model, result) / NEW_TOKENS,
                }
            )
        if number >= 0:
            yield from rows


def decode_seconds(model: kr.ReuseModel, result: kr.Prefill) -> float:
    """Seconds of exactly ``NEW_TOKENS`` greedy steps behind a prefill, also past an end token."""
    length = result.prompt.num_tokens
    model.check_length(length + NEW_TOKENS)
    batch = DecodeBatch(model, max_rows=1)
    batch.join(result.cache, length)
    token = int(result.logits.argmax())  # the first token is the prefill's
    started = time.perf_counter()
    for _ in range(NEW_TOKENS):
        token = int(batch.step([token]).argmax())
    return time.perf_counter() - started


def _columns(results: Results) -> list[tuple[int, list[float], list[float]]]:
    """Length, prefill seconds of all rounds, decoding seconds of all rounds."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for record in results.records:
        prefill, decode = found.setdefault(record["tokens"], ([], []))
        prefill.append(record["prefill_s"])
        decode.append(DECODED * record["decode_s_per_token"])
    return [(length, *found[length]) for length in sorted(found)]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of one value, that value."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def machine(header: Mapping[str, Any]) -> str:
    """Model, device and threads, for a title."""
    threads = f"{header['threads']} thread{'s' if header['threads'] != 1 else ''}"
    return f"{Path(header['model']).name} ({header['device']}, {threads})"


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per length."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for length, prefill, decode in _columns(results):
        low, middle, high = quartiles(prefill)
        both = middle + statistics.median(decode)
        rows.append(
            {
                "input tokens": length,
                "prefill, s": f"{middle:.3g} ({low:.3g}-{high:.3g})",
                "per token, ms": 1e3 * middle / length,
                f"{DECODED} tokens decoded, s": statistics.median(decode),
                "prefill's share": f"{middle / both:.0%}",
            }
        )
    return pd.DataFrame(rows), NOTES


def draw(results: Results) -> Figure:
    """Stacked bars over the length."""
    from matplotlib.figure import Figure

    columns = _columns(results)
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    at = range(len(columns))
    prefill = [quartiles(c[1]) for c in columns]
    middle = [p[1] for p in prefill]
    decode = [statistics.median(c[2]) for c in columns]
    error = [[m - p[0] for m, p in zip(middle, prefill, strict=True)], [p[2] - p[1] for p in prefill]]
    axes.bar(at, middle, 0.6, yerr=error, capsize=3, color="#0072B2", label="prefill")
    axes.bar(
        at,
        decode,
        0.6,
        bottom=middle,
        color="#E69F00",
        hatch="//",
        edgecolor="white",
        label=f"{DECODED} tokens decoded",
    )
    axes.set_xticks(list(at), [f"{c[0]:,}" for c in columns])
    axes.set_xlabel("input tokens")
    axes.set_ylabel("seconds (median; whiskers: prefill's quartiles)")
    tidy(axes)
    axes.grid(False, axis="x")
    axes.legend(loc="upper left", frameon=False)
    figure.suptitle(f"{machine(results.header)}: inference time over the input's length", fontsize=11)
    return figure


FIG02 = TimedExperiment(
    name="ragcache.fig02",
    shows="inference time over the input's length: prefill and decoding.",
    measure=measure,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 3.1",
    cost="a minute and a half",
    repeats=3,
)

if __name__ == "__main__":
    timed_app(FIG02)()
