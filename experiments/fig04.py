"""CacheBlend, figure 4: attention between two chunks, under full recompute and under reuse, which never computed it.

python -m experiments.fig04 --model demo
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

import kvreuse as kr
from experiments.experiment import Experiment
from experiments.inside import rounded
from experiments.measure import STORE_BYTES, Measurement, method_names
from experiments.options import app_for
from experiments.plotting import new_figure
from experiments.results import Results
from experiments.value_tables import Record, ValueTable, value_table
from experiments.worldcup import WORLD_CUP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "Attention weights, mean over heads and over the layers behind layer 1, of every row as it was computed: in the "
    "request where it was recomputed, else when its chunk was encoded. Cross-attention: mean over the second chunk's "
    "rows of the weight they give the first chunk; from the question: the weight the question's rows give both chunks."
)
FIRST_LAYER = 2  # HKVD runs all rows through layer 0 and all K/V on layer 1: what lies behind shows the selection


def measure(
    methods: Sequence[kr.ReuseMethod],
    model: kr.ReuseModel,
    measurement: Measurement,
    number: int = 0,
    repeats: int = 1,
    warm: bool = True,
) -> Iterator[dict[str, Any]]:
    """One record per method with its attention matrix [S, S] (lower triangle, row by row)."""
    prompt, names = measurement.prompt, method_names(methods)
    layers = tuple(range(min(FIRST_LAYER, model.num_layers - 1), model.num_layers))
    everything = kr.AttentionMatrix(layers, tokens="all")
    for method in methods:
        store = kr.KVStore(STORE_BYTES)
        method.encode(model, prompt, store)
        with model.record(everything) as rec:
            result = method.prefill(model, prompt, store)
            ran = rec.attention_matrix.mean(dim=1)  # [layers, S, S]
        if result.trace.num_reused:
            encoded = _encoded(model, method, prompt, everything)
            ran = torch.where(ran.isnan(), encoded, ran)
        matrix = ran.mean(dim=0)
        yield {
            "case_id": measurement.case.case_id,
            "method": repr(method),
            "label": names[repr(method)],
            "prompt_tokens": prompt.num_tokens,
            "starts": [*prompt.chunk_starts, prompt.num_context],
            "recomputed": [int(p) for p in result.trace.selected[-1]],
            "attention": [rounded(row[: i + 1].tolist(), 3) for i, row in enumerate(matrix)],
            "error": None,
        }


def _encoded(
    model: kr.ReuseModel, method: kr.ReuseMethod, prompt: kr.RagPrompt, recorder: kr.AttentionMatrix
) -> torch.Tensor:
    """Attention [layers, S, S] when prefix and chunks were encoded, each at its place; zero where nothing was seen."""
    out: torch.Tensor | None = None
    behind = prompt.prefix if getattr(method, "context", None) == "prefix" else prompt.prefix[:0]
    parts = [
        (prompt.prefix, 0, prompt.prefix[:0]),
        *((c, s, behind) for c, s in zip(prompt.chunks, prompt.chunk_starts, strict=True)),
    ]
    for ids, place, context in parts:
        if ids.numel() < 2:
            continue
        alone = kr.RagPrompt(
            context, [ids[:-1]], ids[-1:]
        )  # all of it is recomputed: where the question starts is all one
        with model.record(recorder) as rec:
            kr.FullRecompute().prefill(model, alone)
            weights = rec.attention_matrix.mean(dim=1)
        n = context.numel()
        if out is None:
            out = weights.new_zeros(weights.shape[0], prompt.num_tokens, prompt.num_tokens)
        rows = slice(place, place + ids.numel())
        out[:, rows, rows] = weights[:, n:, n:]
        out[:, rows, :n] = weights[:, n:, :n]
    assert out is not None
    return out


def _rows(record: Record, case: Mapping[str, Record]) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    first, second, question = record["starts"]
    attention = record["attention"]
    cross = [sum(row[first:second]) for row in attention[second:question]]
    asked = [sum(row[first:question]) for row in attention[question:]]
    numbers = {"cross": sum(cross) / len(cross), "question": sum(asked) / len(asked)}
    numbers["rows"] = len([p for p in record["recomputed"] if second <= p < question]) / (question - second)
    yield {}, numbers


def tabulate(results: Results) -> ValueTable | None:
    """A row per method."""
    headings = {
        "cross": "cross-attention, chunk 2 to chunk 1",
        "question": "from the question to both",
        "rows": "chunk 2 recomputed on the last layer",
    }
    return value_table(results, _rows, headings, (), NOTE)


def draw(tables: list[ValueTable], paper: bool) -> Figure:
    """A heat map per method; the block that is missing under reuse is framed."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    table = tables[0]
    columns = 2 if len(table.records) > 3 else len(table.records)
    rows = -(-len(table.records) // columns)
    figure, panels = new_figure(rows, columns)
    figure.set_size_inches(5.0 * columns, 0.9 + 4.4 * rows)
    colours = colormaps["cividis"].with_extremes(bad="#e8e8e8")
    order = {m["method"]: i for i, m in enumerate(table.header["methods"])}
    records = sorted(table.records, key=lambda r: order[r["method"]])
    for axes, record in zip(panels.flat, records, strict=False):
        size = record["prompt_tokens"]
        matrix = torch.full((size, size), float("nan"))
        for i, row in enumerate(record["attention"]):
            matrix[i, : i + 1] = torch.tensor([v if v else float("nan") for v in row], dtype=torch.float32)
        image = axes.imshow(matrix.numpy(), cmap=colours, norm=LogNorm(1e-4, 1e-1, clip=True), interpolation="nearest")
        first, second, question = record["starts"]
        frame: Any = {"fill": False, "edgecolor": "#D55E00", "linewidth": 1.8, "linestyle": "--"}
        axes.add_patch(Rectangle((first - 0.5, second - 0.5), second - first, question - second, **frame))
        edges = [0, first, second, question, size]
        middles = [(a + b) / 2 for a, b in pairwise(edges)]
        names = ["prefix", "Messi", "Ronaldo", "question"]
        axes.set_xticks(middles, names, fontsize=8)
        axes.set_yticks(middles, names, fontsize=8, rotation=90, va="center")
        for at in edges[1:-1]:
            for line in (axes.axvline, axes.axhline):
                line(at - 0.5, color="#D55E00", linewidth=0.5, linestyle=":")
        axes.tick_params(length=0)
        cross = table.frame.set_index("method")["cross"][record["method"]]
        axes.set_title(f"{record['label']}\nchunk 2 gives chunk 1 {cross:.3f} of its attention", fontsize=10)
        axes.set_xlabel("key")
        axes.set_ylabel("query")
    for axes in panels.flat[len(records) :]:
        axes.set_axis_off()
    bar = figure.colorbar(image, ax=panels, shrink=0.6, extend="both")
    bar.set_label("attention weight, mean over heads and layers (grey: none)")
    figure.suptitle(
        f"{table.header['model']}: attention by key and query; dashed: cross-attention of the chunks", fontsize=11
    )
    return figure


FIG04 = Experiment(
    name="fig04",
    shows="attention matrices of full recompute, full reuse and CacheBlend; cross-attention between chunks.",
    section="CacheBlend 3.3",
    cost="half a minute",
    methods=(
        kr.FullRecompute(),
        kr.FullReuse(context="bare"),
        kr.FullReuse(context="prefix"),
        kr.CacheBlend(context="prefix"),
    ),
    draw=draw,
    settings={"context": "given"},
    cases=dataclasses.replace(WORLD_CUP, cases=WORLD_CUP.cases[:1]),
    measure=measure,
    tabulate=tabulate,
)

if __name__ == "__main__":
    app_for(FIG04)()
