"""Moving keys to another place in the prompt: rotary positions are undone at one end and applied at the other.

A rotary layer stores ``k_p = s R(theta_p) k``; the same token at place p' has ``s R(theta_p') k``, so a stored key
only needs ``R(theta_p' - theta_p)``. Both angles come from the model's own rotary module, in fp32, so every scaling
(linear, llama3, yarn, longrope with its two regimes) is covered by construction (CacheBlend, appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of every dimension pair's angle, [n, rotary_dim / 2] each, fp32, the model's scale in them."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def from_model(cls, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTable:
        """From a model's tables [n, rotary_dim], in which every angle stands twice (side by side, or half by half)."""
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]):
            first = slice(0, half)
        elif torch.equal(cos[:, ::2], cos[:, 1::2]):
            first = slice(0, None, 2)
        else:  # gpt-oss: every angle once
            first = slice(None)
        return cls(cos[:, first].contiguous(), sin[:, first].contiguous())

    def __getitem__(self, rows: slice | torch.Tensor) -> RotaryTable:
        return RotaryTable(self.cos[rows], self.sin[rows])

    def minus(self, other: RotaryTable) -> RotaryTable:
        """The table that takes a key from ``other``'s angles to ours: a pure rotation, the scale cancels."""
        scale = other.cos.square() + other.sin.square()
        cos = (self.cos * other.cos + self.sin * other.sin) / scale
        sin = (self.sin * other.cos - self.cos * other.sin) / scale
        return RotaryTable(cos, sin)

    def same_as(self, other: RotaryTable) -> bool:
        """Bit for bit the same angles: nothing to rotate."""
        return torch.equal(self.cos, other.cos) and torch.equal(self.sin, other.sin)


def rotate(keys: torch.Tensor, table: RotaryTable, interleaved: bool, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate ``keys`` [..., n, D] by ``table`` [n, rotary_dim / 2]; dimensions behind rotary_dim pass through.

    ``interleaved`` says how dimensions pair up: (2i, 2i+1) as in Cohere, else (i, i + rotary_dim/2) as in Llama.
    Computed in fp32; the result has the dtype of ``out`` (default: a new tensor like ``keys``).
    """
    half = table.cos.shape[-1]
    out = torch.empty_like(keys) if out is None else out
    cos, sin = table.cos.to(keys.device), table.sin.to(keys.device)
    source = keys.float()
    work = out if out.dtype == torch.float32 and out.data_ptr() != keys.data_ptr() else torch.empty_like(source)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    torch.mul(source[..., first], cos, out=work[..., first]).addcmul_(source[..., second], sin, value=-1)
    torch.mul(source[..., second], cos, out=work[..., second]).addcmul_(source[..., first], sin)
    if work is not out:
        out[..., : 2 * half].copy_(work[..., : 2 * half])
    if keys.shape[-1] > 2 * half:
        out[..., 2 * half :].copy_(keys[..., 2 * half :])
    return out
