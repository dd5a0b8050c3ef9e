"""Chained block hashes: the same everywhere, different for everything that changes K/V."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreuse.prefix import block_hash, block_hashes, root_hash

ids_lists = st.lists(st.integers(0, 2**31), min_size=1, max_size=20)


def chain(ids: list[int], size: int, root: str = root_hash("model")) -> list[str]:
    return [key for key, _ in block_hashes(root, torch.tensor(ids, dtype=torch.long), size)]


def test_a_known_value():
    """The same in every process and on every run; a change of the encoding would lose all stored blocks."""
    assert root_hash("model", "salt") == "8e59106f921181287e21495090572c4006c356c3926a77a3dc0f74b8be46bf59"
    assert (
        block_hash(root_hash("model"), torch.tensor([1, 2, 3]))
        == "bdca450cc547ec91b065913177f25538c958cc373e28ad41a197c9ebdaff2d85"
    )


@given(ids_lists, ids_lists, st.integers(1, 6))
def test_equal_hashes_mean_equal_prefixes(a, b, size):
    for number, (left, right) in enumerate(zip(chain(a, size), chain(b, size), strict=False)):
        stop = (number + 1) * size
        assert (left == right) == (a[:stop] == b[:stop])


@given(ids_lists, st.integers(1, 6))
def test_only_full_blocks(ids, size):
    assert len(chain(ids, size)) == len(ids) // size
    assert chain(ids, size) == chain(ids[: len(ids) // size * size], size)


def test_everything_that_changes_kv_changes_the_hash():
    ids = torch.arange(4)
    roots = {
        root_hash("a"),
        root_hash("b"),
        root_hash("a", "tenant"),
        root_hash("atenant"),
        root_hash("a", extra={"long_rope": "True"}),
        root_hash("a", extra={"long_rope": "False"}),
        root_hash("a", extra={"long_ropeTrue": ""}),
    }
    assert len(roots) == 7
    parent = root_hash("a")
    blocks = {
        block_hash(parent, ids),
        block_hash(root_hash("b"), ids),
        block_hash(parent, ids, {"adapter": "x"}),
        block_hash(parent, ids, {"adapter": "y"}),
        block_hash(parent, ids[:2]),
        block_hash(block_hash(parent, ids[:2]), ids[2:]),
    }
    assert len(blocks) == 6
