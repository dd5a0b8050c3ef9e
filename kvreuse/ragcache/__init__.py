"""RAGCache: a knowledge tree of exact document K/V over GPU and host memory, its policies, scheduling, speculation."""

from kvreuse.ragcache.kv import TensorBackend, TreeCache
from kvreuse.ragcache.node import Document, KVBackend, Match, Node, SizesOnly
from kvreuse.ragcache.policies import GDSF, LFU, LRU, PGDSF, HalvingWindow, Policy, SlidingWindow
from kvreuse.ragcache.tree import KnowledgeTree

__all__ = [
    "GDSF",
    "LFU",
    "LRU",
    "PGDSF",
    "Document",
    "HalvingWindow",
    "KVBackend",
    "KnowledgeTree",
    "Match",
    "Node",
    "Policy",
    "SizesOnly",
    "SlidingWindow",
    "TensorBackend",
    "TreeCache",
]
