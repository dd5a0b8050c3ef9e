"""The shared runner: one model, one dataset, some methods; one raw record per case and method."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import kvreuse as kr
from experiments.contexts import cutting, make_chunker, resolve_context
from experiments.datasets import Case, Dataset, load_dataset
from experiments.environment import origin
from experiments.measure import Measurement, gold_ids, measure_case, method_names
from experiments.models import model_named
from experiments.results import RecordWriter, partial_path, read_results

# (methods, model, measurement, case number, repeats, warm) -> the case's records, one per method, as they come
Measure = Callable[[Sequence[kr.ReuseMethod], kr.ReuseModel, Measurement, int, int, bool], Iterable[dict[str, Any]]]


@dataclass(frozen=True, repr=False)
class RunConfig:
    """What a run computes; its repr is the configuration in the header, its hash part of the file's name.

    Args:
        figure: which script runs it.
        model: "demo", a hub id or a folder.
        dataset: a name of `experiments.datasets`.
        methods: in the order of the table; `FullRecompute` first, as the reference of KL divergence.
        limit: at most this many cases.
        small: take the project's own small set whatever else is there.
        context: ``auto``, ``paragraphs``, ``retrieve``, ... (`experiments.contexts`).
        num_chunks, chunk_tokens: chunks of a prompt, and a piece's most tokens where texts are cut.
        max_new_tokens: of an answer; the task's own limit if None.
        score_tokens: KL divergence and likelihood are taken over at most this many tokens of an answer.
        repeats: TTFT measurements per case and method; their median is recorded.
        batch_size: each case's prompt runs in one batch with those of the cases behind it, so many in all.
        cut_words: chunks are cut to their first so many words, whatever is lost with the rest; for smoke runs.
        device, dtype, quantization, threads: as in `kr.load_model`; threads of PyTorch.
    """

    figure: str
    model: str
    dataset: str
    methods: tuple[kr.ReuseMethod, ...]
    limit: int | None = None
    small: bool = False
    data_dir: str | None = None
    context: str = "auto"
    num_chunks: int = 6
    chunk_tokens: int = 512
    max_new_tokens: int | None = None
    score_tokens: int = 128
    repeats: int = 1
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    threads: int | None = None
    seed: int = 0
    batch_size: int = 1
    cut_words: int | None = None

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("methods is empty: give at least one method to run")
        if len(set(map(repr, self.methods))) < len(self.methods):
            raise ValueError("methods has one configuration twice: each is run once per case")
        for name in (
            "num_chunks",
            "chunk_tokens",
            "max_new_tokens",
            "score_tokens",
            "repeats",
            "threads",
            "batch_size",
            "cut_words",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")

    def __repr__(self) -> str:
        """As a dataclass's, without the settings that came later where they are at rest: names of records stay."""
        late = {"batch_size": 1, "cut_words": None}
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        return f"RunConfig({', '.join(f'{k}={v!r}' for k, v in shown.items() if k not in late or v != late[k])})"

    @property
    def file_name(self) -> str:
        """Readable, and different for every configuration."""
        model = re.sub(r"[^A-Za-z0-9.]+", "-", Path(self.model).name).strip("-") or "model"
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
        return f"{self.figure}-{self.dataset}-{model}-{digest}.jsonl"


