"""Attention of scattered rows by tiles of keys: tiles of any size, and scores too extreme for plain exponentials."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreuse.blend import products
from kvreuse.blend.products import RowProducts
from kvreuse.blend.rows import RowMask

# fp32 sums in another order.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def drawn(batch, heads, groups, rows, keys):
    g = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads * groups, rows, 8, generator=g)
    key, value = (torch.randn(batch, heads, keys, 8, generator=g) for _ in range(2))
    return query, key, value


def dense(mask, query, key, value):
    groups = query.shape[1] // key.shape[1]
    return mask.weights(query, key, None) @ value.repeat_interleave(groups, dim=1)


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.integers(1, 60),
    st.none() | st.integers(1, 70),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1, 3, 8, 192]),
    st.sampled_from([1, 64, 300, 2**18]),
)
def test_tiles_of_any_size_equal_dense_attention(data, num_keys, window, batch, heads, groups, tile, scores):
    """Blocks of tokens, several heads at once, windows within a tile and over several."""
    rows = sorted(data.draw(st.sets(st.integers(0, num_keys - 1), min_size=1)))
    query, key, value = drawn(batch, heads, groups, len(rows), num_keys)
    mask = RowMask(torch.tensor(rows), num_keys, window)
    with patch.multiple(products, _TILE_KEYS=tile, _SCORES=scores):
        row_products = RowProducts(mask.rows, window)
        once, again = (row_products.attend(query, key, value, None) for _ in range(2))
    torch.testing.assert_close(once, dense(mask, query, key, value), **TOLERANCE)
    assert torch.equal(once, again)


def test_many_rows_run_in_blocks_and_many_small_heads_at_once():
    """What is held at a time stays near the room there is, whatever the number of rows and heads."""
    for heads, groups, rows in ((2, 4, 300), (12, 1, 5)):
        query, key, value = drawn(1, heads, groups, rows, 400)
        with patch.multiple(products, _TILE_KEYS=16, _SCORES=1000):
            row_products = RowProducts(torch.arange(100, 100 + rows), None)
            row_products.attend(query, key, value, None)
        held = row_products._scores.numel() / torch.get_num_threads()
        assert 500 <= held <= 1600


@pytest.mark.parametrize("size", [100.0, -100.0, 1e4, float("nan")])
@pytest.mark.parametrize("row", [0, 7], ids=["in-the-sample", "beside-it"])
def test_extreme_scores_are_left_to_a_softmax(size, row):
    rows = torch.arange(1, 41, 2)
    query, key, value = drawn(1, 2, 3, len(rows), 41)
    key[:, :, :, 0] = 1.0
    query[:, :, row] = 0
    query[:, :, row, 0] = size * 8**0.5  # the scores of this row, all alike
    assert RowProducts(rows, None).attend(query, key, value, None) is None
    mask = RowMask(rows, 41)
    torch.testing.assert_close(mask.attend(query, key, value, None), dense(mask, query, key, value), equal_nan=True)


def test_an_extreme_key_that_nobody_sees_changes_nothing():
    rows = torch.tensor([3, 5, 9])
    query, key, value = drawn(1, 1, 1, 3, 12)
    mask = RowMask(rows, 12)
    expected = dense(mask, query, key, value)
    key[:, :, 10:] = 1e6
    torch.testing.assert_close(mask.attend(query, key, value, None), expected, **TOLERANCE)
