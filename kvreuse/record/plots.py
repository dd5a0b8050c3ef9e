"""Frames and pictures of what recorders saw; pandas and matplotlib are imported here alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kvreuse.prompt import RagPrompt

BLUE, LINES = "#0072B2", "#D55E00"


def chunk_of(prompt: RagPrompt) -> torch.Tensor:
    """Per position [S] the index of its chunk: -1 is the prefix, the number of chunks the question."""
    sizes = [prompt.prefix.numel(), *(c.numel() for c in prompt.chunks), prompt.question.numel()]
    return torch.repeat_interleave(torch.arange(-1, len(sizes) - 1), torch.tensor(sizes))


def by_token(name: str, value: torch.Tensor, prompt: RagPrompt) -> pd.DataFrame:
    """[L, n] as columns ``layer``, ``position``, ``chunk``, ``name``."""
    import pandas as pd

    layers, n = value.shape
    columns = {
        "layer": torch.arange(layers).repeat_interleave(n),
        "position": torch.arange(n).repeat(layers),
        "chunk": chunk_of(prompt)[:n].repeat(layers),
        name: value.flatten(),
    }
    return pd.DataFrame({key: column.numpy() for key, column in columns.items()})


def by_layer(name: str, value: torch.Tensor) -> pd.DataFrame:
    """[L] as columns ``layer``, ``name``."""
    import pandas as pd

    return pd.DataFrame({"layer": range(value.numel()), name: value.numpy()})


def by_attention(name: str, value: torch.Tensor, prompt: RagPrompt, layers: tuple[int, ...] | None) -> pd.DataFrame:
    """[layers, H, T, S] as columns ``layer``, ``head``, ``position``, ``key``, ``name``; without NaN rows."""
    import pandas as pd

    number = torch.arange(value.shape[0]) if layers is None else torch.tensor(layers)
    kept = (~value.isnan()).nonzero()
    columns = {
        "layer": number[kept[:, 0]],
        "head": kept[:, 1],
        "position": kept[:, 2] + prompt.num_tokens - value.shape[2],
        "key": kept[:, 3],
        name: value[tuple(kept.T)],
    }
    return pd.DataFrame({key: column.numpy() for key, column in columns.items()})


def boundaries(prompt: RagPrompt) -> list[int]:
    """Where chunks and question start."""
    return [*prompt.chunk_starts, prompt.num_context]


def token_map(axes: Axes, value: torch.Tensor, prompt: RagPrompt, title: str, log: bool) -> None:
    """Layers by positions, chunk boundaries marked."""
    from matplotlib.colors import LogNorm

    top = float(value.max())
    norm = LogNorm(top * 1e-4, top, clip=True) if log and top > 0 else None
    image = axes.imshow(
        value.numpy(), aspect="auto", cmap="cividis", norm=norm, interpolation="nearest", origin="lower"
    )
    for at in boundaries(prompt):
        if at < value.shape[1]:
            axes.axvline(at - 0.5, color="white", linewidth=0.8, linestyle=":")
    axes.set_xlabel("position in the prompt (dotted: chunk boundaries)")
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize=10)
    axes.figure.colorbar(image, ax=axes, pad=0.01)


def layer_line(axes: Axes, value: torch.Tensor, title: str) -> None:
    """One number per layer."""
    axes.plot(range(value.numel()), value.numpy(), marker="o", markersize=4, color=BLUE)
    axes.set_xlabel("layer")
    axes.set_title(title, fontsize=10)
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def attention_map(axes: Axes, weights: torch.Tensor, prompt: RagPrompt, title: str = "attention weight") -> None:
    """Queries [T] by keys [S] on a log scale; rows that did not run (NaN) and keys not seen (0) stay grey."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    shown = weights.masked_fill(weights <= 0, float("nan"))
    colours = colormaps["cividis"].with_extremes(bad="#d9d9d9")
    first = prompt.num_tokens - weights.shape[0]
    image = axes.imshow(
        shown.numpy(),
        aspect="auto",
        cmap=colours,
        norm=LogNorm(1e-4, 1e-1, clip=True),
        interpolation="nearest",
        extent=(-0.5, prompt.num_tokens - 0.5, prompt.num_tokens - 0.5, first - 0.5),
    )
    for at in boundaries(prompt):
        axes.axvline(at - 0.5, color=LINES, linewidth=0.8, linestyle=":")
        if at > first:
            axes.axhline(at - 0.5, color=LINES, linewidth=0.8, linestyle=":")
    axes.set_xlabel("key position (dotted: chunk boundaries)")
    axes.set_ylabel("query position")
    axes.set_title(title, fontsize=10)
    axes.figure.colorbar(image, ax=axes, pad=0.01, extend="both")
