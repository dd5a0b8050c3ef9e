"""`ReuseModel`: a Hugging Face causal LM with what reuse needs to know about it, and greedy generation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from transformers import DynamicCache

from kvreuse import compat
from kvreuse.blend.graphs import LayerGraphs
from kvreuse.errors import PromptTooLongError, UnsupportedModelError
from kvreuse.fingerprint import Fingerprint
from kvreuse.generation import generate, generate_inputs
from kvreuse.results import Answer, BatchPrefill, Prefill
from kvreuse.rope import RotaryTable

if TYPE_CHECKING:
    from kvreuse.prompt import RagPrompt
    from kvreuse.record import Recorder, Recording


class ReuseModel:
    """Wraps any decoder-only Hugging Face causal LM with rotary (or no) positions; the model itself is not changed.

    Args:
        hf: the model, in evaluation mode.
        tokenizer: needed for text only; work with ids needs none.
        name: shown in results; the model's own name by default.
        graphs: replay a blend's layers as CUDA graphs (`kvreuse.blend.graphs`), on a GPU.

    Raises:
        UnsupportedModelError: for a model whose structure is not a stack of attention layers. Whether its keys can be
            moved is checked numerically (`check_model`) before the first reuse.
        ValueError: ``graphs`` for a model that is not whole on a GPU.
    """

    def __init__(self, hf: nn.Module, tokenizer: Any = None, name: str | None = None, graphs: bool = False) -> None:
        if not isinstance(hf, nn.Module):
            raise TypeError(f"hf={hf!r} is not a model: give a Hugging Face causal LM, or use kr.load_model(name)")
        self.hf: Any = hf.eval()
        self.tokenizer = tokenizer
        self.config = compat.text_config(hf)
        self.name = name or getattr(hf, "name_or_path", "") or type(hf).__name__
        self.layers = compat.decoder_layers(hf)
        self.layer_types = compat.layer_types(self.config)
        for index, layer_type in enumerate(self.layer_types):
            if layer_type not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(
                    f"{type(hf).__name__}: layer {index} is of type {layer_type!r}; its state is not a list of keys "
                    "and values by position, so no part of it can be replaced"
                )
        for layer in self.layers:
            compat.attention_module(layer)
        self._checked = False
        self._fingerprint = Fingerprint(hf)
        self._key_rotation: list[str] | None = None
        self._recording: Recording | None = None
        self.graphs = LayerGraphs(self) if graphs else None

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where token ids go: the device of the embedding."""
        embedding = self.hf.get_input_embeddings()
        return compat.execution_device(embedding) or embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type the model computes in."""
        return self.hf.dtype

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def max_context(self) -> int:
        """The most tokens the model takes, prompt and answer together."""
        return int(getattr(self.config, "max_position_embeddings", None) or 2**31)

    @property
    def bos_token_id(self) -> int:
        """The id that opens a text."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        bos = self.config.bos_token_id if bos is None else bos
        if bos is None:
            raise ValueError(f"{self.name} has no BOS token: use context='bare' or context='prefix'")
        return int(bos)

    def layer_device(self, layer: int) -> torch.device:
        """Where a layer computes, and where its K/V belong."""
        return compat.execution_device(self.layers[layer]) or self.device

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, itself included; None is all of them."""
        return int(self.config.sliding_window) if self.layer_types[layer] == "sliding_attention" else None

    @property
    def long_rope_length(self) -> int:
        """The shortest prompt that a longrope model (Phi-3) rotates with its long factors; 0 for other models."""
        switch = compat.longrope_switch(self.config)
        return 0 if switch is None else switch + 1

    def long_rope(self, num_tokens: int) -> bool:
        """Whether a prompt of this length is rotated with long factors; its K/V then differ from a short prompt's."""
        return 0 < self.long_rope_length <= num_tokens

    def rotary_table(self, layer: int, num_tokens: int) -> RotaryTable:
        """The angles of positions 0 .. num_tokens, as the model uses them in a prompt of that length."""
        positions = torch.arange(max(num_tokens, 2), device=self.device)  # all angles of position 0 are alike
        table = RotaryTable.from_model(*compat.rotary_tables(self.hf, self.layer_types[layer], positions))
        return table[:num_tokens]

    @property
    def key_rotation(self) -> list[str]:
        """Per layer how keys carry their position: ``half`` (Llama), ``interleaved`` (Cohere) or ``none`` (NoPE)."""
        if self._key_rotation is None:
            from kvreuse.checks import detect_key_rotation

            self._key_rotation = detect_key_rotation(self)
        return self._key_rotation

    def require_supported(self) -> None:
        """Run `check_model` once, before the first reuse: never silently wrong."""
        if not self._checked:
            from kvreuse.checks import check_model

            check_model(self)

    def check_length(self, num_tokens: int) -> None:
        """Raise `PromptTooLongError` for more tokens than the model's context."""
        if num_tokens > self.max_context:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, {self.name} takes {self.max_context}: retrieve fewer or shorter "
                "chunks"
            )

    def check_prompt(self, prompt: RagPrompt) -> None:
        """Raise for a prompt this model cannot take: too long, or with token ids outside its vocabulary."""
        self.check_length(prompt.num_tokens)
        largest = int(prompt.input_ids.max())
        if largest >= self.config.vocab_size:
            raise ValueError(
                f"token id {largest} is outside {self.name}'s vocabulary of {self.config.vocab_size}: the prompt was "
                "tokenized for another model"
            )

    def fingerprint(self) -> str:
        """SHA-256 (hex) of weights and configuration, taken again after an edit in place (`kvreuse.fingerprint`)."""
        return self._fingerprint.current()

    # -- text -------------------------------------------------------------------------------------------------------

    def require_tokenizer(self) -> Any:
        """The tokenizer, or an error that says what to do."""
        if self.tokenizer is None:
            raise ValueError(
                f"{self.name} was wrapped without a tokenizer: ReuseModel(hf_model, tokenizer), or work with ids"
            )
        return self.tokenizer

    def tokenize(self, text: str) -> torch.Tensor:
        """Token ids of ``text`` [T], no special tokens added."""
        ids = self.require_tokenizer()(text, add_special_tokens=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.long)

    def decode(self, ids: Sequence[int] | torch.Tensor) -> str:
        """Text of token ids; special tokens are left out."""
        return self.require_tokenizer().decode(ids, skip_special_tokens=True)

    # -- running ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, DynamicCache]:
        """Full prefill of ``input_ids`` [S] on the model's own best path: logits [1, V] and the cache of S tokens."""
        self.check_length(input_ids.numel())
        ids = input_ids.to(self.device)[None]
        cache = DynamicCache()
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        return compat.run_model(self.hf, ids, positions, cache)[:, -1], cache

    @property
    def eos_token_ids(self) -> set[int]:
        """The ids that end an answer."""
        eos = getattr(self.hf.generation_config, "eos_token_id", None)
        eos = getattr(self.tokenizer, "eos_token_id", None) if eos is None else eos
        return set() if eos is None else set(eos) if isinstance(eos, list | tuple) else {int(eos)}

    @overload
    def generate(
        self, result: Prefill, max_new_tokens: int = 32, stop: str | None = None, begin: Sequence[int] = ()
    ) -> Answer: ...

    @overload
    def generate(
        self, result: BatchPrefill, max_new_tokens: int = 32, stop: str | None = None, begin: Sequence[int] = ()
    ) -> list[Answer]: ...

    def generate(
        self,
        result: Prefill | BatchPrefill,
        max_new_tokens: int = 32,
        stop: str | None = None,
        begin: Sequence[int] = (),
    ) -> Answer | list[Answer]:
        """Continue a prefilled prompt greedily, behind ``begin`` (the answer's first tokens, where they are known).

        Ends at the model's end token, before the first ``stop`` string, after ``max_new_tokens``, or at the end of the
        model's context. ``result`` can be used again: its cache is cut back to the prompt. Of a batch every row is
        continued, and ends, on its own.
        """
        answers = generate(self, result, max_new_tokens, stop, begin)
        return answers if isinstance(result, BatchPrefill) else answers[0]

    def generate_inputs(self, result: Prefill | BatchPrefill) -> dict[str, Any]:
        """Arguments for ``model.hf.generate``: ids with the first new token [B, S + 1], mask, cache.

        Hugging Face's ``generate`` appends to the cache it is given, so hand a result on once. Where the first token is
        an end token the answer is empty: `generate` says so, Hugging Face's would go on behind it. Shorter prompts of
        a batch are padded on the left.
        """
        return generate_inputs(self, result)

    @torch.inference_mode()
    def score(self, result: Prefill, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Log-probabilities [T, V] (fp32) of the T next tokens, each given the true ones before it."""
        ids = [int(t) for t in token_ids]
        if not ids:
            raise ValueError("token_ids is empty: there is nothing to score")
        length = result.prompt.num_tokens
        self.check_length(length + len(ids) - 1)
        if max(ids) >= self.config.vocab_size:
            raise ValueError(f"token id {max(ids)} is outside {self.name}'s vocabulary of {self.config.vocab_size}")
        logits = [result.logits[0, None]]
        if len(ids) > 1:
            try:
                logits.append(self._next_logits(result, ids[:-1], length)[0])
            finally:
                compat.truncate(result.cache, length)
        return torch.cat(logits).float().log_softmax(dim=-1)

    def _next_logits(self, result: Prefill, ids: list[int], position: int) -> torch.Tensor:
        tokens = torch.tensor([ids], device=self.device)
        positions = torch.arange(position, position + len(ids), device=self.device)[None]
        return compat.run_model(self.hf, tokens, positions, result.cache, logits_to_keep=0)

    def record(self, *recorders: Recorder) -> AbstractContextManager[Recording]:
        """Record what a method's prefill inside the block does, layer by layer (`kvreuse.record`).

        Changes no bit of the output; hooks are removed on exit, also after an error.
        """
        from kvreuse.record import recording_of

        return recording_of(self, recorders)

    @property
    def is_recorded(self) -> bool:
        """Inside a `record` block."""
        return self._recording is not None

    def prefilled(self, result: Prefill) -> Prefill:
        """What prefills a prompt hands its result through here, behind the last timed stage, for a recording to see."""
        if self._recording is not None:
            self._recording.prefilled(result)
        return result

    def __repr__(self) -> str:
        return f"ReuseModel({self.name}, {self.num_layers} layers, {self.dtype}, {self.device})"
