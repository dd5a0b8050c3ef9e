"""Raw per-request records of one configuration, as a JSON-lines file: a header, then one record per case and method.

Records go to ``NAME.jsonl.partial`` as they come; the file gets its final name when the run is complete. What an
interrupted run has left is read, drawn and continued. Nothing derived from text is stored: metrics are computed later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

Record = Mapping[str, Any]

# What may differ between the two halves of one run without making them two runs.
VOLATILE = frozenset({"date", "command"})


@dataclass(frozen=True)
class Results:
    """One file, read: ``header``, ``records`` in file order, and whether the run was complete."""

    header: dict[str, Any]
    records: list[dict[str, Any]]
    complete: bool


def partial_path(path: Path) -> Path:
    """Where the records of an unfinished run are."""
    return path.with_name(path.name + ".partial")


def find_results(path: Path) -> Path | None:
    """``path`` itself, or its partial file, or None."""
    return next((p for p in (path, partial_path(path)) if p.is_file()), None)


def results_to_draw(path: Path) -> Path:
    """As `find_results`; raises FileNotFoundError where there is neither."""
    found = find_results(path)
    if found is None:
        raise FileNotFoundError(f"no results to draw: {path} is not there; run it first")
    return found


def read_results(path: Path) -> Results:
    """Header and records of a results file or a partial one. A last line that was cut off is left out.

    Raises:
        ValueError: there is no header, or a line before the last is not JSON.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    tail = lines.pop()  # empty when the last line was written whole
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); run again with --force") from None
    if not rows or "config" not in rows[0]:
        found = "is cut off in its header" if tail and not rows else "has no header"
        raise ValueError(f"{path} {found}; run again with --force")
    return Results(rows[0], rows[1:], not path.name.endswith(".partial"))


def same_run(header: Record, other: Record) -> bool:
    """Whether two headers describe the same configuration, data, model, versions and machine."""
    return {k: v for k, v in header.items() if k not in VOLATILE} == {
        k: v for k, v in other.items() if k not in VOLATILE
    }


class RecordWriter:
    """Writes one run's records; a context manager. Leaving it by an exception keeps the partial file.

    Args:
        path: the final name.
        header: first line; JSON values only.
        methods: the reprs of which each case has one record; a case that lacks one is run again.
        force: begin anew even if there is a partial file.

    Attributes:
        done: ids of the cases that are complete already.
    """

    def __init__(self, path: Path, header: Record, methods: Collection[str], force: bool = False) -> None:
        self.path = path
        self.done: set[str] = set()
        partial = partial_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if force else self._kept_records(partial, header, methods)
        # Rewritten beside and renamed, so that a crash here loses nothing either.
        fresh = partial.with_name(partial.name + ".new")
        with fresh.open("w", encoding="utf-8") as file:
            file.writelines(_line(row) for row in (header, *kept))
        os.replace(fresh, partial)
        self._file: TextIO = partial.open("a", encoding="utf-8")

    def _kept_records(self, partial: Path, header: Record, methods: Collection[str]) -> list[dict[str, Any]]:
        if not partial.is_file():
            return []
        try:
            found = read_results(partial)
        except ValueError:
            return []
        if not same_run(found.header, json.loads(json.dumps(header))):
            return []
        self.done = complete_cases(found.records, methods)
        return [r for r in found.records if r["case_id"] in self.done]

    def write(self, record: Record) -> None:
        """Append one record; it is on its way to the disk when this returns."""
        self._file.write(_line(record))
        self._file.flush()

    def finish(self) -> Path:
        """The run is complete: give the file its final name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(partial_path(self.path), self.path)
        return self.path

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def complete_cases(records: Collection[Record], methods: Collection[str]) -> set[str]:
    """Ids of the cases that were skipped as too long, or have a record of every method and no error."""
    seen: dict[str, set[str]] = {}
    for record in records:
        found = methods if record.get("skipped") else [] if record.get("error") else [str(record["method"])]
        seen.setdefault(record["case_id"], set()).update(found)
    return {case_id for case_id, found in seen.items() if found >= set(methods)}


def _line(row: Record) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
