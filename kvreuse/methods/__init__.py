"""Methods: one small file each, one interface."""

from kvreuse.methods.base import ChunkReuse, ReuseMethod
from kvreuse.methods.cacheblend import CacheBlend
from kvreuse.methods.full_recompute import FullRecompute
from kvreuse.methods.full_reuse import FullReuse
from kvreuse.methods.funnel import Funnel
from kvreuse.methods.hybrid_reuse import HybridReuse, HybridStore
from kvreuse.methods.legolink import LegoLink
from kvreuse.methods.map_reduce import MapReduce
from kvreuse.methods.map_rerank import MapRerank
from kvreuse.methods.prefix_caching import PrefixCaching
from kvreuse.methods.rag_cache import RagCache

__all__ = [
    "CacheBlend",
    "ChunkReuse",
    "FullRecompute",
    "FullReuse",
    "Funnel",
    "HybridReuse",
    "HybridStore",
    "LegoLink",
    "MapReduce",
    "MapRerank",
    "PrefixCaching",
    "RagCache",
    "ReuseMethod",
]
