"""What the workers on Hugging Face models share."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peer_workers.protocol import Answer


def load_float32(folder: str) -> Any:
    """The model in float32, on one thread."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def cut_back(cache: Any, length: int) -> None:
    """Leave the first ``length`` tokens; said as a number to remove, which old and new releases read alike."""
    surplus = cache.get_seq_length() - length
    if surplus:
        cache.crop(-surplus)


def logprobs_of(logits: torch.Tensor) -> list[float]:
    """Log-probabilities over the vocabulary of logits [1, V]."""
    return logits[0].float().log_softmax(dim=-1).tolist()


@torch.inference_mode()
def continue_greedily(model: Any, cache: Any, logits: torch.Tensor, position: int, max_new_tokens: int) -> Answer:
    """Continue behind ``position`` tokens from the logits [1, V] of the next one; the cache grows."""
    end = model.generation_config.eos_token_id
    ends = set(end) if isinstance(end, list) else {end}
    tokens: list[int] = []
    following = logits
    while len(tokens) < max_new_tokens and (token := int(following.argmax())) not in ends:
        tokens.append(token)
        positions = torch.tensor([[position + len(tokens) - 1]])
        following = model(torch.tensor([[token]]), position_ids=positions, past_key_values=cache).logits[:, -1]
    return Answer(token_ids=tokens, logprobs=logprobs_of(logits))
