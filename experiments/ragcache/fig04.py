"""RAGCache, figure 4: prefill with a cached prefix, with and without bringing it in, beside full prefill.

python -m experiments.ragcache.fig04 --model demo --threads 1
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

import kvreuse as kr
from experiments.environment import scratch_folder
from experiments.plotting import log_axis, tidy
from experiments.ragcache.fig02 import machine, quartiles
from experiments.results import Results
from experiments.timed import Records, TimedConfig, TimedExperiment, prompt_of, timed_app

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

NEW_TOKENS = 32  # of the request behind the prefix, as in the paper
HALVINGS = 5
METHODS = ("full prefill", "cached prefix", "cached prefix, from host", "cached prefix, from disk")
STYLE = {
    "full prefill": ("#000000", "s", "-"),
    "cached prefix": ("#009E73", "o", "-"),
    "cached prefix, from host": ("#009E73", "^", "--"),
    "cached prefix, from disk": ("#009E73", "D", ":"),
}
NOTES = (
    f"{NEW_TOKENS} new tokens behind a prefix. Cached: the prefix's K/V are in the tree's first tier. From host: they "
    "are in its second and are copied first; on a machine without a GPU both are main memory, so this is a copy and no "
    "PCIe transfer. From disk: one file, read cold. Medians over interleaved rounds with quartiles; ratios are paired "
    "within rounds."
)


def measure(config: TimedConfig, model: kr.ReuseModel) -> Records:
    """Rounds over all prefix lengths and kinds of prefill."""
    ids = prompt_of(config, model).input_ids
    total = config.num_chunks * config.chunk_tokens
    ids = ids.repeat(-(-(total + NEW_TOKENS) // ids.numel()))
    lengths = sorted({max(16, total >> step) for step in range(HALVINGS)})
    with scratch_folder() as folder:
        device = kr.StorageDevice(folder, "64GiB", name="this disk", cold=True)
        cases = {length: _Case(model, ids, length, device) for length in lengths}
        for number in tqdm(range(-1, config.repeats), desc="rounds"):
            shift = max(0, number) % len(METHODS)
            rows = []
            for length in lengths[:1] if number < 0 else lengths:
                for method in METHODS[shift:] + METHODS[:shift]:
                    seconds = cases[length].seconds(method)
                    record = {"case_id": f"round-{number}", "method": f"{method}, {length}", "kind": method}
                    rows.append(record | {"prefix_tokens": length, "ttft_s": seconds})
            if number >= 0:
                yield from rows


class _Case:
    """One prefix, held by a tree and on a disk; times each kind of prefill behind it."""

    def __init__(self, model: kr.ReuseModel, ids: torch.Tensor, length: int, device: kr.StorageDevice) -> None:
        self._model = model
        prefix, question = ids[:length], ids[length : length + NEW_TOKENS]
        self._prompt = kr.RagPrompt([], [prefix], question)
        self._tree = kr.TreeCache(model, torch.empty(0, dtype=torch.long), "32GiB", "32GiB")
        self._store = kr.KVStore(None, device)
        kr.RagCache().encode(model, self._prompt, self._tree)
        kr.FullReuse().encode(model, self._prompt, self._store)

    def seconds(self, method: str) -> float:
        """TTFT of one prefill."""
        if method == "full prefill":
            return kr.FullRecompute().prefill(self._model, self._prompt, kr.KVStore()).ttft_s
        if method == "cached prefix, from disk":
            # One chunk at its own place: what full reuse loads is the exact prefix.
            return kr.FullReuse().prefill(self._model, self._prompt, self._store).ttft_s
        if method == "cached prefix, from host":
            self._tree.tree.replicate("32GiB")
            self._tree.tree.lose_gpu()
        started = time.perf_counter()
        self._tree.prefill(self._prompt, insert=False, update=False)
        return time.perf_counter() - started


def _by_length(results: Results) -> dict[int, dict[str, list[float]]]:
    """Prefix length -> kind -> seconds, in the order of rounds."""
    found: dict[int, dict[str, list[float]]] = {}
    for record in sorted(results.records, key=lambda r: r["case_id"]):
        kinds = found.setdefault(record["prefix_tokens"], {})
        kinds.setdefault(record["kind"], []).append(record["ttft_s"])
    return dict(sorted(found.items()))


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per prefix length."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for length, kinds in _by_length(results).items():
        row: dict[str, Any] = {"prefix tokens": length}
        row |= {f"{kind}, s": statistics.median(kinds[kind]) for kind in METHODS}
        for kind in METHODS[1:]:
            ratio = [full / part for full, part in zip(kinds["full prefill"], kinds[kind], strict=True)]
            low, middle, high = quartiles(ratio)
            row[f"full / {kind}"] = f"{middle:.1f} ({low:.1f}-{high:.1f})"
        rows.append(row)
    return pd.DataFrame(rows), NOTES


def draw(results: Results) -> Figure:
    """Left: seconds over the prefix's length. Right: how many times faster than full prefill."""
    from matplotlib.figure import Figure

    lengths = _by_length(results)
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, (colour, marker, line) in STYLE.items():
        middle = [quartiles(kinds[kind]) for kinds in lengths.values()]
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line, "label": kind}
        error = [[m - low for low, m, _ in middle], [high - m for _, m, high in middle]]
        left.errorbar(list(lengths), [m for _, m, _ in middle], yerr=error, capsize=2, **style)
        if kind != "full prefill":
            ratios = [
                quartiles([f / c for f, c in zip(kinds["full prefill"], kinds[kind], strict=True)])[1]
                for kinds in lengths.values()
            ]
            right.plot(list(lengths), ratios, **style)
    log_axis(left, which="y")
    left.set_ylabel("TTFT (s, log scale; median and quartiles)")
    right.set_ylabel("times faster than full prefill")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel(f"tokens of the prefix ({NEW_TOKENS} new ones behind it)")
        tidy(axes)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    h = results.header
    figure.suptitle(f"{machine(h)}: prefill behind a cached prefix", fontsize=11)
    return figure


FIG04 = TimedExperiment(
    name="ragcache.fig04",
    shows="prefill with a cached prefix, with and without bringing it in, beside full prefill.",
    measure=measure,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 3.2",
    cost="two and a half minutes",
    repeats=5,
)

if __name__ == "__main__":
    timed_app(FIG04)()
