"""The model that figures run on, loaded once."""

from __future__ import annotations

import functools
from typing import Any

import kvreuse as kr


@functools.lru_cache(maxsize=1)
def model_named(
    name: str, device: str | None = None, dtype: str | None = None, quantization: str | None = None
) -> kr.ReuseModel:
    """As `kr.load_model`. The last one stays: `python -m experiments all` asks for the same with every figure."""
    settings: Any = {"device": device, "dtype": dtype, "quantization": quantization}
    return kr.load_model(name, **settings)
