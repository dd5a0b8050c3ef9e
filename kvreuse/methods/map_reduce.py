"""MapReduce (LangChain): every chunk is condensed alone, the answer is read from the condensed parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvreuse.methods.map_passes import MapMethod
from kvreuse.prompt import RagPrompt
from kvreuse.results import Prefill, full_prefill
from kvreuse.store import KVStore

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel

# LangChain's question-answering map prompt; it stands behind the document here, so that the document's K/V can be
# reused.
MAP_INSTRUCTION = (
    "Use the above portion of a long document to see if any of the text is relevant to answer the question. "
    "Return any relevant text verbatim.\n\n"
)


@dataclass(frozen=True)
class MapReduce(MapMethod):
    """Map: one pass per chunk returns what is relevant, all chunks in one batch. Reduce: the answer from those texts
    (7.1).

    Args:
        map_tokens: the most tokens taken from each chunk's pass.
        instruction: put between chunk and question in the map pass.
    """

    map_tokens: int = 64
    instruction: str = MAP_INSTRUCTION

    def __post_init__(self) -> None:
        if self.map_tokens < 1:
            raise ValueError(f"map_tokens={self.map_tokens}: each chunk's pass needs at least one token")

    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: KVStore) -> Prefill:
        """Map all chunks, then prefill the reduced prompt; ``result.prompt`` is the reduced one."""
        mapped, timer = self.map_chunks(model, prompt, store, self.map_tokens)
        separator = model.tokenize("\n\n")
        texts = [torch.cat([torch.tensor(m.token_ids), separator]) for m in mapped if m.token_ids]
        reduced = RagPrompt(prompt.prefix, texts or [separator], prompt.question)
        return full_prefill(model, reduced, timer)
