"""What must hold before a simulation, so that its times and hits mean something."""

from __future__ import annotations

from kvreuse.ragcache.cost_models import Bounded, CostModel
from kvreuse.ragcache.simulation_input import Requests
from kvreuse.ragcache.systems import System
from kvreuse.ragcache.tree import KnowledgeTree


def check_costs(costs: CostModel, system: System, requests: Requests, system_tokens: int, max_batch: int) -> None:
    """Raise ValueError if a prefill or decode step may come up that is larger than what ``costs`` know."""
    if not isinstance(costs, Bounded):
        return
    context = requests.most_context(shown=system.speculate)
    prompts = system_tokens + context + requests.question_tokens
    decoding = requests.new_tokens > 1
    costs.check(
        system_tokens + (int(context.max()) if system.reuse else 0),
        int(prompts.max()),
        int((prompts + requests.new_tokens - 1)[decoding].max(initial=0)),
        min(max_batch, int(decoding.sum())),
    )


def check_tree(tree: KnowledgeTree, costs: CostModel, system_tokens: int) -> None:
    """Raise ValueError if the tree is of a server with other K/V or another system prompt."""
    for name, has, needs in (
        ("bytes_per_token", tree.bytes_per_token, costs.bytes_per_token),
        ("system_tokens", tree.root.num_tokens, system_tokens),
    ):
        if has != needs:
            raise ValueError(f"the tree has {name}={has}, this server {needs}: take `new_tree` of a like simulator")
