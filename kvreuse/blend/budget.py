"""The budget of a selection rule: tokens recomputed over tokens reused, on all layers, so that none comes free.

A rule that needs fresh K/V (HKVD) computes those of all reused tokens on layer 0 and on the check layer, whatever its
ratio behind them; both layers count in full.
"""

from __future__ import annotations

from kvreuse.blend.schedule import Schedule, layer_ratio


def spent_budget(ratio: float, num_layers: int, schedule: Schedule, full_layers: int = 0) -> float:
    """Share of the reused tokens' K/V that is computed anew, mean over ``num_layers`` layers.

    ``full_layers``: so many layers at the bottom compute all of them (2 for a selector that ``needs_fresh_kv``).
    """
    behind = range(min(full_layers, num_layers), num_layers)
    partial = sum(layer_ratio(schedule, ratio, layer, num_layers) for layer in behind)
    return (num_layers - len(behind) + partial) / num_layers


def ratio_for_budget(budget: float, num_layers: int, schedule: Schedule, full_layers: int = 0) -> float:
    """The ratio that spends ``budget`` exactly (a fraction of the reused tokens, mean over layers).

    Raises:
        ValueError: the full layers alone cost more, or ``budget`` is not a fraction in [0, 1].
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"budget={budget}: give a fraction in [0, 1]")
    least = spent_budget(0.0, num_layers, schedule, full_layers)
    if budget < least:
        raise ValueError(
            f"budget={budget}: {full_layers} full layers of {num_layers} cost {least:.3f} already; give at least that, "
            "or take a selector that needs no fresh K/V"
        )
    low, high = 0.0, 1.0  # what is spent grows with the ratio
    for _ in range(60):
        middle = (low + high) / 2
        if spent_budget(middle, num_layers, schedule, full_layers) < budget:
            low = middle
        else:
            high = middle
    return high
