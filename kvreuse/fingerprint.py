"""What a model is, by content: the part of every key that changes when weights, types or rotary frequencies do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kvreuse import compat

_SAMPLE = 64  # numbers looked at per tensor


class Fingerprint:
    """SHA-256 (hex) of a model's weights and configuration: of content, not of names, nor of where the weights lie.

    Kept, and computed again after an edit in place. What is looked at each time are the tensors' addresses and version
    counters and a sample of 64 numbers of each, which also shows edits through ``.data``.
    """

    def __init__(self, hf: nn.Module) -> None:
        self._hf = hf
        self._known: tuple[object, str] | None = None
        self._samples: tuple[list[int], list[list[torch.Tensor]]] | None = None

    def current(self) -> str:
        """The fingerprint of the weights as they are now."""
        tensors = dict(_weights(self._hf))
        state = self._state(list(tensors.values()))
        if self._known is None or self._known[0] != state:
            self._known = state, _hash_model(self._hf, tensors)
        return self._known[1]

    def _state(self, tensors: list[torch.Tensor]) -> object:
        places = [tensor.data_ptr() for tensor in tensors]
        if self._samples is None or self._samples[0] != places:
            self._samples = places, _sampled_views(tensors)
        numbers = [torch.cat(views).cpu().view(torch.uint8).numpy().tobytes() for views in self._samples[1]]
        # An offloaded weight is made anew whenever its layer has run; what it stands for does not change.
        versions = [0 if t.is_inference() or t.is_meta else t._version for t in tensors]
        return places, versions, numbers


def _sampled_views(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Strided views of all tensors, by device and type, so that one call reads each group."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if not tensor.is_meta and tensor.numel():
            every = -(-tensor.numel() // _SAMPLE)
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach().reshape(-1)[::every])
    return list(groups.values())


def _weights(hf: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that decide what the model computes.

    Not by ``state_dict``: bitsandbytes repacks 4-bit weights when asked for it and computes nonsense afterwards.
    """
    parameters = dict(hf.named_parameters())
    tied = getattr(hf, "all_tied_weights_keys", None) or {}
    for name, parameter in parameters.items():
        if parameter.is_meta and tied.get(name) in parameters:
            continue  # offloaded, a tied weight is no longer one tensor with its source
        yield name, parameter
        scales = getattr(getattr(parameter, "quant_state", None), "absmax", getattr(parameter, "SCB", None))
        if scales is None and parameter.dtype == torch.int8:  # bitsandbytes moves them in the first forward
            owner = hf.get_submodule(name.rpartition(".")[0])
            scales = getattr(getattr(owner, "state", None), "SCB", None)
        if isinstance(scales, torch.Tensor):
            yield f"{name}.scales", scales
    rewrites = compat.longrope_switch(compat.text_config(hf)) is not None
    for name, buffer in hf.named_buffers(remove_duplicate=False):  # in 5.0 the current one may be the original
        # longrope rewrites its current frequencies at every call; what they are made from does not change
        if not rewrites or not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
            yield name, buffer


def _hash_model(hf: Any, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    config = {k: v for k, v in hf.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    seen: set[int] = set()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"|{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        if tensor.is_meta:  # offloaded: read for this, and let go
            read = compat.offloaded_weight(hf, name)
            digest.update(str(getattr(hf, "name_or_path", "")).encode() if read is None else _content(read))
        elif tensor.data_ptr() not in seen:  # tied weights are hashed once
            seen.add(tensor.data_ptr())
            digest.update(_content(tensor))
    return digest.hexdigest()


def _content(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
