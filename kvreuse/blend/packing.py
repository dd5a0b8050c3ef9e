"""Prompts of a batch in one row of slots: how ragged prompts share one pass without padding tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packing:
    """Prompt b owns slots ``starts[b] .. starts[b] + lengths[b]``; a token's position is its slot less its start.

    A single prompt's slots are its positions.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Packing:
        """All prompts end at a multiple of the longest one's length: as a batch the buffers are padded on the left."""
        longest = max(lengths)
        return cls(tuple((b + 1) * longest - n for b, n in enumerate(lengths)), tuple(lengths))

    @property
    def num_prompts(self) -> int:
        """B."""
        return len(self.starts)

    @property
    def num_slots(self) -> int:
        """Where the last prompt ends."""
        return self.starts[-1] + self.lengths[-1]

    def split(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Sorted slots, prompt by prompt, as positions."""
        if self.num_prompts == 1:
            return [slots]
        bounds = torch.searchsorted(slots, torch.tensor(self.starts, device=slots.device)).tolist()
        stops = [*bounds[1:], slots.numel()]
        return [slots[a:b] - start for a, b, start in zip(bounds, stops, self.starts, strict=True)]

    def join(self, positions: Sequence[torch.Tensor]) -> torch.Tensor:
        """The prompts' sorted positions as one tensor of sorted slots."""
        if self.num_prompts == 1:
            return positions[0]
        return torch.cat([own + start for own, start in zip(positions, self.starts, strict=True)])

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Every slot's position in its prompt."""
        return slots if self.num_prompts == 1 else torch.cat(self.split(slots))

    def ids(self, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Token ids at their slots, [num_slots]; 0 where nothing stands."""
        if self.num_prompts == 1:
            return prompts[0]
        out = torch.zeros(self.num_slots, dtype=torch.long)
        for start, own in zip(self.starts, prompts, strict=True):
            out[start : start + own.numel()] = own
        return out

    def clear_padding(self, buffer: torch.Tensor) -> None:
        """Zero what belongs to no prompt in [1, H_kv, num_slots, D]: masked, it must still be numbers."""
        stop = 0
        for start, length in zip(self.starts, self.lengths, strict=True):
            buffer[:, :, stop:start] = 0
            stop = start + length

    def batch(self, buffer: torch.Tensor) -> torch.Tensor:
        """[1, H_kv, num_slots, D] as [B, H_kv, longest, D], padded on the left; a view (of a packing made by `of`)."""
        if self.num_prompts == 1:
            return buffer
        return buffer[0].unflatten(1, (self.num_prompts, -1)).transpose(0, 1)
