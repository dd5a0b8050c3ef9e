"""CacheBlend, figure 3: what each method answers to questions over two chunks, one about Messi, one about Ronaldo.

python -m experiments.fig03 --model demo
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import kvreuse as kr
from experiments.experiment import Experiment
from experiments.inside import number
from experiments.options import app_for
from experiments.plotting import style_of
from experiments.results import Results
from experiments.value_tables import Record, ValueTable, value_table
from experiments.worldcup import QUESTIONS, WORLD_CUP
from kvreuse.metrics import word_f1

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "One greedy answer each. F1 against the gold answer. KL: divergence from full recompute over the tokens of its own "
    "answer, nats/token. NLL: of the gold answer, nats/token."
)


def _rows(record: Record, case: Mapping[str, Record]) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    place = int(record["case_id"].rsplit("-", 1)[1])
    numbers = {
        "score": word_f1(record["answer"], record["gold"]),
        "kl": number(record["kl"]),
        "nll": number(record["nll"]),
    }
    yield {"question": QUESTIONS[place][0], "answer": record["answer"].replace("\n", " ")}, numbers


def tabulate(results: Results) -> ValueTable | None:
    """A row per method and question."""
    headings = {"score": "F1", "kl": "KL, nats/token", "nll": "NLL, nats/token"}
    return value_table(results, _rows, headings, ("question", "answer"), NOTE)


def draw(tables: list[ValueTable], paper: bool) -> Figure:
    """The answers as text, a column per question, a row per method, and the KL to full recompute under each."""
    from matplotlib.figure import Figure

    table = tables[0]
    questions = list(dict.fromkeys(table.frame["question"]))
    methods = list(dict.fromkeys(table.frame["method"]))
    figure = Figure(figsize=(2.0 + 3.1 * len(questions), 1.4 + 1.0 * len(methods)), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-0.85, len(questions))
    axes.set_ylim(len(methods) - 0.4, -0.95)
    for x, question in enumerate(questions):
        gold = next(" / ".join(answers[:1]) for text, answers in QUESTIONS if text == question)
        heading = "\n".join([*textwrap.wrap(question, 34), f"(right: {gold})"])
        axes.text(x + 0.03, -0.55, heading, fontsize=9, weight="bold", va="bottom")
    for y, method in enumerate(methods):
        rows = table.frame[table.frame["method"] == method].set_index("question")
        colour = style_of(method)[0]
        axes.axhline(y - 0.5, color="#cccccc", linewidth=0.8)
        axes.text(-0.82, y, str(rows["label"].iloc[0]), fontsize=10, color=colour, weight="bold", va="center")
        for x, question in enumerate(questions):
            row = rows.loc[question]
            answer = textwrap.shorten(str(row["answer"]), 120, placeholder=" ...") or "(empty)"
            text = "\n".join(
                [*textwrap.wrap(answer, 38), f"KL {row['kl']:.3f}, NLL of the right answer {row['nll']:.2f}"]
            )
            axes.text(x + 0.03, y, text.replace("$", r"\$"), fontsize=8.5, va="center")
    title = f"{table.header['model']}: answers over a chunk about Messi and one about Ronaldo"
    figure.suptitle(textwrap.fill(title, 20 + 25 * len(questions)), fontsize=12)
    return figure


METHODS = (
    kr.FullRecompute(),
    kr.FullReuse(context="bare"),
    kr.CacheBlend(context="bare"),
    kr.FullReuse(context="prefix"),
    kr.CacheBlend(context="prefix"),
)

FIG03 = Experiment(
    name="fig03",
    shows="answers of each method to questions over a chunk about Messi and one about Ronaldo.",
    section="CacheBlend 3.3",
    cost="half a minute",
    methods=METHODS,
    draw=draw,
    settings={"context": "given"},
    cases=WORLD_CUP,
    tabulate=tabulate,
)

if __name__ == "__main__":
    app_for(FIG03)()
