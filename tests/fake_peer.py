"""A worker without a model, for tests/test_peers.py: a vocabulary of four tokens, and ways to misbehave."""

from __future__ import annotations

import math
import os
import sys
import threading
import time

from benchmarks.peer_workers.protocol import Answer, Prompt, Worker, serve

ROWS = {"sure": (0.7, 0.1, 0.1, 0.1), "unsure": (0.4, 0.2, 0.2, 0.2)}


class Fake(Worker):
    packages = ("torch",)

    def __init__(self, row: str, behaviour: str, methods: list[str]) -> None:
        self.row, self.behaviour, self.methods, self.served = row, behaviour, methods, 0

    def load(self, model: str, context: int) -> list[str]:
        print("a banner on stdout, as programs print one")
        os.write(1, b"and one from below Python\n")
        if self.behaviour == "spins":
            threading.Thread(target=self._spin, daemon=True).start()
        return self.methods

    def first(self, method: str, prompt: Prompt) -> None:
        self.served += 1
        self.prompt = prompt
        if self.behaviour == "sleeps":
            time.sleep(0.05)
        if self.behaviour == "raises" and self.served == 5:
            raise ValueError("out of pages")
        if self.behaviour == "dies" and self.served == 2:
            print("Segmentation fault", file=sys.stderr, flush=True)
            os._exit(3)
        if self.behaviour == "hangs":
            time.sleep(60)

    def answer(self, method: str, max_new_tokens: int) -> Answer:
        if self.behaviour == "text":
            return Answer(text=" ".join(map(str, self.prompt.chunks[0])), again=True)
        return Answer(token_ids=self.prompt.chunks[0], logprobs=[math.log(p) for p in ROWS[self.row]], reported_s=0.125)

    def _spin(self) -> None:
        until = time.perf_counter() + 5
        while time.perf_counter() < until:
            pass


if __name__ == "__main__":
    serve(Fake(sys.argv[1], sys.argv[2], sys.argv[3:]))
