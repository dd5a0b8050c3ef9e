"""One pass per chunk, all in one batch: what MapReduce and MapRerank share.

Every pass is prefix + chunk + instruction and question. The chunk's K/V behind the prefix are exact there, so each
pass reuses its own prefix and computes only its last part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from kvreuse import compat
from kvreuse.blend.plan import Segment, chunk_segments, look_up
from kvreuse.errors import LostEntryError
from kvreuse.kv import ChunkEncoder, ChunkKV
from kvreuse.methods.base import ReuseMethod, encode_missing, encode_segment
from kvreuse.store import KVStore
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


@dataclass(frozen=True)
class MappedChunk:
    """What the model said to one chunk: token ids, text, and the answer's mean log-likelihood per token."""

    token_ids: list[int]
    text: str
    mean_logprob: float


class MapMethod(ReuseMethod):
    """A method whose first step is one pass per chunk behind the prompt's own prefix.

    ``instruction`` stands between chunk and question.
    """

    instruction: str

    @property
    def encoding(self) -> str:
        """Chunks behind the prefix."""
        return "chunks, prefix"

    def segments(self, model: ReuseModel, prompt: RagPrompt) -> list[Segment]:
        """Prefix and chunks; in its own pass every chunk is exact."""
        # A pass is shorter than the prompt: its own length decides a longrope model's factors.
        longest = prompt.prefix.numel() + max(c.numel() for c in prompt.chunks) + self._asked(model, prompt).numel()
        long_rope = model.long_rope(longest)
        return [replace(s, long_rope=long_rope) for s in chunk_segments(model, prompt, ChunkEncoder("prefix"))]

    def _asked(self, model: ReuseModel, prompt: RagPrompt) -> torch.Tensor:
        return torch.cat([model.tokenize(self.instruction), prompt.question])

    def encode(self, model: ReuseModel, prompt: RagPrompt, store: KVStore) -> float:
        """Compute and store K/V of the prefix and of every chunk behind it; seconds."""
        model.require_tokenizer()
        store = self.check_request(model, prompt, store)
        return encode_missing(model, self.segments(model, prompt), store)

    def map_chunks(
        self,
        model: ReuseModel,
        prompt: RagPrompt,
        store: KVStore,
        max_new_tokens: int,
    ) -> tuple[list[MappedChunk], StageTimer]:
        """Ask instruction and question about every chunk alone, in one batch; the timer goes on running."""
        store = self.check_request(model, prompt, store)
        fingerprint = model.fingerprint()
        timer = StageTimer(model.device)
        segments = look_up(self.segments(model, prompt), fingerprint, store)
        timer.mark("lookup_s")
        parts = []
        for segment in segments:
            kv = _loaded(segment)
            timer.mark("load_s")
            if kv is None:
                kv = encode_segment(model, segment)
                store.put(segment.key(fingerprint), kv, fingerprint)
                timer.mark("map_prefill_s")
            parts.append(kv)
        prefix = parts.pop(0) if prompt.prefix.numel() else None
        asked = self._asked(model, prompt).to(model.device)
        longest = max(p.num_tokens for p in parts) + prompt.prefix.numel()
        model.check_length(longest + asked.numel() + max_new_tokens)
        cache, lengths = _left_padded(model, prefix, parts, longest)
        timer.mark("load_s")
        rows = _decode_batch(model, cache, lengths, longest, asked, max_new_tokens, timer)
        timer.mark("map_decode_s")
        return [MappedChunk(ids, model.decode(ids).strip(), logprob) for ids, logprob in rows], timer


def _loaded(segment: Segment) -> ChunkKV | None:
    """A segment's stored K/V in memory; None if there are none, or they turn out damaged."""
    if segment.stored is None:
        return None
    try:
        return segment.stored.load()
    except LostEntryError:
        return None
    finally:
        segment.stored.close()


def _left_padded(
    model: ReuseModel, prefix: ChunkKV | None, parts: list[ChunkKV], longest: int
) -> tuple[DynamicCache, torch.Tensor]:
    """A batched cache [B, H_kv, longest, D], rows aligned at their ends, and the rows' lengths [B]."""
    head = prefix.num_tokens if prefix is not None else 0
    lengths = torch.tensor([head + p.num_tokens for p in parts])
    cache = DynamicCache()
    for layer in range(model.num_layers):
        pair = []
        for kind in ("keys", "values"):
            like = getattr(parts[0], kind)[layer]
            whole = like.new_zeros(len(parts), like.shape[1], longest, like.shape[3])
            for row, part in enumerate(parts):
                begin = longest - int(lengths[row])
                if prefix is not None:
                    whole[row, :, begin : begin + head] = getattr(prefix, kind)[layer][0]
                whole[row, :, begin + head :] = getattr(part, kind)[layer][0]
            pair.append(whole.to(model.layer_device(layer)))
        cache.update(*pair, layer)
    return cache, lengths


@torch.inference_mode()
def _decode_batch(
    model: ReuseModel,
    cache: DynamicCache,
    lengths: torch.Tensor,
    longest: int,
    asked: torch.Tensor,
    max_new_tokens: int,
    timer: StageTimer,
) -> list[tuple[list[int], float]]:
    """Greedy decoding of all rows; per row its ids (without the end token) and their mean log-probability."""
    count = len(lengths)
    lengths = lengths.to(model.device)
    seen = torch.arange(longest, device=model.device)[None] >= longest - lengths[:, None]
    mask = torch.cat([seen, seen.new_ones(count, asked.numel())], dim=1).long()
    positions = lengths[:, None] + torch.arange(asked.numel(), device=model.device)[None]
    logits = compat.run_model(model.hf, asked.expand(count, -1), positions, cache, attention_mask=mask)[:, -1]
    timer.mark("map_prefill_s")
    tokens: list[list[int]] = [[] for _ in range(count)]
    logprobs = [0.0] * count
    alive = set(range(count))
    position = positions[:, -1:]
    for _ in range(max_new_tokens):
        best = logits.float().log_softmax(-1).max(dim=-1)
        for row in sorted(alive):
            token = int(best.indices[row])
            if token in model.eos_token_ids:
                alive.discard(row)
            else:
                tokens[row].append(token)
                logprobs[row] += float(best.values[row])
        if not alive or len(tokens[min(alive)]) >= max_new_tokens:
            break
        mask = torch.cat([mask, mask.new_ones(count, 1)], dim=1)
        position = position + 1
        logits = compat.run_model(model.hf, best.indices[:, None], position, cache, attention_mask=mask)[:, -1]
    return [(ids, total / max(1, len(ids))) for ids, total in zip(tokens, logprobs, strict=True)]
