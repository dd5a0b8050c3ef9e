"""What every simulated figure says of its runs and servers."""

from __future__ import annotations

from experiments.ragcache.frame import embedder_note
from experiments.results import Results

RUNS = (
    "Means over {seeds} seeds with 95% bootstrap intervals; each run: {requests} requests from empty caches, of which "
    "the first {warmup} are left out. A load of 1 keeps a server busy all the time that reuses nothing. Hits: of "
    "documents, and of their tokens, in any tier; prefill: seconds of a request's own prefill."
)


def notes_of(results: Results) -> str:
    """How the runs were made, and each server's costs and capacities."""
    header = results.header
    servers = [
        f"{s['title']}: costs {s['costs']}; GPU holds {s['gpu_tokens']:,} tokens of K/V, host {s['host_tokens']:,}; "
        f"documents have {_length(s['mean_document_tokens'])}; a search takes {s['search_s']:.3g} s."
        for s in header["scales"]
    ]
    return f"{RUNS.format(**header)} {embedder_note(results)}\n\n" + "\n".join(servers)


def _length(mean: int | None) -> str:
    return "their own lengths" if mean is None else f"{mean:,} tokens on average (ours, stretched)"


def scale_note(results: Results) -> str:
    """How a title says where the costs are from."""
    costs = results.header["scales"][0]["costs"]
    return "published-hardware scale" if "published-hardware scale" in costs else costs
