"""Prompts, prefill, generation, scores, and the errors of bad input."""

import pytest
import torch
from tiny import VOCAB, hf_model, ids, rag_prompt, tiny_model
from transformers import DynamicCache

import kvreuse as kr
from kvreuse import compat


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_prompt_joins_ids_in_order():
    prompt = kr.RagPrompt([1, 2], [[3], torch.tensor([4, 5])], [6])
    assert prompt.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert (prompt.num_tokens, prompt.num_context, prompt.chunk_starts) == (6, 5, [2, 3])
    assert repr(prompt) == "RagPrompt(prefix=2, chunks=1+2, question=1 tokens)"


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (([1], [], [2]), ValueError, "chunks is empty"),
        (([1], [[2], []], [3]), ValueError, r"chunks\[1\] is empty"),
        (([1], [[2]], []), ValueError, "question is empty"),
        (([1], [[2.5]], [3]), TypeError, r"chunks\[0\] holds torch.float32"),
        (([1], [[[2]]], [3]), ValueError, r"chunks\[0\] has shape \(1, 1\)"),
        (([-4], [[2]], [3]), ValueError, "negative token id -4"),
        (("abc", [[2]], [3]), TypeError, "prefix is text, not token ids"),
        (([1], [3, 4, 5], [3]), TypeError, r"chunks\[0\] is a single number"),
    ],
)
def test_bad_prompts_name_the_part(parts, error, message):
    with pytest.raises(error, match=message):
        kr.RagPrompt(*parts)


def test_text_needs_a_tokenizer(model):
    with pytest.raises(ValueError, match="without a tokenizer"):
        kr.RagPrompt.from_texts(model, chunks=["a"], question="b")
    with pytest.raises(TypeError, match="one string"):
        kr.RagPrompt.from_texts(model, chunks="abc", question="b")
    with pytest.raises(ValueError, match=r"chunks\[1\] is empty"):
        kr.RagPrompt.from_texts(model, chunks=["a", " \n"], question="b")
    with pytest.raises(ValueError, match="question is empty"):
        kr.RagPrompt.from_texts(model, chunks=["a"], question=" ")


@pytest.mark.parametrize("method", [kr.FullRecompute(), kr.CacheBlend(), kr.PrefixCaching(), kr.FullReuse()], ids=repr)
def test_prompts_the_model_cannot_take(model, method):
    store = kr.KVStore()
    long = kr.RagPrompt(ids(50, 0), [ids(150, 1), ids(80, 2)], ids(5, 3))
    with pytest.raises(kr.PromptTooLongError, match=r"285 tokens, llama takes 256: retrieve fewer"):
        method.prefill(model, long, store)
    foreign = kr.RagPrompt([1], [[VOCAB + 7]], [2])
    with pytest.raises(ValueError, match=f"token id {VOCAB + 7} is outside llama's vocabulary of {VOCAB}"):
        method.prefill(model, foreign, store)
    assert len(store) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kr.CacheBlend(ratio=1.5), r"ratio=1.5: .*\[0, 1\]"),
        (lambda: kr.CacheBlend(ratio=-0.1), r"ratio=-0.1"),
        (lambda: kr.CacheBlend(ratio="0.1"), r"ratio='0.1'"),
        (lambda: kr.CacheBlend(ratio=float("nan")), r"ratio=nan"),
        (lambda: kr.CacheBlend(schedule="steep"), "schedule='steep': choose one of constant, gradual"),
        (lambda: kr.CacheBlend(metric="q"), "metric='q': choose one of k, v, kv"),
        (lambda: kr.CacheBlend(context="none"), "context='none': choose one of bare, bos, prefix"),
        (lambda: kr.FullReuse(position="left"), "position='left': choose one of rotate, buffer"),
        (lambda: kr.LegoLink(k=-1), "k=-1"),
        (lambda: kr.Gradual(2.0), r"spread=2.0"),
        (lambda: kr.Windows(0), "size=0"),
        (lambda: kr.QuestionAttention(1.0), "from_layer=1.0"),
        (lambda: kr.MapReduce(map_tokens=0), "map_tokens=0"),
        (lambda: kr.PrefixCaching(offline_chunks=-1), "offline_chunks=-1"),
    ],
)
def test_bad_settings_name_value_and_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_method_without_a_store_says_what_to_pass(model):
    with pytest.raises(TypeError, match=r"pass kr.KVStore\(\)"):
        kr.CacheBlend().prefill(model, rag_prompt(), None)


