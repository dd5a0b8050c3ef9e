"""MapRerank (LangChain): every chunk answers alone and states how sure it is; the surest answer wins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvreuse.methods.map_passes import MapMethod
from kvreuse.results import Answer, Prefill, ttft
from kvreuse.store import KVStore

if TYPE_CHECKING:
    from kvreuse.methods.map_passes import MappedChunk
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt

# LangChain's rerank prompt, shortened to its rules; it stands behind the document.
RERANK_INSTRUCTION = (
    "Use the above piece of context to answer the question at the end. In addition to giving an answer, also return a "
    "score of how fully it answered the user's question. This should be in the following format:\n\n[answer here]\n"
    "Score: [score between 0 and 100]\n\nBegin!\n\n"
)
_SCORED = re.compile(r"(.*?)\n?Score:\s*(\d+)", flags=re.DOTALL)


@dataclass(frozen=True)
class MapRerank(MapMethod):
    """One pass per chunk answers the question and scores itself from 0 to 100; the highest score wins (7.1).

    A pass without a readable score counts as 0; equal scores are ordered by the answer's likelihood. The first token
    of the final answer is known when all passes are done, and the TTFT says so.
    """

    instruction: str = RERANK_INSTRUCTION
    has_prefill: ClassVar[bool] = False

    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: KVStore) -> Prefill:
        """There is no single prefilled prompt to return."""
        raise TypeError("MapRerank chooses among finished answers and has no prefill to continue: call answer()")

    def answer(
        self,
        model: ReuseModel,
        prompt: RagPrompt,
        store: KVStore,
        max_new_tokens: int = 32,
        stop: str | None = None,
    ) -> Answer:
        """Answer from every chunk alone and keep the best."""
        score_tokens = model.tokenize("\nScore: 100").numel()
        budget = max_new_tokens + score_tokens
        mapped, timer = self.map_chunks(model, prompt, store, budget)
        best = max(mapped, key=_confidence)
        found = _SCORED.match(best.text)
        text = found[1] if found else best.text
        if stop is not None:
            text = text.split(stop, 1)[0]
        return Answer(text.strip(), model.tokenize(text.strip()).tolist(), ttft(timer.stages), dict(timer.stages))


def _confidence(mapped: MappedChunk) -> tuple[int, float]:
    found = _SCORED.match(mapped.text)
    return (min(100, int(found[2])) if found else 0), mapped.mean_logprob
