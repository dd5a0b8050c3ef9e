"""What a results file says about where it was made."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch
import transformers

import kvreuse


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
    if script.parent.name != "experiments":
        return shlex.join([script.name, *sys.argv[1:]])
    module = "experiments" if script.stem == "__main__" else f"experiments.{script.stem}"
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


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
