"""Reuse of KV caches in retrieval-augmented generation, on unmodified Hugging Face models."""

from kvreuse.blend.placement import rerotate_keys
from kvreuse.blend.schedule import Constant, Gradual, Narrowing
from kvreuse.blend.selectors import (
    HKVD,
    AttendedDeviation,
    FirstTokens,
    OracleDeviation,
    QuestionAttention,
    RandomTokens,
    SelectionView,
    Selector,
    Windows,
)
from kvreuse.checks import check_model
from kvreuse.errors import (
    IntegrityError,
    KVReuseError,
    LostEntryError,
    ProfileMismatchError,
    PromptTooLongError,
    UnsupportedModelError,
)
from kvreuse.kv import ChunkEncoder, ChunkKV, encode_chunk
from kvreuse.loading import load_model
from kvreuse.methods import (
    CacheBlend,
    ChunkReuse,
    FullRecompute,
    FullReuse,
    Funnel,
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
    Document,
    HalvingWindow,
    KnowledgeTree,
    Match,
    Policy,
    SlidingWindow,
    TreeCache,
)
from kvreuse.record import (
    AttentionDeviation,
    AttentionMatrix,
    KVDeviation,
    RankCorrelation,
    Recorder,
    Recording,
    SelectedTokens,
)
from kvreuse.results import Answer, BatchPrefill, Prefill, Trace
from kvreuse.store import KVStore, StorageDevice
from kvreuse.store.controller import LoadingController

__version__ = "0.1.0"

__all__ = [
    "GDSF",
    "HKVD",
    "LFU",
    "LRU",
    "PGDSF",
    "Answer",
    "AttendedDeviation",
    "AttentionDeviation",
    "AttentionMatrix",
    "BatchPrefill",
    "BlockPrefixCache",
    "CacheBlend",
    "ChunkEncoder",
    "ChunkKV",
    "ChunkReuse",
    "Constant",
    "Document",
    "FirstTokens",
    "FullRecompute",
    "FullReuse",
    "Funnel",
    "Gradual",
    "HalvingWindow",
    "IntegrityError",
    "KVDeviation",
    "KVReuseError",
    "KVStore",
    "KnowledgeTree",
    "LegoLink",
    "LoadingController",
    "LostEntryError",
    "MapReduce",
    "MapRerank",
    "Match",
    "Narrowing",
    "OracleDeviation",
    "Policy",
    "Prefill",
    "PrefixCaching",
    "ProfileMismatchError",
    "PromptTooLongError",
    "QuestionAttention",
    "RagCache",
    "RagPrompt",
    "RandomTokens",
    "RankCorrelation",
    "Recorder",
    "Recording",
    "ReuseMethod",
    "ReuseModel",
    "SelectedTokens",
    "SelectionView",
    "Selector",
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
