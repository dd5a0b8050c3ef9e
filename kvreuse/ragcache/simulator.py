"""A discrete-event simulator of `RagServer`, on simpy: a cost model in place of the model, all else the same objects.

Tree, policy, queue, speculator and planner are the server's; `kvreuse.ragcache.simulation_run` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvreuse.ragcache.controller import Controller
from kvreuse.ragcache.cost_models import CostModel
from kvreuse.ragcache.simulation_checks import check_costs, check_tree
from kvreuse.ragcache.simulation_input import Requests
from kvreuse.ragcache.simulation_result import SimulationResult
from kvreuse.ragcache.simulation_run import Run
from kvreuse.ragcache.speculative import Speculator
from kvreuse.ragcache.systems import RAGCACHE, System
from kvreuse.ragcache.tree import KnowledgeTree


@dataclass(frozen=True)
class Simulator:
    """A server of one system on one machine; `run` serves requests.

    Args:
        costs: what takes how long.
        gpu, host: capacities of the tiers, like "2GiB" or a number of bytes; a system without host memory ignores
            ``host``.
        system: what is cached, and who is next.
        system_tokens: size of the system prompt.
        max_batch: sequences that decode together.
        max_prefill_batch: fewer than this must wait for a speculative generation to start.
        search_threads: searches at a time; None: all start as they arrive.
        max_open: while so many requests are open arrivals wait, and all later ones are put off as much; None: never.
        max_nodes: see `KnowledgeTree`.
        stepwise: an event for every decode step, also where nothing can happen in between. For tests: the result is the
            same, bit for bit.
    """

    costs: CostModel
    gpu: str | int = "1GiB"
    host: str | int = "4GiB"
    system: System = RAGCACHE
    system_tokens: int = 0
    max_batch: int = 4
    max_prefill_batch: int = 4
    search_threads: int | None = 1
    max_open: int | None = None
    max_nodes: int | None = 100_000
    stepwise: bool = False

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_prefill_batch", "search_threads", "max_open"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give 1 or more")

    def new_tree(self) -> KnowledgeTree:
        """An empty tree of this server's."""
        per_token = self.costs.bytes_per_token
        return KnowledgeTree(
            self.gpu if self.system.reuse else max(1, self.system_tokens * per_token),
            self.host if self.system.host else 0,
            bytes_per_token=per_token,
            policy=self.system.policy,
            cost=self.costs.prefill_s,
            system_tokens=self.system_tokens,
            max_depth=self.system.max_depth,
            max_nodes=self.max_nodes,
        )

    def new_controller(self, tree: KnowledgeTree) -> Controller:
        """What decides over that tree."""
        return Controller(tree, Speculator(self.max_prefill_batch, self.system.speculate), self.system.window)

    def run(
        self,
        requests: Requests,
        tree: KnowledgeTree | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> SimulationResult:
        """Serve all requests.

        Args:
            tree: one to go on with, `new_tree` of a like simulator; None: an empty one. It knows documents by their
                numbers, which mean the same in one `Requests` only, or in several over one list of documents: what
                `Requests.of` numbers anew is found under other documents' numbers. Counts are of this run alone.
            progress: called with the number of requests answered, every thousand.

        Raises:
            ImportError: simpy is not installed.
            ValueError: requests beyond what ``costs`` know, or another server's tree.
        """
        check_costs(self.costs, self.system, requests, self.system_tokens, self.max_batch)
        tree = self.new_tree() if tree is None else tree
        check_tree(tree, self.costs, self.system_tokens)
        return Run(self, requests, tree, progress).result()
