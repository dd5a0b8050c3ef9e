"""A method whose K/V lie on a storage device: what figure 17 runs."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass

import kvreuse as kr
from experiments.environment import scratch_folder
from experiments.profiled import Device


@dataclass(frozen=True, repr=False)
class OnDevice(kr.ReuseMethod):
    """``method`` with all its K/V on ``device`` (None: in memory), and nowhere else."""

    method: kr.ReuseMethod
    device: Device | None = None

    @property
    def place(self) -> str:
        """The device, for tables."""
        return "memory" if self.device is None else self.device.label

    @property
    def label(self) -> str:
        """Method and device."""
        return f"{self.method.label}, {self.place}"

    @property
    def context(self) -> str | None:
        """What its chunks are encoded behind."""
        return getattr(self.method, "context", None)

    @property
    def encoding(self) -> str:
        """Methods share what they have stored on the same device."""
        return f"{self.method.encoding} on {self.place}"

    def open_store(self) -> kr.KVStore:
        """An empty store on the device, in a folder that goes with it."""
        if self.device is None:
            return kr.KVStore("64GiB")
        folder = ExitStack()
        store = kr.KVStore(None, self.device.at(folder.enter_context(scratch_folder())))
        weakref.finalize(store, folder.close)
        return store

    def encode(self, model: kr.ReuseModel, prompt: kr.RagPrompt, store: kr.KVStore) -> float:
        """The method's own."""
        return self.method.encode(model, prompt, store)

    def prefill(self, model: kr.ReuseModel, prompt: kr.RagPrompt, store: kr.KVStore) -> kr.Prefill:
        """The method's own."""
        return self.method.prefill(model, prompt, store)

    def __repr__(self) -> str:
        return f"{self.method!r} on {self.place}"
