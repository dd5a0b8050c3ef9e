"""Full prefill of a batch: the reference of batched reuse, and what a batch without any stored chunk gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvreuse.blend.cache import empty_blend_cache, new_blend_cache
from kvreuse.blend.packing import Packing
from kvreuse.blend.row_pass import RowPass
from kvreuse.results import BatchPrefill, Trace, full_prefill
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


def full_prefill_batch(model: ReuseModel, prompts: Sequence[RagPrompt], timer: StageTimer) -> BatchPrefill:
    """Prefill whole prompts, reusing nothing.

    One prompt runs on the model's own path. Several are packed into one pass without padding tokens, each with causal
    attention over itself; through the last layer's MLP go the last tokens only.
    """
    if len(prompts) == 1:
        single = full_prefill(model, prompts[0], timer)
        return BatchPrefill(single.logits, single.cache, [single.trace], (single.prompt,))
    packing = Packing.of([p.num_tokens for p in prompts])
    cache = empty_blend_cache(model.num_layers, packing.num_slots)
    every = [torch.arange(p.num_tokens) for p in prompts]
    logits = RowPass(model, cache, packing.join(every), packing).run(packing.ids([p.input_ids for p in prompts]))
    timer.mark("recompute_s")
    padded = new_blend_cache([(packing.batch(layer.keys), packing.batch(layer.values)) for layer in cache.layers])
    traces = [Trace([own] * model.num_layers, timer.stages) for own in every]
    return BatchPrefill(logits, padded, traces, tuple(prompts))