def test_bos_context_without_a_bos_token(model):
    bare = kr.ReuseModel(hf_model("llama", bos_token_id=None))
    with pytest.raises(ValueError, match="no BOS token: use context='bare'"):
        kr.CacheBlend(context="bos").encode(bare, rag_prompt(), kr.KVStore())


def test_generate_is_greedy_decoding_from_scratch(model):
    prompt = rag_prompt()
    answer = kr.FullRecompute().answer(model, prompt, kr.KVStore(), max_new_tokens=8)
    tokens = prompt.input_ids.tolist()
    for token in answer.token_ids:
        logits = model.hf(torch.tensor([tokens])).logits[0, -1]
        assert int(logits.argmax()) == token
        tokens.append(token)
    assert len(answer.token_ids) == 8 or int(model.hf(torch.tensor([tokens])).logits[0, -1].argmax()) == 2


def test_generate_leaves_the_result_as_it_was(model):
    prompt = rag_prompt()
    result = kr.FullRecompute().prefill(model, prompt)
    first = model.generate(result, max_new_tokens=6)
    assert result.cache.get_seq_length() == prompt.num_tokens
    assert model.generate(result, max_new_tokens=6) == first


def test_generation_ends_at_the_context(model):
    prompt = kr.RagPrompt(ids(50, 0), [ids(150, 1)], ids(54, 3))
    assert prompt.num_tokens == 254
    answer = kr.FullRecompute().answer(model, prompt, kr.KVStore(), max_new_tokens=32)
    assert len(answer.token_ids) <= 3  # two that fit behind the prompt, and the one they predict


def test_generate_wants_at_least_one_token(model):
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        model.generate(kr.FullRecompute().prefill(model, rag_prompt()), max_new_tokens=0)


def test_score_is_the_teacher_forced_log_probability(model):
    prompt, answer = rag_prompt(), ids(5, 9)
    result = kr.FullRecompute().prefill(model, prompt)
    got = model.score(result, answer)
    whole = torch.cat([prompt.input_ids, answer])[None]
    expected = model.hf(whole).logits[0, prompt.num_tokens - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert result.cache.get_seq_length() == prompt.num_tokens
    with pytest.raises(ValueError, match="token_ids is empty"):
        model.score(result, [])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 0.02), (torch.bfloat16, 0.15)])
def test_low_precision_runs_and_stays_close_to_fp32(model, dtype, limit):
    """Largest logit error relative to the largest logit; bf16 keeps 8 bits, fp16 11, over four layers."""
    low = kr.ReuseModel(hf_model("llama").to(dtype), name=str(dtype))
    kr.check_model(low)
    prompt = rag_prompt()
    for method in (kr.FullRecompute(), kr.CacheBlend(ratio=1.0), kr.FullReuse()):
        results = []
        for m in (model, low):
            store = kr.KVStore()
            method.encode(m, prompt, store)
            results.append(method.prefill(m, prompt, store))
        assert results[1].cache.layers[0].keys.dtype == dtype
        a, b = results[0].logits, results[1].logits.float()
        assert float((a - b).abs().max() / a.abs().max()) < limit


