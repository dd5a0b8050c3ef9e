"""Full KV reuse (PromptCache): chunk K/V are put side by side, nothing of them is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from kvreuse.blend.fusor import Fusor
from kvreuse.blend.plan import Segment, chunk_segments
from kvreuse.kv import ChunkEncoder, EncoderContext
from kvreuse.methods.base import ChunkReuse

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt

Positions = Literal["rotate", "buffer"]


@dataclass(frozen=True)
class FullReuse(ChunkReuse):
    """Reuse every chunk as it is stored (CacheBlend, 3.3). Chunks do not see each other; the question sees all.

    Args:
        context: what stands before a chunk while it is encoded (`ChunkEncoder`).
        position: ``rotate`` re-rotates one stored copy to its place; ``buffer`` encodes a copy for every place behind
            a buffer of positions, as PromptCache does. Both give the same K/V within rounding.
    """

    context: EncoderContext = "prefix"
    position: Positions = "rotate"

    def __post_init__(self) -> None:
        ChunkEncoder(self.context)
        if self.position not in get_args(Positions):
            raise ValueError(f"position={self.position!r}: choose one of {', '.join(get_args(Positions))}")

    @property
    def encoding(self) -> str:
        """Chunks encoded in the same context and, with a buffer, at the same places."""
        return super().encoding if self.position == "rotate" else f"{super().encoding}, at their places"

    def segments(self, model: ReuseModel, prompt: RagPrompt) -> list[Segment]:
        """Prefix and chunks, encoded at their own or at their target positions."""
        return chunk_segments(model, prompt, ChunkEncoder(self.context), position_buffer=self.position == "buffer")

    def fusor(self) -> Fusor:
        """Recomputes the question alone."""
        return Fusor()
