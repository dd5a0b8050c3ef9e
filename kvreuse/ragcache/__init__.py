"""RAGCache: a knowledge tree of exact document K/V over GPU and host memory, its policies, scheduling, speculation."""

from kvreuse.ragcache.controller import Controller, Request
from kvreuse.ragcache.corpus import Corpus, Retriever, Retrieves
from kvreuse.ragcache.index import HNSWStages, IVFStages, StagedIndex
from kvreuse.ragcache.kv import TensorBackend, TreeCache
from kvreuse.ragcache.node import Document, KVBackend, Match, Node, SizesOnly
from kvreuse.ragcache.policies import GDSF, LFU, LRU, PGDSF, HalvingWindow, Policy, SlidingWindow
from kvreuse.ragcache.profiler import CostProfiler
from kvreuse.ragcache.scheduler import ReorderQueue
from kvreuse.ragcache.server import RagServer
from kvreuse.ragcache.serving_types import ServedAnswer, ServerOptions
from kvreuse.ragcache.speculative import Decision, Generation, Speculator, State
from kvreuse.ragcache.tree import KnowledgeTree

__all__ = [
    "GDSF",
    "LFU",
    "LRU",
    "PGDSF",
    "Controller",
    "Corpus",
    "CostProfiler",
    "Decision",
    "Document",
    "Generation",
    "HNSWStages",
    "HalvingWindow",
    "IVFStages",
    "KVBackend",
    "KnowledgeTree",
    "Match",
    "Node",
    "Policy",
    "RagServer",
    "ReorderQueue",
    "Request",
    "Retriever",
    "Retrieves",
    "ServedAnswer",
    "ServerOptions",
    "SizesOnly",
    "SlidingWindow",
    "Speculator",
    "StagedIndex",
    "State",
    "TensorBackend",
    "TreeCache",
]
