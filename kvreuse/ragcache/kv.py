"""`TreeCache`: a knowledge tree over the real K/V of one model behind one system prompt."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import torch

from kvreuse.blend.fusor import Fusor
from kvreuse.blend.plan import Segment
from kvreuse.errors import IntegrityError
from kvreuse.kv import ChunkKV, cut_out
from kvreuse.ragcache.node import Document, Match
from kvreuse.ragcache.policies import Policy
from kvreuse.ragcache.segments import CostFunction, MakePayload
from kvreuse.ragcache.tree import KnowledgeTree
from kvreuse.results import Prefill, full_prefill
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


class TensorBackend:
    """Moves `ChunkKV` payloads between a model's devices and host memory, pinned where there is a GPU to copy to.

    Copies are copies also where both tiers are main memory: the budgets are real, and losing one tier spares the other.
    """

    def __init__(self, model: ReuseModel) -> None:
        self._devices = [model.layer_device(layer) for layer in range(model.num_layers)]

    def to_host(self, payload: ChunkKV) -> ChunkKV:
        """A copy in (pinned) host memory."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)

        return self._map(payload, lambda tensor, _: copy(tensor))

    def to_gpu(self, payload: ChunkKV) -> ChunkKV:
        """A copy on the layers' devices."""
        return self._map(payload, lambda tensor, device: tensor.to(device, non_blocking=True, copy=True))

    def drop(self, payload: ChunkKV) -> None:
        """Nothing to do: memory goes with the last reference."""

    def num_bytes(self, payload: ChunkKV) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*payload.keys, *payload.values))

    def _map(self, payload: ChunkKV, move: Any) -> ChunkKV:
        keys, values = (
            tuple(move(t, d) for t, d in zip(side, self._devices, strict=True))
            for side in (payload.keys, payload.values)
        )
        return ChunkKV(payload.ids, payload.start, keys, values, payload.long_rope)


def bytes_per_token(model: ReuseModel) -> int:
    """Bytes of one token's keys and values on all layers, as the model makes them."""
    _, cache = model.prefill(torch.zeros(1, dtype=torch.long))
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


