"""How fast the simulator is and what memory it takes: 10,000, 100,000 and 1,000,000 requests.

    python -m benchmarks.simulator [--requests 10000,100000,1000000] [--systems RAGCache,SGLang-like]

Skewed top-2 requests over 30,000 documents of 100 to 500 tokens at Poisson arrivals, on Mistral-7B on an A10G at
published-hardware scale; answers of 16 to 48 tokens, four search stages of which the early ones are often wrong; the
GPU holds 3%, the host 30% of all documents' tokens. Each number of requests runs in a process of its own: its peak
memory is the most it ever had, "above start" without Python, the library and torch; the workload's arrays count.
Processor time is the simulation's alone, without building the workload.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.arguments import save
from experiments.environment import versions
from kvreuse.ragcache.published import A10G_MISTRAL_7B
from kvreuse.ragcache.simulation_input import Requests
from kvreuse.ragcache.simulator import Simulator
from kvreuse.ragcache.systems import SYSTEMS

NUM_DOCUMENTS = 30_000
QUESTION_TOKENS, SYSTEM_TOKENS = 32, 64
RATE = 2.0  # requests per second; about 2.8 saturate it


def workload(count: int, rate: float, seed: int = 0) -> Requests:
    """``count`` requests; the rank-r document is retrieved in proportion to 1 / r."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, NUM_DOCUMENTS + 1)
    cumulative = np.cumsum(weights / weights.sum())

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        found = np.searchsorted(cumulative, rng.random(shape)).astype(np.int32)
        return np.minimum(found, NUM_DOCUMENTS - 1, out=found)

    documents = drawn((count, 2))
    stages = np.repeat(documents[:, None], 3, axis=1)
    wrong = rng.random((count, 3)) < (0.6, 0.4, 0.2)
    stages[wrong] = drawn((int(wrong.sum()), 2))
    return Requests(
        arrival_s=np.cumsum(rng.exponential(1 / rate, count)),
        documents=documents,
        document_tokens=rng.integers(100, 501, NUM_DOCUMENTS),
        question_tokens=np.int32(QUESTION_TOKENS),  # type: ignore[arg-type]
        new_tokens=rng.integers(16, 49, count),
        stages=stages,
    )


def peak_mib() -> float:
    """The most memory this process has had, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def simulate(system: str, count: int, rate: float) -> dict[str, float]:
    """One run, in this process."""
    before = peak_mib()
    requests = workload(count, rate)
    tokens = int(requests.document_tokens.sum())
    simulator = Simulator(
        A10G_MISTRAL_7B,
        gpu=tokens * 3 // 100 * A10G_MISTRAL_7B.bytes_per_token,
        host=tokens * 30 // 100 * A10G_MISTRAL_7B.bytes_per_token,
        system=SYSTEMS[system],
        system_tokens=SYSTEM_TOKENS,
        search_threads=None,
    )
    with tqdm(total=count, desc=f"{system}, {count:,}", leave=False, disable=not sys.stderr.isatty()) as bar:
        started, cpu = time.perf_counter(), time.process_time()
        result = simulator.run(requests, progress=lambda done: bar.update(done - bar.n) and None)
        wall, spent = time.perf_counter() - started, time.process_time() - cpu
    summary = result.summary()
    return {
        "wall_s": wall,
        "cpu_s": spent,
        "base_mib": before,
        "peak_mib": peak_mib(),
        "simulated_s": float(result.finished_s.max()),
        "iterations": summary["prefills"] + summary["decode_steps"],
        **{name: summary[name] for name in ("ttft_mean_s", "document_hit_rate", "prefill_s", "decode_s", "moving_s")},
    }


def apart(system: str, count: int, rate: float) -> dict[str, float]:
    """One run in a process of its own, whose peak memory is not an earlier run's."""
    command = [sys.executable, "-m", "benchmarks.simulator", "--one", system, "--requests", str(count)]
    done = subprocess.run([*command, "--rate", str(rate)], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, print the table, save the numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="10000,100000,1000000")
    parser.add_argument("--systems", default="RAGCache", help=f"separated by ',': {', '.join(SYSTEMS)}")
    parser.add_argument("--rate", type=float, default=RATE, help="arrivals per simulated second")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/simulator.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    counts = [int(n) for n in args.requests.split(",")]
    names = [args.one] if args.one else [name.strip() for name in args.systems.split(",")]
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        sys.exit(f"--systems: {unknown[0]!r} is not one of {', '.join(SYSTEMS)}")
    if args.one:
        print(json.dumps(simulate(args.one, counts[0], args.rate)))
        return
    heads = [
        "system",
        "requests",
        "processor time, s",
        "per request, us",
        "growth by that of requests",
        "iterations",
        "simulated, s",
        "model busy",
        "documents hit",
        "mean TTFT, s",
        "peak memory, MiB",
        "above start, MiB",
    ]
    print(f"{A10G_MISTRAL_7B.name}, {args.rate:g} requests per simulated second\n")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    rows = []
    for name in names:
        last: tuple[int, float] | None = None
        for count in counts:
            row = apart(name, count, args.rate)
            rows.append({"system": name, "requests": count, **row})
            growth = "-" if last is None else f"{row['cpu_s'] / last[1] / (count / last[0]):.2f}"
            last = count, row["cpu_s"]
            busy = (row["prefill_s"] + row["decode_s"] + row["moving_s"]) / row["simulated_s"]
            cells = [
                name,
                f"{count:,}",
                f"{row['cpu_s']:.1f}",
                f"{1e6 * row['cpu_s'] / count:.0f}",
                growth,
                f"{row['iterations']:,.0f}",
                f"{row['simulated_s']:,.0f}",
                f"{busy:.0%}",
                f"{row['document_hit_rate']:.1%}",
                f"{row['ttft_mean_s']:.3f}",
                f"{row['peak_mib']:,.0f}",
                f"{row['peak_mib'] - row['base_mib']:,.0f}",
            ]
            print("| " + " | ".join(cells) + " |", flush=True)
    save(args.out, {"costs": A10G_MISTRAL_7B.name, "rate": args.rate, "versions": versions(), "rows": rows})
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
