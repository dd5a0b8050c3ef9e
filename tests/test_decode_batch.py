"""Sequences decoded together give the tokens and logits of each decoded alone, whoever joins and leaves."""

from __future__ import annotations

import pytest
import torch

import kvreuse as kr
from kvreuse.ragcache.batch import DecodeBatch
from tests.tiny import ids, tiny_model

# fp32: batched and single matrix products sum in another order.
TOLERANCE = 2e-4


def alone(model: kr.ReuseModel, prompt: torch.Tensor, steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens and their logits by full recompute of the growing prompt."""
    tokens: list[int] = []
    logits = []
    for _ in range(steps):
        out, _ = model.prefill(torch.cat([prompt, torch.tensor(tokens, dtype=torch.long)]))
        logits.append(out[0])
        tokens.append(int(out[0].argmax()))
    return tokens, logits


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gpt_neox-partial", "mixtral-moe"])
def test_rows_equal_each_sequence_alone(name: str) -> None:
    model = tiny_model(name)
    prompts = [ids(n, 10 + n) for n in (9, 30, 17, 41)]
    expected = [alone(model, p, 12) for p in prompts]
    batch = DecodeBatch(model, max_rows=3)
    rows: list[int] = []  # which prompt is in which row
    tokens: dict[int, list[int]] = {}

    def join(number: int) -> None:
        logits, cache = model.prefill(prompts[number])
        assert batch.join(cache, prompts[number].numel()) == len(rows)
        rows.append(number)
        tokens[number] = [int(logits[0].argmax())]

    def step() -> None:
        logits = batch.step([tokens[n][-1] for n in rows])
        for row, number in enumerate(rows):
            at = len(tokens[number])
            torch.testing.assert_close(logits[row], expected[number][1][at], atol=TOLERANCE, rtol=TOLERANCE)
            tokens[number].append(int(logits[row].argmax()))

    def leave(number: int) -> None:
        row = rows.index(number)
        moved = batch.leave(row)
        rows[row] = rows[moved]
        rows.pop()

    join(0)
    step()
    join(1)  # longer than what is there: the others move
    join(2)
    for _ in range(3):
        step()
    leave(0)
    join(3)
    for _ in range(4):
        step()
    leave(3)
    leave(2)
    step()
    for number, done in tokens.items():
        assert done == expected[number][0][: len(done)]
    assert max(map(len, tokens.values())) == 9


def test_a_full_buffer_grows() -> None:
    model = tiny_model()
    prompt = ids(5, 3)
    expected, _ = alone(model, prompt, 80)
    batch = DecodeBatch(model, max_rows=2)
    logits, cache = model.prefill(prompt)
    batch.join(cache, 5)
    tokens = [int(logits[0].argmax())]
    while len(tokens) < 80:
        tokens.append(int(batch.step([tokens[-1]])[0].argmax()))
    assert tokens == expected
    assert batch.lengths == [84]


def test_the_joined_cache_is_copied_and_buffers_are_freed() -> None:
    model = tiny_model()
    _, cache = model.prefill(ids(8, 1))
    before = [layer.keys.clone() for layer in cache.layers]
    batch = DecodeBatch(model, max_rows=2)
    batch.join(cache, 8)
    batch.step([5])
    assert all(torch.equal(a, b.keys) for a, b in zip(before, cache.layers, strict=True))
    assert batch.num_bytes > 0
    assert batch.leave(0) == 0
    assert batch.num_bytes == len(batch) == 0


def test_longrope_models_decode_one_by_one() -> None:
    assert DecodeBatch(tiny_model("phi3-longrope"), max_rows=8).max_rows == 1


def test_bad_input() -> None:
    model = tiny_model()
    batch = DecodeBatch(model, max_rows=1)
    _, cache = model.prefill(ids(4, 1))
    with pytest.raises(ValueError, match="0 tokens for 0 sequences"):
        batch.step([])
    with pytest.raises(ValueError, match="num_tokens=0"):
        batch.join(cache, 0)
    batch.join(cache, 4)
    with pytest.raises(ValueError, match="1 sequences already"):
        batch.join(cache, 4)
    with pytest.raises(ValueError, match="row=1"):
        batch.leave(1)
    with pytest.raises(ValueError, match="max_rows=0"):
        DecodeBatch(model, max_rows=0)
