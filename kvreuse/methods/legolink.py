"""LegoLink: recompute the first tokens of every chunk (EPIC, https://arxiv.org/abs/2410.15332)."""

from __future__ import annotations

from dataclasses import dataclass

from kvreuse.blend.fusor import Fusor
from kvreuse.blend.selectors import FirstTokens
from kvreuse.kv import ChunkEncoder, EncoderContext
from kvreuse.methods.base import ChunkReuse


@dataclass(frozen=True)
class LegoLink(ChunkReuse):
    """Recompute the first ``k`` tokens of every reused chunk on all layers; needs no check layer.

    A chunk encoded alone spends attention on its own first tokens as if they were the prompt's; recomputing them
    undoes that.
    """

    k: int = 16
    context: EncoderContext = "prefix"

    def __post_init__(self) -> None:
        FirstTokens(self.k)
        ChunkEncoder(self.context)

    def fusor(self) -> Fusor:
        """The selector's count is ``k`` per chunk; the ratio only switches it on."""
        return Fusor(FirstTokens(self.k), ratio=1.0)
