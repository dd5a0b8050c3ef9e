"""Greedy continuation of prefilled prompts, one or a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvreuse import compat
from kvreuse.results import Answer, BatchPrefill, Prefill

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


def _prompts(result: Prefill | BatchPrefill) -> tuple[RagPrompt, ...]:
    return result.prompts if isinstance(result, BatchPrefill) else (result.prompt,)


def _seen(model: ReuseModel, lengths: Sequence[int]) -> torch.Tensor:
    """Attention mask [B, longest] of prompts padded on the left: 1 where a token stands."""
    longest = max(lengths)
    slot = torch.arange(longest, device=model.device)[None]
    return (slot >= longest - torch.tensor(lengths, device=model.device)[:, None]).long()


@torch.inference_mode()
def generate(
    model: ReuseModel,
    result: Prefill | BatchPrefill,
    max_new_tokens: int = 32,
    stop: str | None = None,
    begin: Sequence[int] = (),
) -> list[Answer]:
    """One answer per prompt; see `ReuseModel.generate`."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: ask for at least one token")
    if stop == "":
        raise ValueError("stop='' would end every answer at once: give a string that ends it, or None")
    lengths = [p.num_tokens for p in _prompts(result)]
    _check_factors(model, lengths, max_new_tokens)
    longest, ended = max(lengths), model.eos_token_ids
    mask = None if min(lengths) == longest else _seen(model, lengths)

    def step(ids: list[list[int]], done: int) -> torch.Tensor:
        """Logits [B, V] behind ``ids`` [B, t], which follow ``done`` new tokens."""
        nonlocal mask
        tokens = torch.tensor(ids, device=model.device)
        new = torch.arange(done, done + tokens.shape[1], device=model.device)
        # A row that has ended is run along; its position, of no use any more, stays inside the context.
        positions = (torch.tensor(lengths, device=model.device)[:, None] + new).clamp(max=model.max_context - 1)
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        return compat.run_model(model.hf, tokens, positions, result.cache, mask, logits_to_keep=0)[:, -1]

    answers: list[list[int]] = [list(begin) for _ in lengths]
    alive = set(range(len(lengths)))
    done = len(begin)
    try:
        logits = step(answers, 0) if done else result.logits
        while True:
            best = logits.argmax(dim=-1).tolist()
            done += 1
            for row in sorted(alive):
                if best[row] in ended:
                    alive.discard(row)
                    continue
                answers[row].append(best[row])
                full = done >= max_new_tokens or lengths[row] + done - 1 >= model.max_context
                if full or (stop is not None and stop in model.decode(answers[row])):
                    alive.discard(row)
            if not alive:
                break
            logits = step([[token] for token in best], done - 1)
    finally:
        compat.truncate(result.cache, longest)
    stages = result.stages if isinstance(result, BatchPrefill) else result.trace.stages
    return [_answer(model, ids, stop, result.ttft_s, dict(stages)) for ids in answers]


def _answer(model: ReuseModel, ids: list[int], stop: str | None, ttft_s: float, stages: dict[str, float]) -> Answer:
    text = model.decode(ids) if model.tokenizer is not None else ""
    if stop is not None:
        text = text.split(stop, 1)[0]
    return Answer(text.strip(), ids, ttft_s, stages)


def _check_factors(model: ReuseModel, lengths: Sequence[int], max_new_tokens: int) -> None:
    """A longrope model takes the factors of the longest row for all."""
    if len(lengths) > 1 and model.long_rope(max(lengths) + max_new_tokens) != model.long_rope(min(lengths) + 1):
        raise ValueError(
            f"prompts of {min(lengths)} to {max(lengths)} tokens with max_new_tokens={max_new_tokens}: {model.name} "
            f"rotates from {model.long_rope_length} tokens on with its long factors, all rows of a batch alike; "
            "continue them one by one with generate(result.row(i)), or in batches on either side"
        )


def generate_inputs(model: ReuseModel, result: Prefill | BatchPrefill) -> dict[str, Any]:
    """See `ReuseModel.generate_inputs`."""
    prompts = _prompts(result)
    lengths = [p.num_tokens for p in prompts]
    first = result.logits.argmax(dim=-1).cpu()
    ids = torch.full((len(prompts), max(lengths) + 1), _pad_id(model))
    for row, prompt in enumerate(prompts):
        ids[row, max(lengths) - prompt.num_tokens :] = torch.cat([prompt.input_ids, first[row : row + 1]])
    ids = ids.to(model.device)
    mask = torch.cat([_seen(model, lengths), torch.ones_like(ids[:, :1])], dim=1)
    return {"input_ids": ids, "attention_mask": mask, compat.cache_kwarg(model.hf): result.cache}


def _pad_id(model: ReuseModel) -> int:
    """The token that stands where nothing is seen."""
    known = (getattr(model.tokenizer, "pad_token_id", None), getattr(model.config, "pad_token_id", None))
    return next((int(pad) for pad in known if pad is not None), 0)
