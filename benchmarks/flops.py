"""What a prefill has to compute and to move, counted from its trace: no formula per architecture.

What a row costs on each layer is learnt once per model, from a pass of three tokens with hooks on its linear layers;
which rows ran is in the trace; which keys a row sees follows from its position. Counted are matrix products, two
floating-point operations (FLOP) per multiply-add. Norms, activations, rotations and residuals are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import kvreuse as kr
from kvreuse.blend.cache import new_blend_cache
from kvreuse.blend.hooks import hooked
from kvreuse.blend.row_pass import Project, RowPass
from kvreuse.results import BatchPrefill, Prefill, Trace

_PROBE = 3  # tokens


@dataclass(frozen=True)
class Work:
    """What one prefill has to do.

    ``linear``, ``attention``: FLOP. ``weight_bytes``: weights read once. ``kv_bytes``: stored K/V put at their place,
    read and written.
    """

    linear: int
    attention: int
    weight_bytes: int
    kv_bytes: int

    @property
    def flops(self) -> int:
        """Linear layers and attention."""
        return self.linear + self.attention


@dataclass(frozen=True)
class Products:
    """FLOP of linear layers: for every row, and once however many rows there are."""

    per_row: int = 0
    once: int = 0

    def of(self, rows: int) -> int:
        """FLOP of so many rows."""
        return rows * self.per_row + self.once


@dataclass(frozen=True)
class Costs:
    """What a model's layers cost.

    ``layers``: all of a layer's linear layers. ``kv_only``: what runs before K/V are known (the projection of a check
    layer). ``outside``: of no layer, the language-model head among them. ``per_key``: FLOP of one query row and one
    key, all heads. ``kv_bytes``: of one token. ``windows``: keys a row sees, None is all.
    """

    layers: tuple[Products, ...]
    kv_only: tuple[Products, ...]
    outside: Products
    per_key: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    windows: tuple[int | None, ...]
    weight_bytes: int

    @classmethod
    @torch.inference_mode()
    def of(cls, model: kr.ReuseModel) -> Costs:
        """Learn them from a pass of three tokens, each layer's K/V projection run alone before the layer.

        Raises:
            ValueError: a layer has stacks of weight matrices (experts), which run outside of linear layers: no hook
                sees them.
        """
        ids = torch.arange(_PROBE) + 3
        _, cache = model.prefill(ids)
        held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        calls: dict[nn.Module, list[int]] = {}

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            calls.setdefault(module, []).append(args[0].numel() // args[0].shape[-1])

        def project_too(layer: int, rows: torch.Tensor, project: Project) -> None:
            project()

        with ExitStack() as stack:
            for module in model.hf.modules():
                if isinstance(module, nn.Linear):
                    stack.enter_context(hooked(module.register_forward_hook(note)))
            every = torch.arange(_PROBE)
            RowPass(model, new_blend_cache(held), every, _PROBE, narrow=project_too, trim_last=False).run(ids)
        inside: set[nn.Module] = set()
        layers, kv_only = [], []
        for number, layer in enumerate(model.layers):
            _refuse_stacks(model, number, layer)
            own = [module for module in layer.modules() if module in calls]
            inside.update(own)
            layers.append(_products((module, calls[module][-1]) for module in own))
            # What ran twice ran in the projection alone as well.
            kv_only.append(_products((module, calls[module][0]) for module in own if len(calls[module]) > 1))
        heads = int(model.config.num_attention_heads)
        return cls(
            tuple(layers),
            tuple(kv_only),
            _products((module, runs[-1]) for module, runs in calls.items() if module not in inside),
            tuple(2 * heads * (keys.shape[-1] + values.shape[-1]) for keys, values in held),
            tuple(sum(t.numel() * t.element_size() for t in pair) // _PROBE for pair in held),
            tuple(model.window(layer) for layer in range(model.num_layers)),
            sum(module.weight.numel() * module.weight.element_size() for module in calls),
        )

    def work(self, result: Prefill | BatchPrefill) -> Work:
        """What a finished prefill has had to do.

        Exact for full recompute, prefix caching, full reuse, and selectors that choose by fresh K/V or before the
        pass; the question's own pass over reused K/V (`Funnel`, `QuestionAttention`) leaves no trace and is not
        counted. That the check layer's K/V were projected is seen by layer 0, which then ran on all reused tokens.
        """
        traces = result.traces if isinstance(result, BatchPrefill) else [result.trace]
        num_layers = len(self.layers)
        if any(len(trace.selected) != num_layers for trace in traces):
            raise ValueError(f"the trace has {len(traces[0].selected)} layers, the model {num_layers}")
        checks = any(_checks(trace) for trace in traces)
        # A single full prefill is the model's own: there every row goes through all of the last layer.
        trims = len(traces) > 1 or traces[0].num_forced > 0
        first = sum(trace.selected[0].numel() for trace in traces)
        linear = first * self.outside.per_row + len(traces) * self.outside.once  # one row of logits per prompt
        attention = kv_bytes = 0
        for layer in range(num_layers):
            rows = [trace.selected[layer] for trace in traces]
            if layer == 1 and checks:
                linear += self.kv_only[layer].of(first)
            count = sum(own.numel() for own in rows)
            if layer == num_layers - 1 and trims and count > len(rows):
                linear += self.kv_only[layer].of(count)
                rows = [own[-1:] for own in rows]
            linear += self.layers[layer].of(sum(own.numel() for own in rows))
            attention += self.per_key[layer] * sum(scored_keys(own, self.windows[layer]) for own in rows)
            placed = sum(t.num_exact + (0 if layer == 0 and _checks(t) else t.num_reused) for t in traces)
            kv_bytes += 2 * self.kv_bytes[layer] * placed
        return Work(linear, attention, self.weight_bytes, kv_bytes)


def scored_keys(rows: torch.Tensor, window: int | None) -> int:
    """Keys that the rows at these positions see, together: the row at p sees p + 1, in a window at most its length."""
    seen = rows + 1
    return int(seen.clamp(max=window).sum() if window is not None else seen.sum())


def _checks(trace: Trace) -> bool:
    """Whether layer 0 ran on every reused token, so that the check layer could compare their K/V."""
    return bool(trace.ratio) and 0 < trace.num_reused == trace.selected[0].numel() - trace.num_forced


def _products(calls: Iterable[tuple[nn.Linear, int]]) -> Products:
    """From modules and the rows they ran on, of the three."""
    per_row = once = 0
    for module, rows in calls:
        if rows == _PROBE:
            per_row += 2 * module.in_features * module.out_features
        else:
            once += 2 * rows * module.in_features * module.out_features
    return Products(per_row, once)


def _refuse_stacks(model: kr.ReuseModel, number: int, layer: nn.Module) -> None:
    for name, module in layer.named_modules():
        other = [n for n, p in module.named_parameters(recurse=False) if p.dim() > 2]
        if other:
            raise ValueError(
                f"{model.name}: layer {number} has the weights {name}.{other[0]} outside of a linear layer "
                "(experts?), whose products cannot be counted; take a dense model"
            )
