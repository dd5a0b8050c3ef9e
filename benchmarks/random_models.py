"""Models of published shapes with random weights, made on the device itself: times need no trained weights."""

from __future__ import annotations

import gc
import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvreuse as kr

MAX_CONTEXT = 32768  # of all shapes: 24 chunks of 512 tokens are more than some of the published configurations take


@dataclass(frozen=True)
class Shape:
    """A model's sizes, from its published configuration; only the context is longer where that is short."""

    name: str
    model_type: Literal["llama", "mistral"]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rope_theta: float

    def config(self) -> Any:
        """As transformers wants it; without a sliding window."""
        window = {"sliding_window": None} if self.model_type == "mistral" else {}
        return AutoConfig.for_model(
            self.model_type,
            num_hidden_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=MAX_CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=False,
            **window,
        )

    @property
    def kv_size(self) -> int:
        """Width of a layer's keys, and of its values."""
        return self.hidden_size // self.num_heads * self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Embedding and head, projections, MLP, norms."""
        per_layer = 2 * self.hidden_size * (self.hidden_size + self.kv_size + 1)
        per_layer += 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * per_layer + self.hidden_size * (2 * self.vocab_size + 1)

    def needed_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Weights, and about what a prefill of ``num_tokens`` takes beside them.

        Its K/V three times (buffers, layers on their way, a copy) and eight tensors as wide as the MLP.
        """
        kv = 2 * self.num_layers * self.kv_size * num_tokens
        return itemsize * (self.num_parameters + 3 * kv + 8 * self.intermediate_size * num_tokens)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("mistral-7b", "mistral", 32, 4096, 14336, 32, 8, 32000, 1e6),
        Shape("llama-3-8b", "llama", 32, 4096, 14336, 32, 8, 128256, 5e5),
        Shape("yi-34b", "llama", 60, 7168, 20480, 56, 8, 64000, 5e6),
        Shape("tiny", "llama", 4, 128, 256, 4, 2, 512, 1e4),
    )
}


class RandomModel(kr.ReuseModel):
    """A shape with random weights, the same for the same shape, device and type; never in another type on the way."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        with device:
            hf = AutoModelForCausalLM.from_config(shape.config(), attn_implementation="sdpa", dtype=dtype)
        super().__init__(hf, name=shape.name)
        self._made_of = hashlib.sha256(f"{shape!r}, {device}, {dtype}, seed 0".encode()).hexdigest()

    def fingerprint(self) -> str:
        """By what the weights are made of: to hash 69 GB of them would take longer than what is timed."""
        return self._made_of


def does_not_fit(shape: Shape, num_tokens: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the GPU's free memory is too little for a shape; None where it is enough, or where no GPU is asked."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    needed = shape.needed_bytes(num_tokens, dtype.itemsize)
    if needed <= free:
        return None
    return f"needs about {needed / 1e9:.0f} GB, {free / 1e9:.0f} of the GPU's {total / 1e9:.0f} GB are free"


def random_prompt(shape: Shape, num_chunks: int, chunk_tokens: int, around: int = 32) -> kr.RagPrompt:
    """Random ids: a prefix and a question of ``around`` tokens each, equal chunks between them.

    The first chunks of a longer prompt are those of a shorter one.
    """
    g = torch.Generator().manual_seed(0)
    lengths = [around, around, *[chunk_tokens] * num_chunks]
    prefix, question, *chunks = (torch.randint(3, shape.vocab_size, (n,), generator=g) for n in lengths)
    return kr.RagPrompt(prefix, chunks, question)