class TreeCache:
    """Exact K/V of document sequences behind one system prompt, for one model.

    Documents are named by the SHA-256 of their token ids, which are compared on a hit. After an edit of the model's
    weights nothing computed before is used again.

    Args:
        model: whose K/V are kept.
        prefix: token ids of the system prompt, as in the prompts to come (``prompt.prefix``).
        gpu, host, policy, cost, max_depth, max_nodes: see `KnowledgeTree`.
        long_rope: for a longrope model (Phi-3), whether it serves prompts that are rotated with the long factors; K/V
            of the others differ, so those are prefilled without the tree.
    """

    def __init__(
        self,
        model: ReuseModel,
        prefix: torch.Tensor,
        gpu: str | int = "1GiB",
        host: str | int = "4GiB",
        *,
        policy: Policy | None = None,
        cost: CostFunction | None = None,
        max_depth: int | None = None,
        max_nodes: int | None = 100_000,
        long_rope: bool = False,
    ) -> None:
        model.require_supported()
        self.model, self.long_rope = model, long_rope
        self.prefix = torch.as_tensor(prefix).long().cpu().clone()
        self.tree = KnowledgeTree(
            gpu,
            host,
            bytes_per_token=bytes_per_token(model),
            policy=policy,
            cost=cost,
            system_tokens=self.prefix.numel(),
            max_depth=max_depth,
            max_nodes=max_nodes,
            backend=TensorBackend(model),
        )
        self._fingerprint = model.fingerprint()

    def documents(self, prompt: RagPrompt) -> tuple[Document, ...]:
        """The prompt's chunks as the tree names them.

        Raises:
            ValueError: the prompt has another system prefix than this tree.
        """
        if not torch.equal(prompt.prefix, self.prefix):
            raise ValueError(
                f"the prompt's prefix ({prompt.prefix.numel()} tokens) is not the one this tree was made for "
                f"({self.prefix.numel()} tokens): make a TreeCache for each system prompt"
            )
        return tuple(Document(content_id(ids), ids.numel()) for ids in prompt.chunks)

    def serves(self, prompt: RagPrompt) -> bool:
        """Whether K/V of this prompt can be the tree's (see ``long_rope``)."""
        return self.model.long_rope(prompt.num_tokens) == self.long_rope

    def acquire(self, prompt: RagPrompt) -> Match:
        """Match and lock what the tree has of a prompt; finish with `keep` and ``tree.release``."""
        documents = self.documents(prompt)
        fingerprint = self.model.fingerprint()
        if fingerprint != self._fingerprint:
            self.tree.clear()
            self._fingerprint = fingerprint
        return self.tree.acquire(documents)

    def compute(self, prompt: RagPrompt, match: Match, timer: StageTimer) -> Prefill:
        """Bring the match's nodes to GPU and prefill what follows them. Does not touch what the tree keeps."""
        self.tree.promote(match)
        return Fusor().prefill(self.model, prompt, self.segments(prompt, match), timer)

    def segments(self, prompt: RagPrompt, match: Match) -> list[Segment]:
        """System prefix and chunks in order, each exact, with the tree's K/V where the match has them."""
        segments: list[Segment] = []
        place = 0
        for index, ids in enumerate((prompt.prefix, *prompt.chunks)):
            stored = match.nodes[index].payload if index < match.num_cached and ids.numel() else None
            if stored is not None and (stored.start != place or not torch.equal(stored.ids, ids)):
                raise IntegrityError(f"{match.nodes[index]!r} holds K/V of other tokens or of another place")
            if ids.numel():
                context = prompt.input_ids[:place]
                segments.append(Segment(ids, place, context, place, True, self.long_rope, stored))
            place += ids.numel()
        return segments

    def keep(self, prompt: RagPrompt, match: Match, result: Prefill) -> Match:
        """Insert the exact K/V of a prefilled prompt. Returns the handle to go on with (see `KnowledgeTree.insert`)."""
        return self.tree.insert(match, self.cutter(prompt, result))

    def cutter(self, prompt: RagPrompt, result: Prefill) -> MakePayload:
        """Cuts K/V of the system prefix (index 0) and of chunks (1, 2, ...) out of a prefilled prompt, as copies."""
        bounds = [0, self.prefix.numel()]
        for ids in prompt.chunks:
            bounds.append(bounds[-1] + ids.numel())

        def cut(index: int) -> ChunkKV:
            start, stop = bounds[index], bounds[index + 1]
            return cut_out(result.cache, prompt.input_ids[start:stop], start, self.long_rope)

        return cut

    def prefill(self, prompt: RagPrompt, *, insert: bool = True, update: bool = True) -> Prefill:
        """Serve one prompt: match, promote, prefill the rest, insert, update (RAGCache, 4).

        Args:
            insert: keep the K/V of documents the tree did not have.
            update: count the retrieval; False leaves frequencies and costs as they are.

        The K/V of the result are the request's own: nothing the tree does later changes them.
        """
        self.model.check_prompt(prompt)
        timer = StageTimer(self.model.device)
        if not self.serves(prompt):
            self.documents(prompt)
            result = full_prefill(self.model, prompt, timer)
            result.trace.misses = len(prompt.chunks) + bool(prompt.prefix.numel())
            return result
        match = self.acquire(prompt)
        timer.mark("lookup_s")
        try:
            result = self.compute(prompt, match, timer)
            started = time.perf_counter()
            if insert:
                match = self.keep(prompt, match, result)
            if update:
                self.tree.update(match, prompt.question.numel())
            result.trace.stages["insert_s"] = time.perf_counter() - started
        finally:
            self.tree.release(match)
        return result

    def __repr__(self) -> str:
        gpu, host = self.tree.tiers
        return (
            f"TreeCache({self.model.name}, {self.tree.num_nodes} nodes, gpu {gpu.used_bytes:,} of "
            f"{gpu.capacity_bytes:,} bytes, host {host.used_bytes:,} of {host.capacity_bytes:,})"
        )


def content_id(ids: torch.Tensor) -> str:
    """A document's id: SHA-256 (hex) of its token ids."""
    return hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