def run(
    config: RunConfig,
    folder: Path,
    load: Callable[[], kr.ReuseModel] | None = None,
    force: bool = False,
    dataset: Dataset | None = None,
    measure: Measure = measure_case,
) -> Path:
    """Run what is missing of ``config`` and return its results file.

    A complete file is kept as it is, a partial one continued if model, data, versions and machine are still the same.

    Args:
        folder: of the results files.
        load: gives the model; `kr.load_model` with the configuration's settings if None.
        force: run everything again.
        dataset: cases of your own, under a name of their own; those of ``config.dataset`` if None.
        measure: what is recorded of a case.
    """
    path = folder / config.file_name
    if path.is_file() and not force:
        say(f"{config.dataset}: {path} is complete ({read_results(path).header['date']}); --force runs it again")
        return path
    dataset = _load_dataset(config) if dataset is None else replace(dataset, cases=dataset.cases[: config.limit])
    model = load() if load is not None else load_model(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    context = resolve_context(dataset, config.context)
    header = _header(config, dataset, model, context)
    chunker = make_chunker(dataset, model, context, config.num_chunks, config.chunk_tokens, config.seed)
    if config.cut_words is not None:
        chunker = cutting(chunker, config.cut_words)
    resumable = partial_path(path).is_file() and not force
    path.unlink(missing_ok=True)  # with force; what replaces it is the partial file from now on
    with RecordWriter(path, header, [repr(m) for m in config.methods], force) as writer:
        if resumable:
            say(f"{config.dataset}: continuing, {len(writer.done)} of {len(dataset.cases)} cases are there")
        _run_cases(config, dataset, model, chunker, writer, measure)
        return writer.finish()


def load_model(config: RunConfig) -> kr.ReuseModel:
    """The configuration's model."""
    return model_named(config.model, config.device, config.dtype, config.quantization)


def say(text: str) -> None:
    """One line on stderr, for people; stdout is for tables."""
    print(text, file=sys.stderr, flush=True)


def _load_dataset(config: RunConfig) -> Dataset:
    data_dir = "small" if config.small else config.data_dir
    return load_dataset(config.dataset, data_dir=data_dir, limit=config.limit, seed=config.seed)


def _run_cases(
    config: RunConfig,
    dataset: Dataset,
    model: kr.ReuseModel,
    chunker: Callable[[Case], list[str]],
    writer: RecordWriter,
    measure: Measure,
) -> None:
    from tqdm import tqdm

    warm, skipped, failed, tried = False, 0, 0, len(writer.done)
    if len(dataset.cases) < config.batch_size:
        raise ValueError(f"batch_size={config.batch_size}: {dataset.name} has {len(dataset.cases)} cases, too few")
    with tqdm(total=len(dataset.cases), initial=len(writer.done), desc=dataset.name, unit="case") as bar:
        for number, case in enumerate(dataset.cases):
            if case.case_id in writer.done:
                continue
            measurement = _prepare(config, dataset, model, chunker(case), case)
            needed = _needed(measurement)
            if needed > model.max_context:
                skipped += 1
                reason = f"prompt and answer need {needed} tokens, {model.name} takes {model.max_context}"
                writer.write({"case_id": case.case_id, "skipped": reason})
            else:
                if config.batch_size > 1:
                    behind = [*dataset.cases[number + 1 :], *dataset.cases[:number]]
                    others = (_prepare(config, dataset, model, chunker(c), c) for c in behind)
                    fitting = (m.prompt for m in others if _needed(m) <= model.max_context)
                    measurement = replace(measurement, others=tuple(islice(fitting, config.batch_size - 1)))
                # A run's first case may not fail: what breaks there breaks everywhere.
                done = _record_case(config, model, measurement, writer, measure, number, warm, tried > 0)
                failed, warm, tried = failed + (not done), warm or done, tried + 1
            bar.update()
    if skipped:
        say(f"{dataset.name}: {skipped} of {len(dataset.cases)} cases are too long for {model.name} and were skipped")
    if failed:
        say(f"{dataset.name}: {failed} cases failed; their records say why, and they are not in the tables")


def _needed(measurement: Measurement) -> int:
    """Tokens of prompt and answer together."""
    return measurement.prompt.num_tokens + max(measurement.max_new_tokens, len(measurement.gold))


def _prepare(config: RunConfig, dataset: Dataset, model: kr.ReuseModel, chunks: list[str], case: Case) -> Measurement:
    task = dataset.task
    question = task.question_template.format(question=case.question)
    # LongBench leaves the chat template out of few-shot prompts: the shots show the form of the answer.
    template = False if task.kind == "few_shot" else None
    prompt = kr.RagPrompt.from_texts(
        model, system=task.system, chunks=chunks, question=question, chat_template=template
    )
    gold = gold_ids(model, prompt, case.answers[0])[: config.score_tokens]
    return Measurement(case, prompt, gold, config.max_new_tokens or task.max_new_tokens, task.stop, config.score_tokens)


def _record_case(
    config: RunConfig,
    model: kr.ReuseModel,
    measurement: Measurement,
    writer: RecordWriter,
    measure: Measure,
    number: int,
    warm: bool,
    may_fail: bool,
) -> bool:
    """Write one case's records as they come; False if it failed."""
    missing = {repr(m): None for m in config.methods}
    try:
        for record in measure(config.methods, model, measurement, number, config.repeats, warm):
            writer.write(record)
            del missing[record["method"]]
    except Exception as error:  # out of memory on one long prompt, say, must not end an hour's run
        if not may_fail:
            raise
        for name in missing:
            text = f"{type(error).__name__}: {error}"
            writer.write({"case_id": measurement.case.case_id, "method": name, "error": text})
    return not missing


def _header(config: RunConfig, dataset: Dataset, model: kr.ReuseModel, context: str) -> dict[str, Any]:
    return {
        "config": repr(config),
        "figure": config.figure,
        "dataset": dataset.name,
        "source": dataset.source,
        "num_cases": len(dataset.cases),
        "metric": dataset.task.metric,
        "context": context,
        "num_chunks": config.num_chunks,
        "chunk_tokens": config.chunk_tokens,
        "max_new_tokens": config.max_new_tokens or dataset.task.max_new_tokens,
        "score_tokens": config.score_tokens,
        "batch_size": config.batch_size,
        "methods": [
            {"method": repr(m), "label": name, "context": getattr(m, "context", None)}
            for m, name in zip(config.methods, method_names(config.methods).values(), strict=True)
        ],
        **origin(config.model, model),
    }
