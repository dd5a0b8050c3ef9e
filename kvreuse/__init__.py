"""Reuse of KV caches in retrieval-augmented generation, on unmodified Hugging Face models."""

from kvreuse.blend.placement import rerotate_keys
from kvreuse.blend.schedule import Constant, Gradual
from kvreuse.blend.selectors import (
    HKVD,
    FirstTokens,
    OracleDeviation,
    QuestionAttention,
    RandomTokens,
    SelectionView,
    Selector,
    Windows,
)
from kvreuse.checks import check_model
from kvreuse.errors import IntegrityError, KVReuseError, LostEntryError, PromptTooLongError, UnsupportedModelError
from kvreuse.kv import ChunkEncoder, ChunkKV, encode_chunk
from kvreuse.loading import load_model
from kvreuse.methods import (
    CacheBlend,
    ChunkReuse,
    FullRecompute,
    FullReuse,
    HybridReuse,
    HybridStore,
    LegoLink,
    MapReduce,
    MapRerank,
    PrefixCaching,
    RagCache,
    ReuseMethod,
)
from kvreuse.model import ReuseModel
from kvreuse.prefix import BlockPrefixCache
from kvreuse.prompt import RagPrompt
from kvreuse.ragcache import (
    GDSF,
    LFU,
    LRU,
    PGDSF,
    Corpus,
    CostProfiler,
    Document,
    HalvingWindow,
    KnowledgeTree,
    Match,
    Policy,
    RagServer,
    Retriever,
    ServerOptions,
    SlidingWindow,
    TreeCache,
)
from kvreuse.results import Answer, Prefill, Trace
from kvreuse.store import KVStore, StorageDevice

__version__ = "0.1.0"

__all__ = [
    "GDSF",
    "HKVD",
    "LFU",
    "LRU",
    "PGDSF",
    "Answer",
    "BlockPrefixCache",
    "CacheBlend",
    "ChunkEncoder",
    "ChunkKV",
    "ChunkReuse",
    "Constant",
    "Corpus",
    "CostProfiler",
    "Document",
    "FirstTokens",
    "FullRecompute",
    "FullReuse",
    "Gradual",
    "HalvingWindow",
    "HybridReuse",
    "HybridStore",
    "IntegrityError",
    "KVReuseError",
    "KVStore",
    "KnowledgeTree",
    "LegoLink",
    "LostEntryError",
    "MapReduce",
    "MapRerank",
    "Match",
    "OracleDeviation",
    "Policy",
    "Prefill",
    "PrefixCaching",
    "PromptTooLongError",
    "QuestionAttention",
    "RagCache",
    "RagPrompt",
    "RagServer",
    "RandomTokens",
    "Retriever",
    "ReuseMethod",
    "ReuseModel",
    "SelectionView",
    "Selector",
    "ServerOptions",
    "SlidingWindow",
    "StorageDevice",
    "Trace",
    "TreeCache",
    "UnsupportedModelError",
    "Windows",
    "check_model",
    "encode_chunk",
    "load_model",
    "rerotate_keys",
]
