"""Layer-wise asynchronous loading: reader threads run ahead of the layer that is computed (CacheBlend, 5, figure 9)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from kvreuse.errors import LostEntryError
from kvreuse.kv import StoredKV
from kvreuse.store.disk_entry import DiskEntry

KV = tuple[torch.Tensor, torch.Tensor]
LAYERS_AHEAD = 4


class LayerLoader:
    """Hands out stored K/V layer by layer while reader threads read the next ones. A context manager.

    Args:
        sources: the entries, in prompt order; None for what is not stored.
        wanted: ``wanted(layer, index)``: whether this layer of this entry is needed at all.
        devices: where each layer is computed. For a GPU layers are read to pinned memory and copied on a side stream.
        ahead: how many layers may wait, read and not taken: what bounds the memory.
        keep: keep packed layers read from disk, for the memory tier (`read_layers`).

    Entries in main memory of a model on the CPU are handed out as they are; only what has to be read or moved goes
    through threads.
    """

    def __init__(
        self,
        sources: Sequence[StoredKV | None],
        wanted: Callable[[int, int], bool],
        devices: Sequence[torch.device],
        ahead: int = LAYERS_AHEAD,
        keep: bool = False,
    ) -> None:
        self._sources, self._wanted, self._devices = sources, wanted, devices
        self.read_layers: list[dict[int, list[torch.Tensor]]] | None = [{} for _ in sources] if keep else None
        self.source_bytes = [0] * len(sources)
        self._first_read, self._last_read = float("inf"), 0.0
        self._tasks = [
            (layer, index)
            for layer, device in enumerate(devices)
            for index, source in enumerate(sources)
            if source is not None and wanted(layer, index) and not (source.in_memory and device.type == "cpu")
        ]
        self._threaded = set(self._tasks)
        self._next, self._taken, self._limit = 0, -1, ahead
        self._loaded: dict[tuple[int, int], tuple[KV, torch.cuda.Event | None]] = {}
        self._error: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._threads: list[threading.Thread] = []

    @property
    def read_bytes(self) -> int:
        """Bytes read from disk; ``source_bytes`` has them per entry."""
        return sum(self.source_bytes)

    @property
    def read_s(self) -> float:
        """Seconds from the start of the first read to the end of the last."""
        return max(0.0, self._last_read - self._first_read)

    def __enter__(self) -> LayerLoader:
        if self._tasks:
            readers = max((s.readers for s in self._sources if isinstance(s, DiskEntry)), default=1)
            for device in set(self._devices):
                if device.type == "cuda":
                    self._streams[device] = torch.cuda.Stream(device)
            for number in range(min(readers, len(self._tasks))):
                thread = threading.Thread(target=self._read, name=f"kvreuse-reader-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the readers and wait for them: each ends after the layer it is reading."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._loaded.clear()

    def wait_all(self) -> None:
        """Wait until every layer is loaded: loading that is not overlapped with anything."""
        with self._changed:
            self._limit = len(self._devices)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or len(self._loaded) == len(self._tasks))

    def take(self, layer: int) -> list[KV | None]:
        """K/V of one layer of every entry, on the layer's device; waits for the readers.

        Each layer is taken once. Raises what went wrong in a reader, and LostEntryError with the entry's ``index``.
        """
        out: list[KV | None] = []
        for index, source in enumerate(self._sources):
            if source is None or not self._wanted(layer, index):
                out.append(None)
            elif (layer, index) in self._threaded:
                out.append(self._wait(layer, index))
            else:
                out.append(source.layer(layer))
        with self._changed:
            self._taken = layer
            self._changed.notify_all()
        return out

    def _wait(self, layer: int, index: int) -> KV:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or (layer, index) in self._loaded)
            if self._error is not None:  # also if it was a later layer: this pass cannot be finished
                raise self._error
            kv, copied = self._loaded.pop((layer, index))
        if copied is not None:
            stream = torch.cuda.current_stream(kv[0].device)
            stream.wait_event(copied)
            for tensor in kv:
                tensor.record_stream(stream)
        return kv

    # -- in the reader threads --------------------------------------------------------------------------------------

    def _read(self) -> None:
        while (task := self._next_task()) is not None:
            try:
                loaded = self._load(*task)
            except BaseException as error:
                if isinstance(error, LostEntryError):
                    error.index = task[1]
                with self._changed:
                    self._error = self._error or error
                    self._stopped = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._loaded[task] = loaded
                self._changed.notify_all()

    def _next_task(self) -> tuple[int, int] | None:
        """The next layer of an entry, once it is no more than ``ahead`` layers in front."""
        with self._changed:
            while not self._stopped:
                if self._next == len(self._tasks):
                    return None
                if self._tasks[self._next][0] <= self._taken + self._limit:
                    self._next += 1
                    return self._tasks[self._next - 1]
                self._changed.wait()
            return None

    @torch.inference_mode()
    def _load(self, layer: int, index: int) -> tuple[KV, torch.cuda.Event | None]:
        source, device = self._sources[index], self._devices[layer]
        assert source is not None
        stream = self._streams.get(device)
        if not isinstance(source, DiskEntry):
            return self._moved(list(source.layer(layer)), lambda kv: (kv[0], kv[1]), device, stream)
        started = time.perf_counter()
        parts = source.read(layer, pin_memory=stream is not None)
        ended = time.perf_counter()
        with self._changed:
            self._first_read, self._last_read = min(self._first_read, started), max(self._last_read, ended)
            self.source_bytes[index] += sum(part.numel() * part.element_size() for part in parts)
            if self.read_layers is not None:
                self.read_layers[index][layer] = parts
        return self._moved(parts, lambda moved: source.unpack(layer, moved), device, stream)

    def _moved(
        self,
        parts: list[torch.Tensor],
        unpack: Callable[[list[torch.Tensor]], KV],
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> tuple[KV, torch.cuda.Event | None]:
        if stream is None:
            return unpack([part.to(device) for part in parts]), None
        with torch.cuda.stream(stream):
            kv = unpack([part.to(device, non_blocking=True) for part in parts])
            return kv, stream.record_event()
