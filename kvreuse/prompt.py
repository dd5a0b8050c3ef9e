"""A RAG prompt as token ids: a system prefix, retrieved chunks, and the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel

TokenIds = torch.Tensor | Sequence[int]
_CHUNKS_GO_HERE = "\u241e"  # a symbol no chat template contains; marks where the chunks are put


def _as_ids(ids: Any, what: str) -> torch.Tensor:
    if isinstance(ids, str):
        raise TypeError(f"{what} is text, not token ids: use RagPrompt.from_texts")
    tensor = torch.as_tensor(ids)
    if tensor.dim() == 0:
        raise TypeError(f"{what} is a single number: give its token ids as a list")
    if tensor.numel() == 0:
        tensor = tensor.long()
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise TypeError(f"{what} holds {tensor.dtype}, not token ids; tokenize text with RagPrompt.from_texts")
    if tensor.dim() != 1:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}; token ids are one-dimensional (one prompt at a time)"
        )
    if tensor.numel() and int(tensor.min()) < 0:
        raise ValueError(f"{what} holds the negative token id {int(tensor.min())}")
    return tensor.long().cpu().clone()


@dataclass(frozen=True, eq=False)
class RagPrompt:
    """``prefix`` + ``chunks`` + ``question``, each a 1-D LongTensor (lists are converted).

    Ids are joined, never text: a chunk keeps its tokens wherever it stands, so its K/V can be found again
    (a joint of texts could merge into other tokens). An empty prefix is allowed; chunks and question are not empty.
    """

    prefix: torch.Tensor
    chunks: tuple[torch.Tensor, ...]
    question: torch.Tensor

    def __init__(self, prefix: TokenIds, chunks: Sequence[TokenIds], question: TokenIds) -> None:
        if len(chunks) == 0:
            raise ValueError("chunks is empty: a RAG prompt needs at least one retrieved chunk")
        put = object.__setattr__
        put(self, "prefix", _as_ids(prefix, "prefix"))
        put(self, "chunks", tuple(_as_ids(c, f"chunks[{i}]") for i, c in enumerate(chunks)))
        put(self, "question", _as_ids(question, "question"))
        for i, chunk in enumerate(self.chunks):
            if chunk.numel() == 0:
                raise ValueError(f"chunks[{i}] is empty: leave it out, or retrieve a text for it")
        if self.question.numel() == 0:
            raise ValueError("question is empty: its last token is where the answer starts, so it needs at least one")

    @classmethod
    def from_texts(
        cls,
        model: ReuseModel,
        *,
        chunks: Sequence[str],
        question: str,
        system: str = "",
        separator: str = "\n\n",
        chat_template: bool | None = None,
    ) -> RagPrompt:
        """Tokenize each part on its own.

        Args:
            model: brings the tokenizer.
            chunks: the retrieved texts, in prompt order; ``separator`` is put behind each and belongs to its tokens.
            question: the user's question with whatever instruction goes with it.
            system: the system prompt; it and the template's opening form the prefix.
            chat_template: put the parts into the tokenizer's chat template; None does it where there is one.
        """
        if isinstance(chunks, str):
            raise TypeError("chunks is one string; give a list of chunk texts")
        for i, text in enumerate(chunks):
            if not text.strip():
                raise ValueError(f"chunks[{i}] is empty: leave it out, or retrieve a text for it")
        if not question.strip():
            raise ValueError("question is empty: there is nothing to answer")
        tokenizer = model.require_tokenizer()
        if chat_template is None:
            chat_template = bool(getattr(tokenizer, "chat_template", None))
        if chat_template:
            before, after = _render_chat(tokenizer, system, question)
            prefix = model.tokenize(before)
        else:
            before, after = (system.rstrip() + separator if system.strip() else ""), question
            opening = tokenizer("")["input_ids"]  # the BOS token, where the tokenizer puts one
            prefix = torch.cat([torch.tensor(opening, dtype=torch.long), model.tokenize(before)])
        return cls(prefix, [model.tokenize(text.strip() + separator) for text in chunks], model.tokenize(after))

    @property
    def input_ids(self) -> torch.Tensor:
        """All token ids, [S]."""
        return torch.cat([self.prefix, *self.chunks, self.question])

    @property
    def num_tokens(self) -> int:
        """S."""
        return self.num_context + self.question.numel()

    @property
    def num_context(self) -> int:
        """N: tokens of prefix and chunks."""
        return self.prefix.numel() + sum(c.numel() for c in self.chunks)

    @property
    def chunk_starts(self) -> list[int]:
        """The position of every chunk's first token."""
        starts, at = [], self.prefix.numel()
        for chunk in self.chunks:
            starts.append(at)
            at += chunk.numel()
        return starts

    def __repr__(self) -> str:
        sizes = "+".join(str(c.numel()) for c in self.chunks)
        return f"RagPrompt(prefix={self.prefix.numel()}, chunks={sizes}, question={self.question.numel()} tokens)"


def _render_chat(tokenizer: Any, system: str, question: str) -> tuple[str, str]:
    """The chat template's text before and after the place of the chunks."""

    def render(messages: list[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    user = _CHUNKS_GO_HERE + question
    with_role = [{"role": "system", "content": system.strip()}] if system.strip() else []
    try:
        text = render([*with_role, {"role": "user", "content": user}])
    except Exception:  # of jinja's own types: some templates refuse a system message (Gemma, early Mistral)
        text = render([{"role": "user", "content": f"{system.strip()}\n\n{user}"}])
    before, found, after = text.partition(_CHUNKS_GO_HERE)
    if not found:
        raise ValueError(
            f"the chat template of {type(tokenizer).__name__} drops the user's text; use chat_template=False"
        )
    return before, after
