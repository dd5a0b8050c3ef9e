"""What a results file says about where it was made."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import kvreuse
from kvreuse import demo


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that results depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvreuse": kvreuse.__version__,
    }


def processor() -> str:
    """The CPU, as far as the system names it."""
    return platform.processor() or platform.machine()


def command_line() -> str:
    """The command that is running, as it is typed."""
    script = Path(sys.argv[0])
    parents = [folder.name for folder in script.parents[:2]]
    if "experiments" not in parents:
        return shlex.join([script.name, *sys.argv[1:]])
    package = ".".join(reversed(parents[: parents.index("experiments") + 1]))
    module = package if script.stem == "__main__" else f"{package}.{script.stem}"
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def origin(name: str, model: kvreuse.ReuseModel) -> dict[str, Any]:
    """Model, machine, versions, commit, date and command: the end of every header."""
    return {
        "model": name,
        "fingerprint": model.fingerprint(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        **occasion(),
    }


def occasion() -> dict[str, Any]:
    """Versions, commit, date and command."""
    return {
        "versions": versions(),
        "commit": COMMIT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
    }


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder on a disk (the user's cache, not /tmp, which may be memory), removed afterwards."""
    demo.cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=demo.cache_folder()) as folder:
        yield Path(folder)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _git_commit() -> str | None:
    commit = _git("rev-parse", "HEAD")
    return commit and commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


# The repository's commit, with "+changes" if files differ from it; None outside a repository. Read at import: what runs
# for an hour is the code that was loaded, not what lies on the disk when a file is written.
COMMIT = _git_commit()
