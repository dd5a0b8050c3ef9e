"""Staged retrieval over faiss: a search that shows its top k while it runs (RAGCache, 5.3 and section 6).

An index is searched in stages; after each the best documents so far are known, in order, and the language model may
start on them. The last stage's list is what a one-shot search returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

INSTALL = "staged search needs faiss: pip install 'kvreuse[experiments]'"


def import_faiss() -> Any:
    """The faiss module, or an error that says what to install."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError(INSTALL) from error
    return faiss


class StagedIndex(ABC):
    """Vectors [n, dim] searched in ``num_stages`` stages by L2 distance."""

    num_stages: int

    @abstractmethod
    def stages(self, query: np.ndarray, top_k: int) -> Iterator[list[int]]:
        """After each stage the ``top_k`` best rows so far, nearest first (fewer while fewer were seen).

        ``query`` is one vector [dim]. The search goes on only as the iterator is advanced.
        """

    @abstractmethod
    def search(self, query: np.ndarray, top_k: int) -> list[int]:
        """One-shot search with the same settings: what the last stage returns."""


def _checked(vectors: np.ndarray, num_stages: int) -> np.ndarray:
    import numpy as np

    rows = np.ascontiguousarray(vectors, dtype=np.float32)
    if rows.ndim != 2 or 0 in rows.shape or not np.isfinite(rows).all():
        raise ValueError(f"vectors have shape {rows.shape}: give finite rows [n, dim], at least one")
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: a search has at least one stage")
    return rows


def _query(query: np.ndarray, dim: int, top_k: int) -> np.ndarray:
    import numpy as np

    row = np.ascontiguousarray(query, dtype=np.float32).reshape(1, -1)
    if row.shape[1] != dim or not np.isfinite(row).all():
        raise ValueError(f"the query has {row.size} numbers, the index {dim} dimensions (all must be finite)")
    if top_k < 1:
        raise ValueError(f"top_k={top_k}: ask for at least one document")
    return row


class IVFStages(StagedIndex):
    """Inverted lists: the probed clusters are searched slice by slice, nearest clusters first.

    faiss asserts that ``search_preassigned`` is given exactly ``nprobe`` clusters, so every stage hands over the full
    width with -1 outside its slice, which faiss skips.

    Args:
        vectors: [n, dim], fp32.
        num_clusters: inverted lists (the paper has 1,024); about ``sqrt(n)`` if None.
        nprobe: clusters searched per query; a quarter of them if None.
        num_stages: slices of the probed clusters.
        seed: of the clustering.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        num_clusters: int | None = None,
        nprobe: int | None = None,
        num_stages: int = 4,
        seed: int = 0,
    ) -> None:
        faiss = import_faiss()
        rows = _checked(vectors, num_stages)
        clusters = num_clusters or max(1, round(len(rows) ** 0.5))
        if not 1 <= clusters <= len(rows):
            raise ValueError(f"num_clusters={clusters} for {len(rows)} vectors: at least one vector for every cluster")
        probe = nprobe or max(1, clusters // 4)
        if not 1 <= probe <= clusters:
            raise ValueError(f"nprobe={probe}: between 1 and the {clusters} clusters")
        self.num_stages = min(num_stages, probe)
        self._quantizer = faiss.IndexFlatL2(rows.shape[1])
        self._index = faiss.IndexIVFFlat(self._quantizer, rows.shape[1], clusters, faiss.METRIC_L2)
        self._index.cp.seed = seed
        self._index.cp.min_points_per_centroid = 1  # a small corpus is no reason for a warning
        self._index.train(rows)
        self._index.add(rows)
        self._index.nprobe = probe

    def stages(self, query: np.ndarray, top_k: int) -> Iterator[list[int]]:
        """One slice of the probed clusters after the other, merged into the best so far."""
        import numpy as np

        row = _query(query, self._index.d, top_k)
        probe = self._index.nprobe
        distances, clusters = self._quantizer.search(row, probe)
        bounds = [round(probe * i / self.num_stages) for i in range(self.num_stages + 1)]
        best: list[tuple[float, int]] = []
        for low, high in pairwise(bounds):
            slice_only = np.full_like(clusters, -1)
            slice_only[:, low:high] = clusters[:, low:high]
            found, rows = self._index.search_preassigned(row, top_k, slice_only, distances)
            seen = [(float(d), int(i)) for d, i in zip(found[0], rows[0], strict=True) if i >= 0]
            # Of two equally near rows faiss keeps the one it met first, and lists the smaller number first.
            kept = sorted(best + seen, key=lambda pair: pair[0])[:top_k]
            best = sorted(kept)
            yield [i for _, i in best]

    def search(self, query: np.ndarray, top_k: int) -> list[int]:
        """All probed clusters at once."""
        _, rows = self._index.search(_query(query, self._index.d, top_k), top_k)
        return [int(i) for i in rows[0] if i >= 0]

    def __repr__(self) -> str:
        ivf = self._index
        return f"IVFStages({ivf.ntotal} vectors, {ivf.nlist} clusters, nprobe={ivf.nprobe}, {self.num_stages} stages)"


class HNSWStages(StagedIndex):
    """A proximity graph, searched again with doubled ``efSearch`` in every stage.

    faiss cannot stop a graph search and go on with it, so the time slices of the paper are restarts here: stage ``i``
    of ``n`` searches with ``ef_search / 2**(n - 1 - i)``. All stages together cost about twice a one-shot search.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        links: int = 32,
        ef_search: int = 128,
        ef_construction: int = 128,
        num_stages: int = 4,
    ) -> None:
        faiss = import_faiss()
        rows = _checked(vectors, num_stages)
        if ef_search < 2 ** (num_stages - 1):
            raise ValueError(f"ef_search={ef_search}: {num_stages} doublings need at least {2 ** (num_stages - 1)}")
        self.num_stages, self._ef_search = num_stages, ef_search
        self._index = faiss.IndexHNSWFlat(rows.shape[1], links)
        self._index.hnsw.efConstruction = ef_construction
        self._index.add(rows)

    def _search(self, row: np.ndarray, top_k: int, ef_search: int) -> list[int]:
        # The width goes with the query, not into the index: several threads may search it.
        parameters = import_faiss().SearchParametersHNSW(efSearch=max(ef_search, top_k))
        _, rows = self._index.search(row, top_k, params=parameters)
        return [int(i) for i in rows[0] if i >= 0]

    def stages(self, query: np.ndarray, top_k: int) -> Iterator[list[int]]:
        """Restarts with doubled ``efSearch``."""
        row = _query(query, self._index.d, top_k)
        for stage in range(self.num_stages):
            yield self._search(row, top_k, self._ef_search >> (self.num_stages - 1 - stage))

    def search(self, query: np.ndarray, top_k: int) -> list[int]:
        """The widest search alone."""
        return self._search(_query(query, self._index.d, top_k), top_k, self._ef_search)

    def __repr__(self) -> str:
        return f"HNSWStages({self._index.ntotal} vectors, efSearch={self._ef_search}, {self.num_stages} stages)"
