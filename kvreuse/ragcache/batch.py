"""`DecodeBatch`: sequences of different lengths decode together, one token each per step (continuous batching)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvreuse import compat

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel

_ROOM = 64  # columns added when the buffer is full


class _BatchLayer(DynamicLayer):
    """One layer's K/V [B, H_kv, columns, D] of all sequences, right-aligned; an update adds one column in place."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.buffers = (keys, values)

    def show(self, rows: int, first: int, end: int) -> None:
        """Before a step: the cache is columns ``first .. end`` of the first rows."""
        keys, values = (b[:rows, :, first:end] for b in self.buffers)
        compat.fill_layer(self, keys, values)
        self.rows, self.first, self.end = rows, first, end

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the next column; K/V of all columns, new one included."""
        for whole, column in zip(self.buffers, (key_states, value_states), strict=True):
            whole[: self.rows, :, self.end : self.end + 1] = column
        self.keys, self.values = (b[: self.rows, :, self.first : self.end + 1] for b in self.buffers)
        return self.keys, self.values


class DecodeBatch:
    """K/V of the sequences that decode, side by side.

    Sequence i takes the columns ``end - length_i .. end``: lengths differ on the left, where an attention mask hides
    the rest, so a step adds one column for all, and distances between columns are distances between positions. Nothing
    is copied from step to step. Each row's logits equal the sequence decoded alone, up to rounding.

    Args:
        model: runs the steps.
        max_rows: the most sequences at a time. A longrope model takes one: the longest prompt of a batch would decide
            the rotary factors of all.
    """

    def __init__(self, model: ReuseModel, max_rows: int) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows}: a batch has at least one sequence")
        self.model = model
        self.max_rows = 1 if model.long_rope_length else max_rows
        self.lengths: list[int] = []
        self._end = 0
        self._layers: list[_BatchLayer] = []

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(b.numel() * b.element_size() for layer in self._layers for b in layer.buffers)

    @torch.inference_mode()
    def join(self, cache: Cache, num_tokens: int) -> int:
        """Add a sequence with K/V of its first ``num_tokens`` tokens, which are copied. Returns its row."""
        if len(self) >= self.max_rows:
            raise ValueError(f"the batch has its {self.max_rows} sequences already")
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens}: prefill the sequence first")
        if not self._layers or num_tokens > self._end:
            self._repack(num_tokens, cache)
        row = len(self.lengths)
        for layer, held in zip(self._layers, cache.layers, strict=True):
            for buffer, part in zip(layer.buffers, (held.keys, held.values), strict=True):
                buffer[row, :, self._end - num_tokens : self._end] = part[0, :, :num_tokens]
        self.lengths.append(num_tokens)
        return row

    @torch.inference_mode()
    def leave(self, row: int) -> int:
        """Take a sequence out; the last row moves into its place. Returns the row that moved (or the one that left)."""
        last = len(self.lengths) - 1
        if not 0 <= row <= last:
            raise ValueError(f"row={row}: the batch has {last + 1} rows")
        if row != last:
            columns = slice(self._end - self.lengths[last], self._end)
            for layer in self._layers:
                for buffer in layer.buffers:
                    buffer[row, :, columns] = buffer[last, :, columns]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self._layers, self._end = [], 0
        return last

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed one token per row; logits [B, V] of the next ones."""
        rows = len(self.lengths)
        if len(tokens) != rows or rows == 0:
            raise ValueError(f"{len(tokens)} tokens for {rows} sequences")
        if self._end == self._capacity:
            self._repack(max(self.lengths))
        longest = max(self.lengths)
        for layer in self._layers:
            layer.show(rows, self._end - longest, self._end)
        device = self.model.device
        lengths = torch.tensor(self.lengths, device=device)
        ids = torch.tensor(list(tokens), device=device)[:, None]
        mask = None
        if min(self.lengths) < longest:
            mask = (torch.arange(longest + 1, device=device) >= longest - lengths[:, None]).long()
        cache = compat.new_cache(list(self._layers))
        logits = compat.run_model(self.model.hf, ids, lengths[:, None], cache, attention_mask=mask)[:, -1]
        # Only now: a step that failed has changed nothing but a column nobody looks at.
        self._end += 1
        self.lengths = [n + 1 for n in self.lengths]
        return logits

    @property
    def _capacity(self) -> int:
        return self._layers[0].buffers[0].shape[2] if self._layers else 0

    def _repack(self, end: int, like: Cache | None = None) -> None:
        """Move all sequences to end at column ``end`` of buffers with room behind."""
        end = max(end, *self.lengths, 0) if self.lengths else end
        parts = [layer.buffers for layer in self._layers] or [(h.keys, h.values) for h in like.layers]  # type: ignore[union-attr]
        layers = []
        for buffers in parts:
            new = []
            for old in buffers:
                # Zeros: a hidden column still meets a weight of zero, and zero times garbage need not be zero.
                buffer = old.new_zeros(self.max_rows, old.shape[1], end + _ROOM, old.shape[3])
                for row, length in enumerate(self.lengths):
                    buffer[row, :, end - length : end] = old[row, :, self._end - length : self._end]
                new.append(buffer)
            layers.append(_BatchLayer(*new))
        self._layers, self._end = layers, end
