"""A worker as the parent sees it: a process that answers one JSON line with one JSON line."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.peer_env import ROOT, PeerUnavailable


class PeerProcess:
    """A long-lived worker.

    ``idle_cpu_s``: processor seconds that it used between a reply and the next request, while others were timed.

    Args:
        name: of the peer.
        command: starts the worker.
        env: its whole environment.
        log: where its stderr goes.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name, self.log, self.idle_cpu_s = name, log, 0.0
        self._cpu_s: float | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=env
            )

    def ask(self, do: str, timeout_s: float = 600.0, **message: Any) -> dict[str, Any]:
        """Its reply; ``waited_s``: wall-clock seconds from request to reply; ``used_s``: processor seconds it took.

        Raises:
            PeerUnavailable: it failed, died, or took longer than ``timeout_s`` (and was stopped).
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = json.dumps({"do": do, **message}) + "\n"
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        try:
            started = time.perf_counter()
            self._process.stdin.write(request)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            waited_s = time.perf_counter() - started
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            raise PeerUnavailable(f"{do}: the worker ended (code {self._process.wait()}): {self._last_words()}")
        reply = json.loads(line)
        before_s, after_s = reply.pop("cpu_s")
        if self._cpu_s is not None:
            self.idle_cpu_s += before_s - self._cpu_s
        self._cpu_s = after_s
        if "error" in reply:
            raise PeerUnavailable(f"{do}: {reply['error']}")
        return {**reply, "waited_s": waited_s, "used_s": after_s - before_s}

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it had ended with a request unread
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), f"nothing in {self.log}")