def test_full_recompute_is_the_models_own_prefill(model):
    prompt = rag_prompt()
    cache = DynamicCache()
    expected = model.hf(prompt.input_ids[None], **{compat.cache_kwarg(model.hf): cache}).logits[:, -1]
    result = kr.FullRecompute().prefill(model, prompt)
    torch.testing.assert_close(result.logits, expected, atol=1e-5, rtol=1e-5)
    assert [len(r) for r in result.trace.selected] == [prompt.num_tokens] * model.num_layers


def test_stages_make_up_the_ttft(model):
    prompt, store = rag_prompt(), kr.KVStore()
    method = kr.CacheBlend()
    method.encode(model, prompt, store)
    result = method.prefill(model, prompt, store)
    assert set(result.trace.stages) == {"lookup_s", "load_s", "rotate_s", "check_s", "recompute_s", "first_token_s"}
    assert result.ttft_s == pytest.approx(sum(result.trace.stages.values()))
    assert all(seconds >= 0 for seconds in result.trace.stages.values())


class WordTokenizer:
    """Words are ids by length; a chat template that refuses system messages, as Gemma's does."""

    chat_template = "yes"

    def __init__(self, drops_text=False):
        self.drops_text = drops_text

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": ([1] if add_special_tokens else []) + [3 + len(word) for word in text.split()]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        if messages[0]["role"] == "system":
            raise RuntimeError("System role not supported")
        return "<user>" if self.drops_text else f"<user> {messages[0]['content']} <model>"


def test_a_template_without_a_system_role_gets_the_system_text_in_the_users_turn():
    model = kr.ReuseModel(hf_model("llama"), WordTokenizer())
    prompt = kr.RagPrompt.from_texts(model, system="be brief", chunks=["aaa bb"], question="why so")
    lengths = [len(word) + 3 for word in ("<user>", "be", "brief", "aaa", "bb", "why", "so", "<model>")]
    assert prompt.input_ids.tolist() == lengths
    assert (prompt.prefix.numel(), prompt.question.numel()) == (3, 3)


def test_a_template_that_drops_the_text_is_refused():
    model = kr.ReuseModel(hf_model("llama"), WordTokenizer(drops_text=True))
    with pytest.raises(ValueError, match="use chat_template=False"):
        kr.RagPrompt.from_texts(model, chunks=["a"], question="b")
    prompt = kr.RagPrompt.from_texts(model, chunks=["a"], question="b", chat_template=False)
    assert prompt.prefix.tolist() == [1]  # the tokenizer's own opening


def test_the_wrong_kind_of_thing_says_what_to_pass(model):
    prompt, store = rag_prompt(), kr.KVStore()
    for method in (kr.FullRecompute(), kr.CacheBlend(), kr.PrefixCaching(), kr.MapReduce()):
        with pytest.raises(TypeError, match=r"wrap it as kr.ReuseModel"):
            method.prefill(model.hf, prompt, store)
        with pytest.raises(TypeError, match=r"make one with kr.RagPrompt"):
            method.prefill(model, "a text", store)
    with pytest.raises(TypeError, match="is not a model"):
        kr.ReuseModel("gpt2")
    with pytest.raises(TypeError, match="give a selector object"):
        kr.CacheBlend(selector=kr.HKVD)
    with pytest.raises(TypeError, match="schedule=3"):
        kr.CacheBlend(schedule=3)


def test_a_prompt_keeps_its_own_copy():
    chunk = torch.tensor([3, 4, 5])
    prompt = kr.RagPrompt([1], [chunk], [2])
    chunk[0] = 9
    assert prompt.chunks[0].tolist() == [3, 4, 5]


def test_scores_and_stops_that_make_no_sense(model):
    result = kr.FullRecompute().prefill(model, rag_prompt())
    with pytest.raises(kr.PromptTooLongError, match="takes 256"):
        model.score(result, ids(250, 1))
    with pytest.raises(ValueError, match="outside llama's vocabulary"):
        model.score(result, [VOCAB])
    with pytest.raises(ValueError, match="stop=''"):
        model.generate(result, stop="")
