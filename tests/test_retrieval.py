"""Splitting by a model's tokens, and exact search by L2 distance."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvreuse.demo import _EMBEDDER, _MODEL, _is_complete, cache_folder
from kvreuse.retrieval import ChunkIndex, Embedder, Hit, split_text

pytest.importorskip("langchain_text_splitters")
pytest.importorskip("faiss")


class WordTokens:
    """A word with the space before it is one token, without it two, as happens in BPE vocabularies."""

    def tokenize(self, text: str) -> Tensor:
        pieces = re.findall(r"\s?\S+|\s", text)
        return torch.zeros(sum(1 if piece[0].isspace() else 2 for piece in pieces), dtype=torch.long)


class Points:
    """Embeds "x y" as the point (x, y): not normalised, so that L2 and cosine disagree."""

    def __init__(self) -> None:
        self.progress: list[bool] = []

    def encode(self, texts: Sequence[str], progress: bool = False) -> Tensor:
        self.progress.append(progress)
        return torch.tensor([[float(number) for number in text.split()] for text in texts])


def test_split_text_prefers_paragraphs() -> None:
    text = "one two three\n\nfour five six\n\nseven eight nine"
    assert split_text(text, WordTokens(), chunk_tokens=4) == [
        "one two three",
        "four five six",
        "seven eight nine",
    ]


def test_split_text_keeps_short_text_whole() -> None:
    assert split_text("  one two  ", WordTokens()) == ["one two"]


def test_split_text_counts_the_tokens_of_the_chunk_as_it_is() -> None:
    # Added up as pieces of the text, four words are four or five tokens; each chunk alone has one more.
    chunks = split_text("a b c d e f g h i j k l", WordTokens(), chunk_tokens=4)
    assert max(len(WordTokens().tokenize(chunk)) for chunk in chunks) <= 4
    assert " ".join(chunks) == "a b c d e f g h i j k l"


def test_split_text_overlap_repeats_words() -> None:
    chunks = split_text("a b c d e f g h", WordTokens(), chunk_tokens=5, overlap=2)
    assert len(chunks) > 2
    for before, after in pairwise(chunks):
        assert set(before.split()) & set(after.split())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["ab", "c", "\n\n", "\n", "d.", "efg"]), min_size=1), st.integers(2, 9))
def test_split_text_loses_no_word(words: list[str], chunk_tokens: int) -> None:
    text = " ".join(words)
    if not text.strip():
        return
    chunks = split_text(text, WordTokens(), chunk_tokens=chunk_tokens)
    assert "".join("".join(chunks).split()) == "".join(text.split())
    assert all(0 < len(WordTokens().tokenize(chunk)) <= chunk_tokens for chunk in chunks)


def test_split_text_refuses_bad_input() -> None:
    with pytest.raises(ValueError, match="text is empty"):
        split_text(" \n", WordTokens())
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        split_text("a", WordTokens(), chunk_tokens=0)
    with pytest.raises(ValueError, match="overlap=4: .* less than chunk_tokens=4"):
        split_text("a", WordTokens(), chunk_tokens=4, overlap=4)
    with pytest.raises(ValueError, match="chunk_tokens=1 is too small: a single character"):
        split_text("a b", WordTokens(), chunk_tokens=1)


def test_search_is_by_l2_distance_not_cosine() -> None:
    index = ChunkIndex.build(["10 10", "1 0", "0 3"], Points(), progress=False)
    # By cosine "10 10" would be the nearest to (1, 1).
    assert index.search("1 1", top_k=2) == [Hit(1, 1.0, "1 0"), Hit(2, pytest.approx(5**0.5), "0 3")]


def test_search_returns_all_when_asked_for_more() -> None:
    index = ChunkIndex.build(["3 0", "1 0"], Points())
    assert [hit.text for hit in index.search("0 0", top_k=99)] == ["1 0", "3 0"]
    assert len(index) == 2


def test_progress_is_for_building_only() -> None:
    points = Points()
    ChunkIndex.build(["1 1"], points).search("0 0", top_k=1)
    assert points.progress == [True, False]


def test_index_refuses_bad_input() -> None:
    index = ChunkIndex.build(["1 0"], Points())
    with pytest.raises(ValueError, match="question is empty"):
        index.search(" ", top_k=1)
    with pytest.raises(ValueError, match="top_k=0"):
        index.search("1 1", top_k=0)
    with pytest.raises(ValueError, match="at least one text"):
        ChunkIndex.build([], Points())
    with pytest.raises(ValueError, match="at least one text"):
        ChunkIndex.build("1 0", Points())
    with pytest.raises(ValueError, match="chunk 1 is empty"):
        ChunkIndex.build(["1 0", " "], Points())
    with pytest.raises(ValueError, match="not finite"):
        ChunkIndex.build(["nan 0"], Points())


@pytest.mark.skipif(
    not (
        _is_complete(cache_folder() / _EMBEDDER.folder, _EMBEDDER)
        and _is_complete(cache_folder() / _MODEL.folder, _MODEL)
    ),
    reason="the demo model and embedder are not in the cache: python -m kvreuse.demo",
)
def test_demo_model_and_embedder_find_the_right_chunk() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cache_folder() / _MODEL.folder)

    class DemoTokens:
        def tokenize(self, text: str) -> Tensor:
            return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)

    places = ["Velm", "Kordaž", "Ostrily", "Brunehaven"]
    text = "\n\n".join(
        f"{place} is a harbour town. " + f"In {1800 + i} the fishermen of {place} built its {i}th pier. " * 12
        for i, place in enumerate(places)
    )
    text += "\n\nThe orchestra of Tamworth Vale rehearses on a glacier: its violins are tuned to the cold."
    chunks = split_text(text, DemoTokens(), chunk_tokens=128)
    assert len(chunks) > len(places)
    assert all(len(DemoTokens().tokenize(chunk)) <= 128 for chunk in chunks)

    hits = ChunkIndex.build(chunks, Embedder("demo", device="cpu"), progress=False).search(
        "Where does the orchestra rehearse?", top_k=2
    )
    assert "glacier" in hits[0].text
    assert hits[0].distance < hits[1].distance
