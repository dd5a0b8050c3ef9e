"""A survey of causal LM types beyond tiny.ARCHITECTURES: which pass the gate, and whether the gate is right.

``python tests/survey.py [name ...]`` runs the whole battery of test_architectures.py on each (minutes) and prints the
rows of docs/models.md. `test_support_survey.py` keeps the outcomes from changing unseen.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import transformers
from tiny import _SMALL, rag_prompt
from transformers import AutoConfig, AutoModelForCausalLM

import kvreuse as kr

WINDOW = 24  # every window is shorter than the prompts (60 tokens), so that a wrong one shows
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MIXED: dict[str, Any] = {"layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]}
# Where a configuration has one of these fields it is set to something small.
_SMALLER: dict[str, Any] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "index_topk", "index_head_dim"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "mamba_d_head"), 8),
    **{"head_dim": 16, "vocab_size_per_layer_input": 128, "sliding_window": WINDOW},
}
_MLA: dict[str, Any] = {"num_key_value_heads": 6, "head_dim": None}

# name -> (model type, what differs)
PASSES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in (
            "afmoe", "apertus", "arcee", "bitnet", "cohere2_moe", "cwm", "diffllama", "dots1", "ernie4_5",
            "ernie4_5_moe", "exaone", "exaone_moe", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "gpt_oss",
            "gpt_neox_japanese", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_dense",
            "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "mellum",
            "minimax_m2", "ministral", "ministral3", "mixtral", "modernbert-decoder", "nemotron", "olmo", "olmoe",
            "persimmon", "phi3", "phimoe", "sarvam_moe", "seed_oss", "solar_open", "starcoder2", "vaultgemma",
        )
    },
    **{name: (name, _MIXED) for name in ("cohere2", "exaone4", "gemma4_text", "kolibri1", "laguna", "olmo3")},
    **{
        f"{name}-window": (name, {"use_sliding_window": True, "max_window_layers": 2})
        for name in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
    },
    "falcon": ("falcon", {"head_dim": None, "num_kv_heads": 6}),
    "falcon-multi-query": ("falcon", {"head_dim": None, "multi_query": True, "attn_implementation": "eager"}),
    "granitemoehybrid-attention": (
        "granitemoehybrid",
        {"mamba_n_heads": 12, "layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
    ),
    "helium": ("helium", {"head_dim": 8}),
    "stablelm": ("stablelm", {"qk_layernorm": True, "partial_rotary_factor": 0.25}),
}  # fmt: skip

# name -> (model type, what differs, words of the reason)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    **{name: (name, {}, "no rotary module") for name in ("biogpt", "bloom", "gpt2", "gpt_bigcode", "mpt", "opt")},
    **{
        name: (name, _MLA, "latent attention")
        for name in ("axk1", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu")
    },
    **{name: (name, {"rotary_dim": 4, "num_attention_heads": 8}, "not a rotation") for name in ("codegen", "gptj")},
    **{
        name: (name, {}, "is of type 'linear_attention'")
        for name in ("jamba", "lara_mini", "mamba", "minimax", "olmo_hybrid", "recurrent_gemma")
    },
    **{name: (name, _MLA, "is of type 'indexed_attention'") for name in ("deepseek_v32", "glm_moe_dsa")},
    "bamba": ("bamba", {"mamba_n_heads": 12}, "is of type 'linear_attention'"),
    "deepseek_v2": ("deepseek_v2", _MLA, "does not return"),
    "doge": ("doge", {}, "do not run on a part"),
    "falcon-alibi": ("falcon", {"head_dim": None, "num_kv_heads": 6, "alibi": True}, "differs from full prefill"),
    "falcon_h1": ("falcon_h1", {}, "is of type 'hybrid'"),
    "gemma4-shared": ("gemma4_text", {**_MIXED, "num_kv_shared_layers": 2}, "share them"),
    "gemma3n_text": (
        "gemma3n_text",
        {
            **{**_MIXED, "num_kv_shared_layers": 2, "laurel_rank": 8},
            **{"activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [64] * 4},
        },
        "share them",
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", _FULL, "conv", _FULL]}, "is of type 'conv'"),
    "llama4_text": ("llama4_text", {"layer_types": ["chunked_attention"] * 3 + [_FULL]}, "'chunked_attention'"),
    "longcat_flash": ("longcat_flash", {**_MLA, "head_dim": 8}, "run more than once"),
    "nanochat": ("nanochat", {}, "not a rotation"),
    "minimax_m3": ("minimax_m3_vl_text", {"layer_types": ["minimax_m3_sparse"] * 4}, "'minimax_m3_sparse'"),
}


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # a field that differs by layer may not be read
        return name != "head_dim"


def survey_model(model_type: str, settings: dict[str, Any]) -> kr.ReuseModel:
    """A tiny random-weight model; ``None`` in settings leaves the type's own value."""
    torch.manual_seed(0)
    own = AutoConfig.for_model(model_type)
    attention = settings.get("attn_implementation", "sdpa")
    values = {**_SMALL, **{k: v for k, v in _SMALLER.items() if _has(own, k)}, **settings}
    config = AutoConfig.for_model(model_type, **{k: v for k, v in values.items() if v is not None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            hf = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        except ValueError:  # no SDPA: gpt-oss has sinks
            hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for name, parameter in hf.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15 if "embed" not in name else 0.5)
    return kr.ReuseModel(hf.eval(), name=model_type)


def battery(model: kr.ReuseModel, whole: bool = True) -> list[str]:
    """What of test_architectures.py fails on ``model``: nothing, if the gate is right to let it through."""
    import test_architectures as suite

    prompt, failed = rag_prompt(), []

    def run(name: str, check: Any, *args: Any) -> None:
        try:
            check(model, prompt, *args)
        except Exception as error:  # all of them, not the first
            if "attention returns no weights" in str(error):
                return  # QuestionAttention, and says so: Falcon needs attn_implementation="eager" for it
            failed.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")

    methods = suite.SELECTIVE if whole else [kr.LegoLink(k=3), kr.CacheBlend(ratio=0.3, schedule="constant")]
    for context in ("bare", "prefix") if whole else ("prefix",):
        run(f"ratio 1, {context}", suite.test_ratio_one_is_full_recompute, "gradual", context)
    run("prefix caching", suite.test_prefix_caching_is_exact)
    for method in methods:
        run(repr(method), suite.test_selective_recompute_equals_decoding_token_by_token, method)
    if whole:
        run("position buffer", suite.test_position_buffer_agrees_with_rotation, "prefix")
        model.hf.generation_config.eos_token_id = None  # random weights may end at once
        run("generate", suite.test_hf_generate_continues_from_the_cache)
    return failed


def main(names: list[str]) -> None:
    """Print one row per model."""
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for name, (model_type, settings, *_) in sorted({**PASSES, **REFUSED}.items()):
        if names and name not in names:
            continue
        try:
            model = survey_model(model_type, settings)
            kr.check_model(model)
            failed = battery(model)
            outcome = f"passes the gate, FAILS: {failed}" if failed else "passes the gate and the battery"
        except kr.UnsupportedModelError as error:
            outcome = f"refused: {error}"
        except Exception as error:
            outcome = f"CRASH {type(error).__name__}: {error}"
        print(f"| `{name}` | {outcome} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
