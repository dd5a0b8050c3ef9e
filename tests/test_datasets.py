"""Loaders: the small sets, tiny files in each real form, errors, determinism; the real sets where they are."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import dataset_sources
from experiments.dataset_formats import group_shots
from experiments.datasets import DATASET_NAMES, Case, Document, load_dataset, paragraph_chunks

REPOSITORY = Path(__file__).resolve().parents[1]
REAL = REPOSITORY.parent / "shared" / "data"
SMALL_NAMES = [name for name in DATASET_NAMES if name != "musique_cacheblend"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("KVREUSE_DATA", raising=False)


@pytest.fixture
def nothing_beside(monkeypatch, tmp_path):
    """A repository with no shared/data beside it."""
    monkeypatch.setattr(dataset_sources, "REPOSITORY", tmp_path / "nested" / "repository")


def write(folder: Path, name: str, records: list[dict]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder


def musique_record(case_id="2hop__1", gold=(0, 2), paragraphs=5, **changes) -> dict:
    record = {
        "id": case_id,
        "paragraphs": [
            {"idx": i, "title": f"T{i}", "paragraph_text": f" text {i} ", "is_supporting": i in gold}
            for i in range(paragraphs)
        ],
        "question": "Where? ",
        "answer": "Here",
        "answer_aliases": ["here", "Here"],
        "answerable": True,
    }
    return record | changes


def wiki_record(case_id="a", **changes) -> dict:
    record = {
        "_id": case_id,
        "type": "comparison",
        "question": "Which?",
        "context": [["A", ["One.", " Two."]], ["B", ["Three."]], ["B", ["Three."]], ["C", ["Four."]]],
        "supporting_facts": [["A", 0], ["C", 0]],
        "answer": "A",
    }
    return record | changes


# --- small sets


@pytest.mark.parametrize("name", SMALL_NAMES)
def test_small_set_is_the_last_resort(name, nothing_beside):
    dataset = load_dataset(name)
    assert (dataset.name, dataset.source, len(dataset.cases)) == (name, "small set", 24)
    assert len({case.case_id for case in dataset.cases}) == 24
    for case in dataset.cases:
        assert case.answers
        assert all(case.answers)
        assert all(document.text == document.text.strip() for document in case.documents)
        prompt = dataset.task.system + "".join(paragraph_chunks(case)) + dataset.task.question_template
        assert 450 <= len(prompt.split()) <= 1400


@pytest.mark.parametrize("name", ["musique", "2wikimqa"])
def test_small_questions_have_ten_paragraphs_and_marked_gold(name):
    for case in load_dataset(name, data_dir="small").cases:
        assert len({document.title for document in case.documents}) == 10
        assert all(60 <= len(document.text.split()) <= 110 for document in case.documents)
        gold = [document for document in case.documents if document.gold]
        assert 2 <= len(gold) <= 4
        answer = case.answers[0].lower()
        if answer not in {"yes", "no"}:
            named = [d.title for d in case.documents if answer in f"{d.title} {d.text}".lower()]
            assert set(named) <= {document.title for document in gold}, "a distractor gives the answer away"
            assert named or "telle" in answer


def test_small_musique_steps_are_in_their_paragraphs():
    path = REPOSITORY / "data" / "musique_small.jsonl"
    for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        hops = record["question_decomposition"]
        assert record["id"].startswith(f"{len(hops)}hop")
        assert sum(paragraph["is_supporting"] for paragraph in record["paragraphs"]) == len(hops)
        for hop in hops:
            paragraph = record["paragraphs"][hop["paragraph_support_idx"]]
            assert paragraph["is_supporting"]
            assert hop["answer"].lower() in f"{paragraph['title']} {paragraph['paragraph_text']}".lower()


def test_small_2wikimqa_types_and_facts():
    path = REPOSITORY / "data" / "2wikimqa_small.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    types = Counter(record["type"] for record in records)
    assert types == {"compositional": 8, "comparison": 7, "bridge_comparison": 6, "inference": 3}
    for record in records:
        context = dict(record["context"])
        assert all(sentence < len(context[title]) for title, sentence in record["supporting_facts"])


def test_tasks_have_longbench_prompts_and_limits():
    tasks = {name: load_dataset(name, data_dir="small").task for name in SMALL_NAMES}
    assert tasks["musique"] == tasks["2wikimqa"]
    question = tasks["musique"].question_template.format(question="Who?")
    assert question.endswith("Answer within 5 words.\n\nQuestion: Who?\nAnswer:")
    assert [tasks[name].max_new_tokens for name in ("musique", "samsum", "multinews")] == [32, 128, 512]
    assert [tasks[name].metric for name in ("musique", "samsum", "multinews")] == ["f1", "rougeL", "rougeL"]
    assert [tasks[name].stop for name in ("musique", "samsum", "multinews")] == [None, "\n", None]
    assert [tasks[name].kind for name in ("musique", "samsum", "multinews")] == ["qa", "few_shot", "summary"]
    assert tasks["multinews"].question_template.format(question="").endswith("\n\nSummary:\n")


# --- real forms


def test_musique_form(tmp_path):
    records = [musique_record(), musique_record("2hop__2", answerable=False)]
    dataset = load_dataset("musique", data_dir=write(tmp_path, "musique/musique.jsonl", records))
    assert dataset.source == f"data-dir:{tmp_path}"
    (case,) = dataset.cases
    assert (case.case_id, case.question, case.answers) == ("2hop__1", "Where?", ("Here", "here"))
    assert case.documents[0] == Document("T0", "text 0", True)
    assert [document.gold for document in case.documents] == [True, False, True, False, False]


def test_musique_cacheblend_form(tmp_path):
    chunks = [{"title": "", "text": f"chunk {i}"} for i in range(3)]
    records = [{"question": "q", "answers": ["a", "b"], "ctxs": chunks}]
    folder = write(tmp_path, "musique_cacheblend/musique_s.json", records)
    (case,) = load_dataset("musique_cacheblend", data_dir=folder).cases
    assert case.answers == ("a", "b")
    assert case.documents == tuple(Document("", f"chunk {i}", None) for i in range(3))
    assert sorted(paragraph_chunks(case)) == [f"Passage:\nchunk {i}\n" for i in range(3)]


def test_2wikimqa_form_skips_cases_without_context_and_second_copies(tmp_path):
    without = wiki_record("b")
    del without["context"]
    records = [without, wiki_record("c", context=[]), wiki_record("a")]
    folder = write(tmp_path, "2wikimultihopqa/2wikimultihopqa_dev200.jsonl", records)
    (case,) = load_dataset("2wikimqa", data_dir=folder).cases
    assert case.case_id == "a"
    assert case.documents == (
        Document("A", "One. Two.", True),
        Document("B", "Three.", False),
        Document("C", "Four.", True),
    )


@pytest.mark.parametrize("as_text", [False, True])
def test_2wikimqa_hub_columns_and_json_text(tmp_path, as_text):
    context = {"title": ["A", "B"], "sentences": [["One."], ["Two."]]}
    facts = {"title": ["B"], "sent_id": [0]}
    changes = {"context": context, "supporting_facts": facts}
    if as_text:
        changes = {name: json.dumps(value) for name, value in changes.items()}
    record = wiki_record(id="h", **changes)
    del record["_id"]
    (case,) = load_dataset("2wikimqa", data_dir=write(tmp_path, "2wikimultihopqa/dev.json", [record])).cases
    assert case.case_id == "h"
    assert [(document.title, document.gold) for document in case.documents] == [("A", False), ("B", True)]


def test_samsum_form(tmp_path):
    tests = [{"id": "t1", "dialogue": "A: hi\r\nB: ho ", "summary": "They\ngreet. "}]
    shots = [{"context": f"A: {i} {'x' * 420}", "response": f"shot {i}"} for i in range(40)]
    write(tmp_path, "samsum/test.jsonl", tests)
    write(tmp_path, "samsum/validation_chanys.jsonl", shots)
    dataset = load_dataset("samsum", data_dir=tmp_path)
    (case,) = dataset.cases
    assert (case.question, case.answers) == ("A: hi\nB: ho", ("They greet.",))
    assert len(case.documents) == 10
    assert all(document.gold is None for document in case.documents)
    chunk = paragraph_chunks(case)[0]
    assert chunk.startswith("Dialogue: A: ")
    assert chunk.count("\nSummary: shot ") == 2
    assert chunk.endswith("\n")
    assert not chunk.endswith("\n\n")
    question = dataset.task.question_template.format(question=case.question)
    assert question == "\nDialogue: A: hi\nB: ho\nSummary:"


def test_samsum_groups_are_shared_and_drawn_per_case(tmp_path):
    tests = [{"id": f"t{i}", "dialogue": "A: hi", "summary": "s"} for i in range(8)]
    shots = [{"dialogue": f"A: {i} {'x' * 900}", "summary": "s"} for i in range(12)]
    write(tmp_path, "samsum/test.jsonl", tests)
    write(tmp_path, "samsum/validation.jsonl", shots)
    cases = load_dataset("samsum", data_dir=tmp_path).cases
    assert len({document for case in cases for document in case.documents}) == 12
    assert len({case.documents for case in cases}) == 8
    assert load_dataset("samsum", data_dir=tmp_path, seed=1).cases[0].documents != cases[0].documents


def test_shot_groups_hold_200_to_400_tokens():
    lengths = [700, 250, 250, 1401, 250, 1400, 100]
    shots = [f"{'x' * (length - 1)}\n" for length in lengths]
    assert [len(group) + 1 for group in group_shots(shots)] == [700, 750, 1400]
    assert group_shots(["a\n", "b\n"]) == ["a\nb"], "too little for a group, but all there is"
    assert group_shots([]) == []


def test_multinews_form(tmp_path):
    context = "Passage 1:\nA b. NEWLINE_CHAR NEWLINE_CHAR NEWLINE_CHAR C d.\nPassage 2:\nE f.\n\n"
    records = [{"_id": "m", "input": "", "context": context, "answers": ["sum"], "length": 9}]
    folder = write(tmp_path, "multi_news_longbench/multi_news.jsonl", records)
    (case,) = load_dataset("multinews", data_dir=folder).cases
    assert (case.case_id, case.question, case.answers) == ("m", "", ("sum",))
    assert case.documents == (Document("", "A b.\n\nC d."), Document("", "E f."))


# --- where the data come from


def test_environment_variable_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVREUSE_DATA", str(write(tmp_path, "musique/musique.jsonl", [musique_record()])))
    assert load_dataset("musique").source == f"data-dir:{tmp_path}"
    assert load_dataset("musique", data_dir="small").source == "small set"


def test_folder_beside_the_repository_is_found_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_sources, "REPOSITORY", tmp_path / "repository")
    write(tmp_path / "shared" / "data", "musique/musique.jsonl", [musique_record()])
    expected = f"data-dir:{tmp_path / 'shared' / 'data'} (found beside the repository)"
    assert load_dataset("musique").source == expected
    assert load_dataset("2wikimqa").source == "small set"


def test_hub_is_asked_by_split(nothing_beside, monkeypatch):
    asked = []

    def hub(repo, split):
        asked.append((repo, split))
        return [{"id": f"{split}1", "dialogue": "A: hi", "summary": "s"}]

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(dataset_sources, "_hub_reachable", lambda: True)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=hub))
    dataset = load_dataset("samsum")
    assert asked == [("knkarthick/samsum", "test"), ("knkarthick/samsum", "validation")]
    assert dataset.source == "hub:knkarthick/samsum/test"
    assert dataset.cases[0].case_id == "test1"


def test_hub_archive(nothing_beside, monkeypatch, tmp_path):
    record = {"_id": "z", "input": "", "context": "Passage 1:\nText.", "answers": ["s"]}
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/multi_news.jsonl", json.dumps(record) + "\n")
    hub = SimpleNamespace(hf_hub_download=lambda repo, name, repo_type: tmp_path / name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(dataset_sources, "_hub_reachable", lambda: True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    dataset = load_dataset("multinews")
    assert dataset.source == "hub:zai-org/LongBench/data/multi_news.jsonl"
    assert dataset.cases[0].documents == (Document("", "Text."),)


def test_hub_failure_leaves_the_small_set(nothing_beside, monkeypatch):
    def hub(repo, split):
        raise ConnectionError("no route")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(dataset_sources, "_hub_reachable", lambda: True)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=hub))
    assert load_dataset("musique").source == "small set"
    monkeypatch.setitem(sys.modules, "datasets", None)  # import raises ImportError
    assert load_dataset("musique").source == "small set"


def test_unreachable_hub_is_not_asked(nothing_beside, monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=None))
    assert load_dataset("musique").source == "small set"


# --- choice, order, limit


def test_chunks_hold_all_gold_and_no_number():
    for case in load_dataset("musique", data_dir="small").cases:
        chunks = paragraph_chunks(case, num_chunks=6)
        assert len(chunks) == len(set(chunks)) == 6
        for document in case.documents:
            if document.gold:
                assert f"Passage: {document.title}\n{document.text}\n" in chunks


def test_chunks_of_more_gold_than_asked_and_of_few_documents():
    documents = tuple(Document(f"T{i}", "x", i < 3) for i in range(5))
    case = Case("c", "q", ("a",), documents)
    assert sorted(paragraph_chunks(case, 2)) == [f"Passage: T{i}\nx\n" for i in range(3)]
    assert len(paragraph_chunks(case, 4)) == 4
    assert len(paragraph_chunks(case, 9)) == len(paragraph_chunks(case, None)) == 5


def test_chunks_depend_on_seed_and_case_alone():
    documents = tuple(Document(f"T{i}", "x", False) for i in range(30))
    case = Case("c", "q", ("a",), documents)
    assert paragraph_chunks(case) == paragraph_chunks(case)
    assert paragraph_chunks(case) != paragraph_chunks(case, seed=1)
    assert paragraph_chunks(case) != paragraph_chunks(Case("d", "q", ("a",), documents))


def test_same_chunks_in_another_process():
    code = (
        "from experiments.datasets import load_dataset, paragraph_chunks\n"
        "cases = load_dataset('samsum', data_dir='small', limit=3).cases\n"
        "print(hash('x') and [paragraph_chunks(case) for case in cases])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            cwd=REPOSITORY,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "utf-8"},
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0]


def test_limit_is_a_seeded_nested_sample_in_file_order():
    every = [case.case_id for case in load_dataset("musique", data_dir="small").cases]
    five, ten = (
        [case.case_id for case in load_dataset("musique", data_dir="small", limit=limit).cases] for limit in (5, 10)
    )
    other = [case.case_id for case in load_dataset("musique", data_dir="small", limit=10, seed=1).cases]
    assert (len(five), len(ten)) == (5, 10)
    assert set(five) < set(ten)
    assert ten == [case_id for case_id in every if case_id in ten]
    assert ten not in (every[:10], other)
    assert len(load_dataset("musique", data_dir="small", limit=99).cases) == 24


# --- errors


def test_unknown_name():
    with pytest.raises(ValueError, match=r"unknown dataset 'squad'; choose one of musique, .*multinews"):
        load_dataset("squad")


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one(limit):
    with pytest.raises(ValueError, match=f"limit must be at least 1 or None, not {limit}"):
        load_dataset("musique", data_dir="small", limit=limit)


def test_num_chunks_below_one():
    case = Case("c", "q", ("a",), (Document("T", "x"),))
    with pytest.raises(ValueError, match="num_chunks must be at least 1 or None, not 0"):
        paragraph_chunks(case, 0)


@pytest.mark.parametrize("name", DATASET_NAMES)
def test_named_folder_without_the_file(name, tmp_path, monkeypatch):
    expected = tmp_path / dataset_sources.SOURCES[name].files["cases"][0]
    with pytest.raises(FileNotFoundError, match=r"which does not exist; put the file there") as error:
        load_dataset(name, data_dir=tmp_path)
    assert str(expected) in str(error.value)
    monkeypatch.setenv("KVREUSE_DATA", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="missing"):
        load_dataset(name)


def test_samsum_without_shots_names_the_missing_file(tmp_path):
    write(tmp_path, "samsum/test.jsonl", [{"id": "t", "dialogue": "d", "summary": "s"}])
    with pytest.raises(FileNotFoundError, match=r"validation\.jsonl or .*validation_chanys\.jsonl"):
        load_dataset("samsum", data_dir=tmp_path)


def test_cacheblend_form_has_no_small_set(nothing_beside):
    with pytest.raises(FileNotFoundError, match=r"put musique_cacheblend/musique_s\.json .*'musique'"):
        load_dataset("musique_cacheblend")


def test_broken_line_is_named(tmp_path):
    write(tmp_path, "musique/musique.jsonl", [musique_record()])
    path = tmp_path / "musique" / "musique.jsonl"
    path.write_text(path.read_text() + '{"id": "cut', encoding="utf-8")
    with pytest.raises(ValueError, match=r"musique\.jsonl, line 2 is not JSON"):
        load_dataset("musique", data_dir=tmp_path)
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 holds a list where a JSON object is expected"):
        load_dataset("musique", data_dir=tmp_path)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"musique\.jsonl holds no records; download it again"):
        load_dataset("musique", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": 1}', "must hold a JSON list of records, not a dict"), ("[1", "is not JSON"), ("[1]", "record 0")],
)
def test_broken_json_list(tmp_path, text, message):
    path = tmp_path / "musique_cacheblend" / "musique_s.json"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_dataset("musique_cacheblend", data_dir=tmp_path)


def test_missing_field_is_named(tmp_path):
    record = musique_record()
    del record["question"]
    folder = write(tmp_path, "musique/musique.jsonl", [musique_record(), record])
    with pytest.raises(ValueError, match=r"'musique' from data-dir:.*record 1 has no field 'question'"):
        load_dataset("musique", data_dir=folder)


def test_case_without_documents_or_answers(tmp_path):
    folder = write(tmp_path, "musique/musique.jsonl", [musique_record(paragraphs=0)])
    with pytest.raises(ValueError, match=r"record 0 \(id '2hop__1'\) has no document"):
        load_dataset("musique", data_dir=folder)
    records = [{"_id": "m", "context": "Passage 1:\nx", "answers": []}]
    write(tmp_path, "multi_news_longbench/multi_news.jsonl", records)
    with pytest.raises(ValueError, match=r"record 0 \(id 'm'\) has no answer"):
        load_dataset("multinews", data_dir=tmp_path)


def test_no_usable_case(tmp_path):
    folder = write(tmp_path, "2wikimultihopqa/dev.json", [wiki_record(context=[])])
    with pytest.raises(ValueError, match="holds no usable case"):
        load_dataset("2wikimqa", data_dir=folder)


def test_samsum_shots_all_too_long(tmp_path):
    write(tmp_path, "samsum/test.jsonl", [{"id": "t", "dialogue": "d", "summary": "s"}])
    write(tmp_path, "samsum/validation.jsonl", [{"id": "v", "dialogue": "d" * 2000, "summary": "s"}])
    with pytest.raises(ValueError, match="SAMSum needs solved dialogues as shots"):
        load_dataset("samsum", data_dir=tmp_path)


# --- the real sets, where they are


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real data in {REAL}")
@pytest.mark.parametrize(
    ("name", "cases", "gold"),
    [
        ("musique", 200, {2: 145, 3: 32, 4: 23}),
        ("2wikimqa", 164, {2: 121, 4: 43}),
        ("musique_cacheblend", 150, {0: 150}),
        ("samsum", 819, {0: 819}),
        ("multinews", 200, {0: 200}),
    ],
)
def test_real_sets(name, cases, gold):
    dataset = load_dataset(name, data_dir=REAL)
    assert dataset.source == f"data-dir:{REAL.resolve()}"
    assert len(dataset.cases) == len({case.case_id for case in dataset.cases}) == cases
    assert Counter(sum(bool(document.gold) for document in case.documents) for case in dataset.cases) == gold
    assert not any("NEWLINE_CHAR" in document.text for case in dataset.cases for document in case.documents)
    assert all(paragraph_chunks(case) for case in dataset.cases)
