"""Behaviour on a real small model: text, answers, batched passes."""

import pytest
import torch

import kvreuse as kr
from kvreuse.metrics import kl_divergence

CHUNKS = [
    "The lighthouse of Kerrin Point was built in 1871 by the engineer Oda Malling, who also drew the harbour bridge.",
    "Oda Malling was born in the town of Vessel. She studied in the capital and returned to the coast in 1860.",
    "The town of Vessel lies on the river Aun and is known for its paper mills and its spring market.",
]
QUESTION = "In which town was the engineer of the lighthouse of Kerrin Point born?"


@pytest.fixture(scope="module")
def prompt(demo_model):
    return kr.RagPrompt.from_texts(demo_model, system="Answer from the passages.", chunks=CHUNKS, question=QUESTION)


def stored(method, model, prompt):
    store = kr.KVStore()
    method.encode(model, prompt, store)
    return store


def test_text_becomes_the_chat_template_with_chunks_inside(demo_model, prompt):
    text = demo_model.tokenizer.decode(prompt.input_ids)
    body = "\n\n".join(CHUNKS)
    assert text == (
        f"<|im_start|>system\nAnswer from the passages.<|im_end|>\n<|im_start|>user\n{body}\n\n{QUESTION}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_ids_are_joined_never_text(demo_model):
    """Two chunks whose joint is one BPE merge keep their own tokens, wherever they stand."""
    halves = ["inter", "national"]
    assert demo_model.tokenize("".join(halves)).numel() == 1
    prompt = kr.RagPrompt.from_texts(demo_model, chunks=halves, question="?", separator="", chat_template=False)
    assert [demo_model.decode(c) for c in prompt.chunks] == halves
    method = kr.CacheBlend()
    store = stored(method, demo_model, prompt)
    swapped = kr.RagPrompt(prompt.prefix, prompt.chunks[::-1], prompt.question)
    assert method.prefill(demo_model, prompt, store).trace.hits == 2
    assert method.prefill(demo_model, swapped, store).trace.hits == 2


def test_ratio_one_gives_full_recomputes_answer(demo_model, prompt):
    method = kr.CacheBlend(ratio=1.0)
    full = kr.FullRecompute().prefill(demo_model, prompt)
    result = method.prefill(demo_model, prompt, stored(method, demo_model, prompt))
    # fp32 over 30 layers; logits are of order 10
    torch.testing.assert_close(result.logits, full.logits, atol=2e-3, rtol=1e-4)
    answer = demo_model.generate(full, max_new_tokens=16)
    assert demo_model.generate(result, max_new_tokens=16).token_ids == answer.token_ids
    assert answer.text


def test_more_recompute_is_closer_to_full_recompute(demo_model, prompt):
    full = kr.FullRecompute().prefill(demo_model, prompt)
    answer = demo_model.generate(full, max_new_tokens=16).token_ids
    reference = demo_model.score(full, answer)
    kl = []
    for ratio in (0.0, 0.3, 1.0):
        method = kr.CacheBlend(ratio=ratio)
        result = method.prefill(demo_model, prompt, stored(method, demo_model, prompt))
        kl.append(kl_divergence(reference, demo_model.score(result, answer)))
    assert kl[0] > kl[1] > kl[2]
    assert kl[2] < 1e-4


def test_map_passes_equal_single_prompts(demo_model, prompt):
    """Batched, left-padded, with reused prefixes: every chunk's pass says what it says alone."""
    method = kr.MapReduce(map_tokens=12)
    store = stored(method, demo_model, prompt)
    mapped, timer = method.map_chunks(demo_model, prompt, store, method.map_tokens)
    asked = torch.cat([demo_model.tokenize(method.instruction), prompt.question])
    for chunk, got in zip(prompt.chunks, mapped, strict=True):
        alone = kr.RagPrompt(prompt.prefix, [chunk], asked)
        answer = kr.FullRecompute().answer(demo_model, alone, store, max_new_tokens=12)
        assert got.token_ids == answer.token_ids
    assert {"lookup_s", "load_s", "map_prefill_s", "map_decode_s"} <= set(timer.stages)


def test_map_reduce_answers_from_the_condensed_chunks(demo_model, prompt):
    method = kr.MapReduce(map_tokens=24)
    store = stored(method, demo_model, prompt)
    result = method.prefill(demo_model, prompt, store)
    assert result.prompt.num_tokens < prompt.num_tokens + 24
    assert result.ttft_s > result.trace.stages["recompute_s"]
    assert method.answer(demo_model, prompt, store, max_new_tokens=8).text


def test_map_rerank_takes_the_surest_chunk(demo_model, prompt):
    method = kr.MapRerank()
    store = stored(method, demo_model, prompt)
    answer = method.answer(demo_model, prompt, store, max_new_tokens=16)
    assert answer.text
    assert "Score:" not in answer.text
    assert answer.ttft_s > 0
    with pytest.raises(TypeError, match=r"call answer\(\)"):
        method.prefill(demo_model, prompt, store)


def test_stop_cuts_the_answer(demo_model, prompt):
    result = kr.FullRecompute().prefill(demo_model, prompt)
    free = demo_model.generate(result, max_new_tokens=16)
    word = free.text.split()[1]
    cut = demo_model.generate(result, max_new_tokens=16, stop=word)
    assert cut.text == free.text.split(word)[0].strip()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 0.02), (torch.bfloat16, 0.1)])
def test_half_precision_blend_stays_close(demo_model, prompt, dtype, limit):
    """Largest logit error of a blend against fp32, relative to the largest logit."""
    low = kr.load_model("demo", dtype=dtype)
    method = kr.CacheBlend(ratio=0.2)
    exact = method.prefill(demo_model, prompt, stored(method, demo_model, prompt)).logits
    rough = method.prefill(low, prompt, stored(method, low, prompt)).logits.float()
    assert float((exact - rough).abs().max() / exact.abs().max()) < limit
