"""Recorders: KV deviation, attention and selection layer by layer, while any method prefills."""

from kvreuse.record.recorders import (
    AttentionDeviation,
    AttentionMatrix,
    KVDeviation,
    RankCorrelation,
    Recorder,
    SelectedTokens,
)
from kvreuse.record.recording import Recording, recording_of

__all__ = [
    "AttentionDeviation",
    "AttentionMatrix",
    "KVDeviation",
    "RankCorrelation",
    "Recorder",
    "Recording",
    "SelectedTokens",
    "recording_of",
]
