"""What selectors look at besides fresh K/V: the question's attention over reused K/V, and the true deviation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from transformers import Cache

from kvreuse.blend.cache import new_blend_cache
from kvreuse.blend.choice import Choice
from kvreuse.blend.deviation import Metric, squared_deviation
from kvreuse.blend.packing import Packing
from kvreuse.blend.row_pass import RowPass, StopPass

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


def question_attention(
    model: ReuseModel,
    cache: Cache,
    packing: Packing,
    prompts: Sequence[RagPrompt],
    choices: Sequence[Choice],
    on_layer_start: Callable[[int], None] | None = None,
) -> list[torch.Tensor]:
    """Attention [L, n] from each prompt's question to its candidates, averaged over heads and question tokens.

    One pass of the forced rows (the questions, and what the store missed) over the reused K/V of ``cache``; it ends
    behind the last layer's attention. Of a longer question the last `Choice.asked` tokens run, right behind the
    context. What the pass writes at the forced rows' places is written anew by the pass behind it.
    ``on_layer_start`` is called before each layer with its index.
    """
    asked = [choice.asked(model) for choice in choices]
    rows, ids, lengths = [], [], []
    for n, choice, prompt in zip(asked, choices, prompts, strict=True):
        context, all_ids = prompt.num_context, prompt.input_ids
        is_whole = n == prompt.question.numel()
        fewer = torch.cat([choice.forced[choice.forced < context], torch.arange(context, context + n)])
        rows.append(choice.forced if is_whole else fewer)
        ids.append(torch.cat([all_ids[:context], all_ids[-n:]]))
        lengths.append(context + n)
    asking = Packing(packing.starts, tuple(lengths))
    stop = asking.num_slots
    if stop < packing.num_slots:
        cache = new_blend_cache([(held.keys[:, :, :stop], held.values[:, :, :stop]) for held in cache.layers])
    seen: list[list[torch.Tensor]] = [[] for _ in choices]

    def collect(layer: int, weights: Sequence[torch.Tensor]) -> None:
        for own, n, known in zip(weights, asked, seen, strict=True):
            known.append(own[0, :, -n:].float().mean(dim=(0, 1)).cpu())
        if layer == model.num_layers - 1:
            raise StopPass

    with suppress(StopPass):
        RowPass(
            model,
            cache,
            asking.join(rows),
            asking,
            trim_last=False,
            on_layer_start=on_layer_start,
            on_attention=collect,
        ).run(asking.ids(ids))
    return [torch.stack(known)[:, c.positions] for known, c in zip(seen, choices, strict=True)]


def true_deviation(
    model: ReuseModel, cache: Cache, input_ids: torch.Tensor, positions: torch.Tensor, metric: Metric, start: int = 0
) -> torch.Tensor:
    """Squared deviation [L, n] of K/V at ``positions`` from a full prefill's; in ``cache`` ``start`` further on."""
    _, full = model.prefill(input_ids)
    out = []
    for held, true in zip(cache.layers, full.layers, strict=True):
        at = positions.to(held.keys.device)
        here = at + start
        parts = (true.keys[:, :, at], true.values[:, :, at], held.keys[:, :, here], held.values[:, :, here])
        out.append(squared_deviation(metric, *parts).cpu())
    return torch.stack(out)
