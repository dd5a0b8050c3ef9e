"""Decoder layers at fixed shapes, captured once as CUDA graphs and replayed by every later request (opt-in).

A layer of a blend runs a few hundred rows in some thirty kernels, each launched from Python. What differs by request is
copied into memory of a fixed shape (`kvreuse.blend.fixed_shape`) before a replay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache

from kvreuse import compat
from kvreuse.blend.cache import BlendLayer
from kvreuse.blend.fixed_shape import FixedCache, FixedShape, bucket
from kvreuse.blend.index import ROW_DIMS, lists_rows
from kvreuse.blend.rows import PackedMask, RowMask
from kvreuse.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel

Capture = Callable[[Callable[[], None]], Callable[[], None]]  # takes a computation, returns what replays it


def cuda_capture(device: torch.device) -> Capture:
    """Captures on a GPU. All graphs share one memory pool: no tensor in it outlives a replay."""
    pool = torch.cuda.graph_pool_handle()
    warm_up, capturing = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(device)
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up):  # libraries set themselves up outside of a graph
            for _ in range(2):
                compute()
        current.wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads go on loading K/V
        try:
            with torch.cuda.graph(graph, pool=pool, stream=capturing, capture_error_mode=mode):
                compute()
        finally:
            torch.cuda.set_stream(current)
        return graph.replay

    return capture


@dataclass(frozen=True)
class _Graph:
    """A captured layer; ``weights``: where its parameters and buffers lay, which is where the graph reads them."""

    replay: Callable[[], None]
    weights: tuple[int, ...]
    in_tuple: bool  # whether the layer returns its hidden states so


class LayerGraphs:
    """A model's layers as graphs; one thread at a time runs them, for they share memory.

    Args:
        model: whole on one CUDA GPU.
        max_shapes: shapes (rows, keys) whose graphs are kept; the one used longest ago goes first. With a gradual
            schedule a single request has several.
        capture: how a computation becomes what replays it; CUDA graphs by default.

    Raises:
        ValueError: the model is not on a GPU, over several devices, or quantized; ``max_shapes`` below 1.
    """

    def __init__(self, model: ReuseModel, max_shapes: int = 64, capture: Capture | None = None) -> None:
        if max_shapes < 1:
            raise ValueError(f"max_shapes={max_shapes}: give 1 or more")
        if capture is None:
            _require_one_gpu(model)
        # Not the model itself: it holds these graphs, and a cycle would keep a GPU's memory until it is collected.
        self._name, self._layers, self._layer_types = model.name, model.layers, model.layer_types
        self.max_shapes = max_shapes
        self._capture = capture or cuda_capture(model.device)
        self._shapes: OrderedDict[tuple[Any, ...], tuple[FixedShape, dict[int, _Graph]]] = OrderedDict()

    def run(
        self,
        index: int,
        forward: Callable[..., Any],
        held: BlendLayer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What ``forward`` of layer ``index`` returns; the fresh K/V of the rows that ``held`` waits for are in it.

        Arguments and ``held`` are as a pass of rows hands them to the layer. A layer with hooks inside, or with an
        argument that would become part of the graph though it may differ by request, runs as it is.
        """
        layer, kind = self._layers[index], self._layer_types[index]
        assert held.rows is not None
        n, num_keys = held.rows.on_cpu.numel(), held.keys.shape[2]
        others = [v for name, v in kwargs.items() if name not in ROW_DIMS]
        others += [v for v in args if not lists_rows(v, n)]
        if _has_hooks_inside(layer) or not all(map(_is_constant, others)):
            return forward(*args, **kwargs)
        shape, graphs = self._shape(bucket(n), bucket(num_keys), held.keys.device, args[0].dtype)
        shape.begin(held.rows)
        names = ("hidden", *((index, i) for i in range(1, len(args))))  # what else lists rows may differ by layer
        args = tuple(shape.hold(name, v) if lists_rows(v, n) else v for name, v in zip(names, args, strict=True))
        by_row = {name: dim for name, dim in ROW_DIMS.items() if name in kwargs}
        keys, values = shape.place(held)
        fixed: dict[str, Any] = {
            **kwargs,
            **{name: shape.hold_once((kind, name), kwargs[name], dim) for name, dim in by_row.items()},
            str(compat.find_cache(kwargs)): FixedCache(keys, values, shape.slots),
            "attention_mask": shape.mask(kind, kwargs["attention_mask"], num_keys, args[0].dtype),
        }
        weights = tuple(t.data_ptr() for t in (*layer.parameters(), *layer.buffers()))
        graph = graphs.get(index)
        if graph is None or graph.weights != weights:
            graph = graphs[index] = self._captured(index, forward, args, fixed, shape.output(args[0]), weights)
            while len(self._shapes) > self.max_shapes:  # behind the capture: a pool without graphs would be gone
                self._shapes.popitem(last=False)
        graph.replay()
        rows = held.rows.on(keys.device)
        held.update(keys.index_select(2, rows), values.index_select(2, rows))
        out = shape.output(args[0])[:, :n].clone()  # the next replay writes there
        return (out,) if graph.in_tuple else out

    def _shape(
        self, num_rows: int, num_keys: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[FixedShape, dict[int, _Graph]]:
        """A shape, and the graphs of the layers that run in it."""
        key = num_rows, num_keys, device, dtype
        if key not in self._shapes:
            alike = (shape.kv for other, (shape, _) in self._shapes.items() if other[1:] == key[1:])
            self._shapes[key] = FixedShape(num_rows, num_keys, device, next(alike, {})), {}
        self._shapes.move_to_end(key)
        return self._shapes[key]

    def _captured(
        self,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: torch.Tensor,
        weights: tuple[int, ...],
    ) -> _Graph:
        in_tuple = False

        def compute() -> None:
            nonlocal in_tuple
            result = forward(*args, **kwargs)
            in_tuple = isinstance(result, tuple)
            out.copy_(result[0] if in_tuple else result)

        try:
            replay = self._capture(compute)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"{self._name}: layer {index} could not be captured as a CUDA graph ({error}); load the model without "
                "graphs=True, in a new process if CUDA stays in an error"
            ) from error
        return _Graph(replay, weights, in_tuple)


def _has_hooks_inside(layer: nn.Module) -> bool:
    """A replay would not call them."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules() if m is not layer)


def _is_constant(value: Any) -> bool:
    """What is the same in every request, or has a fixed stand-in (cache and mask)."""
    return value is None or isinstance(value, bool | str | Cache | RowMask | PackedMask)


def _require_one_gpu(model: ReuseModel) -> None:
    devices = {p.device for p in model.hf.parameters()}
    quantized = bool(getattr(model.hf, "is_quantized", False))
    if len(devices) > 1 or model.device.type != "cuda" or hasattr(model.hf, "hf_device_map") or quantized:
        places = ", ".join(sorted(str(d) for d in devices)) + (", quantized" if quantized else "")
        raise ValueError(
            "graphs=True: CUDA graphs are for a model that is whole, and not quantized, on one CUDA GPU; this one is "
            f"on {places}. Leave graphs out"
        )
