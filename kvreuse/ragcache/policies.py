"""Replacement policies (RAGCache, 5.1): a policy only ranks; the tree owns tiers, clocks and heaps.

All time is logical: the number of requests served. The node with the lowest priority leaves a tier first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

CostRule = Literal["prefill", "tokens", "constant"]


class Ranked(Protocol):
    """What a policy may look at. Costs are in seconds (or whatever unit the tree's cost function has)."""

    num_tokens: int
    frequency: float  # retrievals, within the policy's window
    last_access: int  # number of the request that retrieved it last
    history: deque[int] | None  # numbers of the requests in a sliding window
    document_cost: float  # T(0, num_tokens): prefill of the document alone

    @property
    def mean_cost(self) -> float:
        """Mean of Cost_i / NewSize_i over the requests that had to compute the document: seconds per token."""
        ...


@dataclass(frozen=True)
class SlidingWindow:
    """Frequency counts the retrievals among the last ``requests`` requests."""

    requests: int

    def __post_init__(self) -> None:
        _check_window(self.requests)

    def touch(self, node: Ranked, now: int) -> None:
        """Count a retrieval at request number ``now``."""
        if node.history is None:
            node.history = deque()
        node.history.append(now)
        while node.history[0] <= now - self.requests:
            node.history.popleft()
        node.frequency = len(node.history)


@dataclass(frozen=True)
class HalvingWindow:
    """Frequency is halved every ``requests`` requests (made up for when a node is next retrieved)."""

    requests: int

    def __post_init__(self) -> None:
        _check_window(self.requests)

    def touch(self, node: Ranked, now: int) -> None:
        """Count a retrieval at request number ``now``."""
        halvings = now // self.requests - node.last_access // self.requests
        node.frequency = node.frequency * 0.5**halvings + 1


Window = SlidingWindow | HalvingWindow


def _check_window(requests: int) -> None:
    if isinstance(requests, bool) or not isinstance(requests, int) or requests < 1:
        raise ValueError(f"requests={requests!r}: a frequency window is a whole number of requests, 1 or more")


@dataclass(frozen=True)
class Policy(ABC):
    """Ranks nodes within a tier.

    Args:
        window: over which requests frequency is counted; None since the start.
        persistent: keep a node's frequency while it has no K/V in any tier (the paper's reading). False forgets it
            when the last copy goes, as caches do that know nothing about what they do not hold.

    A node's priority is computed when it is retrieved or enters a tier, and stored; between these it does not move.
    """

    window: Window | None = None
    persistent: bool = True

    def __post_init__(self) -> None:
        if self.window is not None and not isinstance(self.window, SlidingWindow | HalvingWindow):
            raise TypeError(f"window={self.window!r}: give None, SlidingWindow(requests) or HalvingWindow(requests)")

    def touch(self, node: Ranked, now: int) -> None:
        """Count a retrieval of ``node`` by request number ``now``."""
        if self.window is None:
            node.frequency += 1
        else:
            self.window.touch(node, now)
        node.last_access = now

    @abstractmethod
    def priority(self, node: Ranked, clock: float) -> float:
        """The priority of ``node`` in a tier whose clock shows ``clock``."""


@dataclass(frozen=True)
class PGDSF(Policy):
    """Prefix-aware Greedy-Dual-Size-Frequency (RAGCache, 5.1): Clock + Frequency * mean_i(Cost_i / NewSize_i).

    Cost_i is T(alpha, beta) of the i-th request that had to compute the document, NewSize_i its beta non-cached tokens,
    question included.
    """

    def priority(self, node: Ranked, clock: float) -> float:
        """Clock + Frequency * mean cost per non-cached token."""
        return clock + node.frequency * node.mean_cost


@dataclass(frozen=True)
class GDSF(Policy):
    """Greedy-Dual-Size-Frequency (Cherkasova, 1998): Clock + Frequency * Cost / Size, blind to what stands before.

    Args:
        cost: ``prefill`` is T(0, tokens), the document computed alone; ``tokens`` is proportional to the size;
            ``constant`` is 1, the web cache's choice for most hits.
    """

    cost: CostRule = "prefill"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cost not in get_args(CostRule):
            raise ValueError(f"cost={self.cost!r}: choose one of {', '.join(get_args(CostRule))}")

    def priority(self, node: Ranked, clock: float) -> float:
        """Clock + Frequency * Cost / Size."""
        size = max(1, node.num_tokens)
        cost = {"prefill": node.document_cost, "tokens": size, "constant": 1.0}[self.cost]
        return clock + node.frequency * cost / size


@dataclass(frozen=True)
class LRU(Policy):
    """Least recently retrieved first."""

    def priority(self, node: Ranked, clock: float) -> float:
        """The number of the request that retrieved it last."""
        return node.last_access


@dataclass(frozen=True)
class LFU(Policy):
    """Least frequently retrieved first; among equals, least recently."""

    def priority(self, node: Ranked, clock: float) -> float:
        """Frequency."""
        return node.frequency
