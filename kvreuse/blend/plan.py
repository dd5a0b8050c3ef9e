"""What a request reuses: where every part of the prompt stands and which stored K/V go there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvreuse.kv import ChunkEncoder, StoredKV, chunk_key

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt
    from kvreuse.store import KVStore


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of prompt tokens and the stored K/V that may stand for it.

    ``place``: position of the first token. ``context``: ids it was, or would be, encoded behind. ``start``: position
    of its first token while it is encoded. ``exact``: the stored K/V are what full prefill would compute, for nothing
    else stands before. ``long_rope``: for a prompt that a longrope model rotates with its long factors. ``stored``:
    None is a miss.
    """

    ids: torch.Tensor
    place: int
    context: torch.Tensor
    start: int
    exact: bool
    long_rope: bool = False
    stored: StoredKV | None = None

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.place + self.ids.numel()

    def key(self, fingerprint: str) -> str:
        """Its key in the store."""
        return chunk_key(fingerprint, self.context, self.start, self.ids, self.long_rope)


def chunk_segments(
    model: ReuseModel, prompt: RagPrompt, encoder: ChunkEncoder, position_buffer: bool = False
) -> list[Segment]:
    """Prefix and chunks of a prompt as segments.

    ``position_buffer``: chunks are encoded at their place in this prompt (PromptCache) instead of right behind their
    context.
    """
    context, long_rope = encoder.context_ids(model, prompt.prefix), model.long_rope(prompt.num_tokens)
    segments = []
    if prompt.prefix.numel():
        nothing = prompt.prefix[:0]
        segments.append(Segment(prompt.prefix, 0, nothing, 0, exact=True, long_rope=long_rope))
    for index, (ids, place) in enumerate(zip(prompt.chunks, prompt.chunk_starts, strict=True)):
        exact = index == 0 and torch.equal(context, prompt.prefix)
        start = max(place, context.numel()) if position_buffer else context.numel()
        segments.append(Segment(ids, place, context, start, exact, long_rope))
    return segments


def look_up(segments: list[Segment], fingerprint: str, store: KVStore) -> list[Segment]:
    """The segments with what the store has of each; K/V that several of them share are got once."""
    found: dict[str, StoredKV | None] = {}
    out = []
    for segment in segments:
        key = segment.key(fingerprint)
        if key not in found:
            found[key] = store.get(key, segment.ids, fingerprint)
        out.append(replace(segment, stored=found[key]))
    return out


def reused_positions(segments: list[Segment]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The candidates, stored tokens that are not exact: (positions, chunk index, offset in it), [n] each."""
    parts = []
    for index, segment in enumerate(segments):
        if segment.stored is not None and not segment.exact:
            n = segment.ids.numel()
            parts.append((torch.arange(segment.place, segment.stop), torch.full((n,), index), torch.arange(n)))
    if not parts:
        empty = torch.empty(0, dtype=torch.long)
        return empty, empty, empty
    positions, chunk, offset = (torch.cat(column) for column in zip(*parts, strict=True))
    return positions, chunk, offset
