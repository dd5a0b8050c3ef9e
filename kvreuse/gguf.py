"""From SmolLM2's GGUF file to a folder that transformers loads directly."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_tokenizer(gguf: Path) -> Any:
    """The GGUF's tokenizer, with what GGUF leaves implicit put back as SmolLM2-135M-Instruct has it."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file only names its pre-tokenizer ("smollm"), and transformers falls back to GPT-2's, which reads
    # "\n\n1987" and two spaces before a digit otherwise: SmolLM2 splits off every single digit first.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = 8192
    return tokenizer


def save_as_safetensors(gguf: Path, folder: Path) -> None:
    """Dequantize the GGUF's weights to float32 and save them with their configuration in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # What was read counts as quantized although its weights are plain floats by now, and refuses to be saved:
    # a model of the same configuration without that mark takes over the weights.
    config = read.config
    del config.quantization_config
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
