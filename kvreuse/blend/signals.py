"""What selectors look at besides fresh K/V: the question's attention over reused K/V, and the true deviation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from transformers import Cache

from kvreuse.blend.cache import new_blend_cache
from kvreuse.blend.deviation import Metric, squared_deviation
from kvreuse.blend.row_pass import RowPass, StopPass

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel


def question_attention(
    model: ReuseModel,
    cache: Cache,
    input_ids: torch.Tensor,
    forced: torch.Tensor,
    num_question: int,
    question_tokens: int | None = None,
    on_layer_start: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Attention [L, S] from the question to every token, averaged over heads and question tokens.

    One pass of the ``forced`` rows (the question, and what the store missed) over the reused K/V of ``cache``; it ends
    behind the last layer's attention. Of a question of more than ``question_tokens`` only so many last ones run, right
    behind the context, and attention is [L, context + question_tokens]. What the pass writes at the forced rows'
    places is written anew by the pass behind it. ``on_layer_start`` is called before each layer with its index.
    """
    num_tokens, asked = input_ids.numel(), num_question
    if question_tokens is not None and question_tokens < num_question:
        asked, context = question_tokens, num_tokens - num_question
        num_tokens = context + asked
        cache = new_blend_cache(
            [(held.keys[:, :, :num_tokens], held.values[:, :, :num_tokens]) for held in cache.layers]
        )
        forced = torch.cat([forced[forced < context], torch.arange(context, num_tokens)])
        input_ids = torch.cat([input_ids[:context], input_ids[-asked:]])
    seen: list[torch.Tensor] = []

    def collect(layer: int, weights: torch.Tensor) -> None:
        seen.append(weights[0, :, -asked:].float().mean(dim=(0, 1)).cpu())
        if layer == model.num_layers - 1:
            raise StopPass

    with suppress(StopPass):
        RowPass(
            model,
            cache,
            forced,
            num_tokens,
            trim_last=False,
            on_layer_start=on_layer_start,
            on_attention=collect,
        ).run(input_ids)
    return torch.stack(seen)


def true_deviation(
    model: ReuseModel, cache: Cache, input_ids: torch.Tensor, positions: torch.Tensor, metric: Metric
) -> torch.Tensor:
    """Squared deviation [L, n] of the K/V at ``positions`` from a full prefill's."""
    _, full = model.prefill(input_ids)
    rows = []
    for held, true in zip(cache.layers, full.layers, strict=True):
        at = positions.to(held.keys.device)
        parts = (true.keys[:, :, at], true.values[:, :, at], held.keys[:, :, at], held.values[:, :, at])
        rows.append(squared_deviation(metric, *parts).cpu())
    return torch.stack(rows)
