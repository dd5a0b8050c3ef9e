"""docs/models.md tells the truth: what passes does so by numbers, what is refused is refused for its reason."""

import pytest
import survey
import torch
import transformers

import kvreuse as kr

# Other versions refuse the same models, some for another reason (5.0 has other caches and no layer types in places).
IS_SURVEYED = transformers.__version__.startswith("5.24")

# Each for something no model of tiny.ARCHITECTURES has. The others: python tests/survey.py
BATTERY = [
    "falcon",  # calls PyTorch's attention itself, layers named `h`
    "gemma4_text",  # embeddings per layer
    "gpt_oss",  # sinks, every angle once in the rotary table
    "jetmoe",  # a mixture of attention heads
    "laguna",  # a different rotary share and theta per layer type
    "qwen3_moe-window",
    "stablelm",  # LayerNorm per query and key head
]


def _require_type(model_type):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"{model_type} is not in this version of transformers")


@pytest.mark.parametrize("name", BATTERY)
def test_passes_the_gate_and_the_battery(name):
    _require_type(survey.PASSES[name][0])
    model = survey.survey_model(*survey.PASSES[name])
    kr.check_model(model)
    assert survey.battery(model, whole=False) == []


@pytest.mark.parametrize("name", sorted(survey.REFUSED))
def test_is_refused_for_its_reason(name):
    model_type, settings, reason = survey.REFUSED[name]
    _require_type(model_type)
    with pytest.raises(kr.UnsupportedModelError, match=reason if IS_SURVEYED else None):
        kr.check_model(survey.survey_model(model_type, settings))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_alibi_is_refused_in_low_precision_too(dtype):
    """Its error hides in a tolerance that is too wide for the type's rounding."""
    model_type, settings, _ = survey.REFUSED["falcon-alibi"]
    model = kr.ReuseModel(survey.survey_model(model_type, settings).hf.to(dtype))
    with pytest.raises(kr.UnsupportedModelError, match="differs from full prefill"):
        kr.check_model(model)
