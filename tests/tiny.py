"""Tiny random-weight twins of each architecture: the real modelling code at toy sizes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import kvreuse as kr

VOCAB = 128
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


# name -> (model type, what differs from _SMALL)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear": ("llama", _rope("linear", factor=4.0)),
    "llama-llama3": (
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    # 4 + 4 factors: head dim 8; prompts longer than 40 tokens take the long ones, chunks encoded alone the short ones
    "phi3-longrope": (
        "phi3",
        {
            **_rope(
                "longrope",
                short_factor=[1.0] * 4,
                long_factor=[1.0, 2.0, 3.0, 4.0],
                original_max_position_embeddings=40,
            ),
            "original_max_position_embeddings": 40,
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi-partial": ("phi", {"num_key_value_heads": 6, "partial_rotary_factor": 0.5}),
    "gpt_neox-partial": ("gpt_neox", {"num_key_value_heads": 6, "rotary_pct": 0.5}),
    "olmo2": ("olmo2", {}),
    "cohere-interleaved": ("cohere", {}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    ),
    "smollm3-nope": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "mixtral-moe": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}


def hf_model(model_type: str, seed: int = 0, **settings: Any) -> torch.nn.Module:
    """A random-weight model in fp32; larger initial weights than usual, so that attention is not uniform."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**_SMALL, **settings})
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15 if "embed" not in name else 0.5)
    return model.eval()


def tiny_model(name: str = "llama", **settings: Any) -> kr.ReuseModel:
    """A wrapped tiny model by its name in `ARCHITECTURES`."""
    model_type, differs = ARCHITECTURES[name]
    return kr.ReuseModel(hf_model(model_type, **{**differs, **settings}), name=name)


WORDS = [f"word{i}" for i in range(100)]


def word_model() -> kr.ReuseModel:
    """A tiny Llama with a tokenizer of one token a word, for what needs texts."""
    vocabulary = {"[UNK]": 0, "<s>": 1, "</s>": 2} | {word: i for i, word in enumerate(WORDS, 3)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", bos_token="<s>", eos_token="</s>", pad_token="[UNK]"
    )
    return kr.ReuseModel(hf_model("llama", max_position_embeddings=4096), tokenizer, name="tiny")


def save_model(folder: Path, shard_size: str = "5GB", **settings: Any) -> Path:
    """A tiny Llama in fp32 and a word tokenizer, in a folder as `kr.load_model` takes it."""
    hf_model("llama", **settings).save_pretrained(folder, max_shard_size=shard_size)
    words = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCAB))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


def ids(count: int, seed: int) -> torch.Tensor:
    """Random token ids, none of them special."""
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def rag_prompt(
    prefix: int = 5, chunks: tuple[int, ...] = (17, 13, 19), question: int = 6, seed: int = 0
) -> kr.RagPrompt:
    """A random prompt of the given lengths."""
    parts = [ids(n, 100 * seed + i) for i, n in enumerate((prefix, *chunks, question))]
    return kr.RagPrompt(parts[0], parts[1:-1], parts[-1])
