"""RAGCache and the systems it is compared with, as configurations of one simulator: what is cached, and who is next."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvreuse.ragcache.node import Document
from kvreuse.ragcache.policies import LRU, PGDSF, Policy
from kvreuse.ragcache.speculative import Documents


@dataclass(frozen=True)
class System:
    """How a server caches and schedules.

    Args:
        name: for tables and legends.
        policy: what leaves a tier first.
        host: whether what leaves GPU memory goes to host memory.
        window: how often a request may be overtaken by one with more cached; 0 serves first come, first served.
        speculate: whether a prefill may start during the search.
        block_tokens: None caches whole documents; a number caches full blocks of so many tokens, whatever documents
            they belong to. Nothing but the system prompt and documents is cached: no questions, no answers.
        reuse: False caches nothing but the system prompt.
        max_depth: keep no document (or block) behind this many.
    """

    name: str
    policy: Policy = field(default_factory=PGDSF)
    host: bool = True
    window: int = 32
    speculate: bool = True
    block_tokens: int | None = None
    reuse: bool = True
    max_depth: int | None = None

    def __post_init__(self) -> None:
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ValueError(f"block_tokens={self.block_tokens}: a block has at least one token; None for documents")
        if self.window < 0:
            raise ValueError(f"window={self.window}: the number of times a request may be overtaken, 0 or more")
        if self.speculate and (self.block_tokens is not None or not self.reuse):
            raise ValueError("speculate=True compares lists of documents: it needs a system that caches documents")

    def units(self, documents: Documents) -> tuple[Documents, int]:
        """What the tree keeps of a request's documents, and how many of their tokens it does not look at.

        Documents as they are, or full blocks of them: then a block is named by what is in it, its place in the path
        says what stands before, and the tokens behind the last full block are computed every time.
        """
        if not self.reuse:
            return (), sum(document.num_tokens for document in documents)
        if self.block_tokens is None:
            return documents, 0
        return _blocks(documents, self.block_tokens)


def _blocks(documents: Documents, size: int) -> tuple[Documents, int]:
    """Full blocks of ``size`` tokens over the concatenated documents; tokens left over."""
    blocks: list[Document] = []
    parts: list[object] = []  # documents in the block that is being filled, and where its first token is
    free = size
    for document in documents:
        start = 0
        while document.num_tokens - start >= free:
            blocks.append(Document((*parts, document.id, start), size))
            start += free
            parts, free = [], size
        if start < document.num_tokens:
            parts += [document.id, start]
            free -= document.num_tokens - start
    return tuple(blocks), size - free


RAGCACHE = System("RAGCache")
# Prefix caching of 16-token blocks in GPU memory, least recently used first, tails before heads; first come, first
# served; the search ends before the prefill starts.
VLLM_LIKE = System("vLLM-like", LRU(), host=False, window=0, speculate=False, block_tokens=16)
# A tree in GPU memory, least recently used leaves first.
SGLANG_LIKE = System("SGLang-like", LRU(), host=False, window=0, speculate=False)
# vLLM without prefix caching: documents are computed every time.
NO_REUSE = System("no reuse", LRU(), host=False, window=0, speculate=False, reuse=False)
SYSTEMS = {system.name: system for system in (NO_REUSE, VLLM_LIKE, SGLANG_LIKE, RAGCACHE)}


def with_policy(policy: Policy, system: System = RAGCACHE) -> System:
    """The system under another replacement policy, named after it."""
    return replace(system, name=type(policy).__name__, policy=policy)
