"""Where raw records come from: a data folder, the Hugging Face hub, or the small sets of this project."""

from __future__ import annotations

import json
import logging
import os
import socket
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from experiments.dataset_formats import Record, Records

log = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL_SETS = REPOSITORY / "data"
DATA_VARIABLE = "KVREUSE_DATA"
SMALL = "small"  # as data folder: the small set, whatever else there is


@dataclass(frozen=True)
class HubSplit:
    """One split of a hub dataset; with `member`, a JSON Lines file inside its zip file `archive`."""

    repo: str
    split: str
    archive: str | None = None
    member: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}/{self.member or self.split}"


@dataclass(frozen=True)
class Source:
    """The places of one dataset. `files` and `hub` map a role ("cases", "shots") to its place.

    A role's files are alternatives: the first that exists is read.
    """

    files: Mapping[str, tuple[str, ...]]
    hub: Mapping[str, HubSplit] | None = None
    small: str | None = None


# SAMSum's and LongBench's own repositories rest on loading scripts, which `datasets` 4.0 stopped running:
# SAMSum comes from a copy, LongBench from its archive.
SOURCES: Mapping[str, Source] = {
    "musique": Source(
        files={"cases": ("musique/musique.jsonl",)},
        hub={"cases": HubSplit("dgslibisey/MuSiQue", "validation")},
        small="musique_small.jsonl",
    ),
    "musique_cacheblend": Source(files={"cases": ("musique_cacheblend/musique_s.json",)}),
    "2wikimqa": Source(
        files={"cases": ("2wikimultihopqa/2wikimultihopqa_dev200.jsonl", "2wikimultihopqa/dev.json")},
        hub={"cases": HubSplit("framolfese/2WikiMultihopQA", "validation")},
        small="2wikimqa_small.jsonl",
    ),
    "samsum": Source(
        files={
            "cases": ("samsum/test.jsonl",),
            "shots": ("samsum/validation.jsonl", "samsum/validation_chanys.jsonl"),
        },
        hub={
            "cases": HubSplit("knkarthick/samsum", "test"),
            "shots": HubSplit("knkarthick/samsum", "validation"),
        },
        small="samsum_small.jsonl",
    ),
    "multinews": Source(
        files={"cases": ("multi_news_longbench/multi_news.jsonl",)},
        hub={"cases": HubSplit("zai-org/LongBench", "test", archive="data.zip", member="data/multi_news.jsonl")},
        small="multinews_small.jsonl",
    ),
}


def fetch(name: str, data_dir: str | os.PathLike[str] | None) -> tuple[str, Records]:
    """Records of dataset `name` from the first place that has them, and that place's name.

    Order: `data_dir`, else the environment's KVREUSE_DATA ("small" is the small set; `FileNotFoundError` if a
    folder lacks the file); `../shared/data` beside the repository, if it has the files; the hub; the small set.
    """
    source = SOURCES[name]
    named = data_dir or os.environ.get(DATA_VARIABLE)
    if named and str(named) != SMALL:
        folder = Path(named).expanduser().resolve()
        return f"data-dir:{folder}", _from_folder(name, source, folder)
    if not named:
        beside = REPOSITORY.parent / "shared" / "data"
        if all(_first_file(beside, names) for names in source.files.values()):
            return f"data-dir:{beside} (found beside the repository)", _from_folder(name, source, beside)
        if source.hub and (records := _from_hub(source.hub)):
            return f"hub:{source.hub['cases']}", records
    if source.small:
        return "small set", _by_role(read_records(SMALL_SETS / source.small))
    expected = ", ".join(names[0] for names in source.files.values())
    raise FileNotFoundError(
        f"dataset {name!r} is neither on the hub nor among the small sets; put {expected} under a folder and "
        f"name that folder with data_dir= or {DATA_VARIABLE}, or use the dataset 'musique'"
    )


def read_records(path: Path) -> list[Record]:
    """A `.json` file's list or a `.jsonl` file's lines. Raises `ValueError` naming file and line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            records = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}); download it again") from None
        if not isinstance(records, list):
            raise ValueError(f"{path} must hold a JSON list of records, not a {type(records).__name__}")
        records = [_as_record(record, f"{path}, record {n}") for n, record in enumerate(records)]
    else:
        records = [_record(line, f"{path}, line {n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not records:
        raise ValueError(f"{path} holds no records; download it again")
    return records


def _record(line: str, place: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}); download the file again") from None
    return _as_record(record, place)


def _as_record(record: Any, place: str) -> Record:
    if not isinstance(record, dict):
        raise ValueError(f"{place} holds a {type(record).__name__} where a JSON object is expected")
    return record


def _first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _from_folder(name: str, source: Source, folder: Path) -> Records:
    records = {}
    for role, names in source.files.items():
        path = _first_file(folder, names)
        if path is None:
            expected = " or ".join(str(folder / name) for name in names)
            raise FileNotFoundError(
                f"dataset {name!r} expects {expected}, which does not exist; put the file there (see "
                f"data/README.md), name another folder with data_dir= or {DATA_VARIABLE}, or name none to "
                f"use the hub or the small set"
            )
        records[role] = read_records(path)
    return records


def _by_role(records: list[Record]) -> Records:
    """A small SAMSum file holds both splits; in every other small set each record is a case."""
    shots = [record for record in records if record.get("split") == "validation"]
    return {"cases": [record for record in records if record.get("split") != "validation"], "shots": shots}


def _from_hub(hub: Mapping[str, HubSplit]) -> Records | None:
    """None, at once and with one line of log, when the hub cannot be used here."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"} or not _hub_reachable():
        log.info("Hugging Face hub is offline; using the small set")
        return None
    try:
        return {role: _hub_records(place) for role, place in hub.items()}
    except ImportError:
        log.info("`datasets` is not installed (pip install 'kvreuse[experiments]'); using the small set")
    except Exception as error:  # the hub's clients raise dozens of kinds; every one means "not from the hub"
        log.warning("could not load %s from the hub (%s); using the small set", hub["cases"], error)
    return None


def _hub_records(place: HubSplit) -> list[Record]:
    if place.archive and place.member:
        from huggingface_hub import hf_hub_download

        archive = hf_hub_download(place.repo, place.archive, repo_type="dataset")
        with zipfile.ZipFile(archive) as opened:
            lines = opened.read(place.member).decode("utf-8").split("\n")
        return [_record(line, f"{place}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    import datasets

    rows: Any = datasets.load_dataset(place.repo, split=place.split)
    return list(rows)


def _hub_reachable(timeout_s: float = 2.0) -> bool:
    """Whether the hub's host answers: the hub's own clients retry for minutes where there is no network."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # only the clients can tell what a proxy lets through
    endpoint = urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "huggingface.co", port), timeout_s).close()
    except OSError:
        return False
    return True
