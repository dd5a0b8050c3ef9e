"""Attention of scattered rows by tiles of keys: tiles of any size, and scores too extreme for plain exponentials."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreuse.blend import products
from kvreuse.blend.products import RowProducts, Scratch
from kvreuse.blend.rows import RowMask

# fp32 sums in another order.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def drawn(batch, heads, groups, rows, keys):
    g = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads * groups, rows, 8, generator=g)
    key, value = (torch.randn(batch, heads, keys, dim, generator=g) for dim in (8, 5))
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
    st.integers(1, 4),
    st.sampled_from([1, 3, 8, 256]),
    st.sampled_from([1, 64, 300, 2**18]),
    st.integers(1, 5),
    st.sampled_from([0, 4, 1000]),
)
def test_tiles_of_any_size_equal_dense_attention(
    data, num_keys, window, batch, heads, groups, tile, scores, threads, many_rows
):
    """Blocks of tokens, several heads at once or one in pieces, windows within a tile and over several."""
    rows = sorted(data.draw(st.sets(st.integers(0, num_keys - 1), min_size=1)))
    query, key, value = drawn(batch, heads, groups, len(rows), num_keys)
    mask = RowMask(torch.tensor(rows), num_keys, window)
    with (
        patch.multiple(products, _TILE_KEYS=tile, _SCORES=scores, _MANY_ROWS=many_rows),
        patch("torch.get_num_threads", lambda: threads),
    ):
        row_products = RowProducts(mask.rows, window, Scratch())
        once, again = (row_products.attend(query, key, value, None) for _ in range(2))
    torch.testing.assert_close(once, dense(mask, query, key, value), **TOLERANCE)
    assert torch.equal(once, again)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("heads", "groups", "rows"), [(2, 4, 300), (12, 1, 5)], ids=["many-rows", "many-heads"])
def test_what_is_held_at_a_time_stays_near_the_room_there_is(heads, groups, rows, threads):
    query, key, value = drawn(1, heads, groups, rows, 400)
    with (
        patch.multiple(products, _TILE_KEYS=16, _SCORES=200, _MANY_ROWS=20),
        patch("torch.get_num_threads", lambda: threads),
    ):
        row_products = RowProducts(torch.arange(100, 100 + rows), None, Scratch())
        row_products.attend(query, key, value, None)
    [tiles] = row_products._tiles.values()
    held = {s.data_ptr(): s.nbytes() for s in (tile.weights.untyped_storage() for tile in tiles)}
    assert 0.4 <= sum(held.values()) / 4 / (200 * threads) <= 1.6


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_rows_go_in_a_piece_for_each_thread(threads):
    """Every thread's part of a tile is of one size, also where the rows are not a multiple of the threads."""
    with patch("torch.get_num_threads", lambda: threads):
        many, few = (products.Split.of(tokens, 2, 3) for tokens in (301, 99))
        assert (many.heads, many.pieces) == (1, threads)
        assert (few.heads, few.pieces) == (3, 1)
        row_products = RowProducts(torch.arange(301), None, Scratch())
        query, key, value = drawn(1, 3, 2, 301, 301)
        row_products.attend(query, key, value, None)
    [(split, tiles)] = row_products._tiles.items()
    assert split == many
    rounded = [2 * -(-seeing // threads) * threads for seeing in (301, 301 - 256)]
    assert [tile.num_rows for tile in tiles] == rounded
    assert [tile.weights.shape[0] for tile in tiles] == [threads, threads]


def test_masks_share_one_scratch():
    """The smaller ones first, which then hold older memory; a layer with a window between those without."""
    scratch = Scratch()
    kinds = [(step, window) for step in (9, 3) for window in (None, 7)]
    masks = [RowMask(torch.arange(0, 90, step), 100, window, scratch=scratch) for step, window in kinds]
    for mask in [*masks, *masks]:
        query, key, value = drawn(1, 2, 2, mask.rows.numel(), 100)
        torch.testing.assert_close(mask.attend(query, key, value, None), dense(mask, query, key, value), **TOLERANCE)
    assert all(mask._products._scratch is scratch for mask in masks)


def test_keys_that_no_token_sees_are_left_out():
    row_products = RowProducts(torch.tensor([0, 5000]), 4, Scratch())
    tiles = row_products._tiles_of(products.Split(1, 1, 1, 1))
    assert [(tile.first_key, tile.num_rows) for tile in tiles] == [(0, 1), (4864, 1)]


def test_threads_may_change_between_layers():
    query, key, value = drawn(1, 2, 2, 30, 100)
    mask = RowMask(torch.arange(0, 90, 3), 100)
    with patch.multiple(products, _TILE_KEYS=16, _SCORES=100, _MANY_ROWS=10):
        row_products = RowProducts(mask.rows, None, Scratch())
        for threads in (1, 4, 1):
            with patch("torch.get_num_threads", lambda count=threads: count):
                out = row_products.attend(query, key, value, None)
            torch.testing.assert_close(out, dense(mask, query, key, value), **TOLERANCE)
    assert len(row_products._tiles) == 2


@pytest.mark.parametrize("head", range(4))
@pytest.mark.parametrize("row", [0, 7], ids=["in-the-sample", "beside-it"])
@pytest.mark.parametrize("score", [60.0, -60.0, 75.0, -75.0, 85.0, -85.0, 1e4, float("nan")])
def test_extreme_scores_are_left_to_a_softmax(score, row, head):
    """All scores of one row are about alike; in the sample they are seen before anything is computed."""
    rows = torch.arange(1, 161, 2)
    query, key, value = drawn(1, 2, 4, len(rows), 161)
    key[..., 0] = 1.0
    query[:, head, row] *= 0.1
    query[:, head, row, 0] = score * 8**0.5
    mask, row_products = RowMask(rows, 161), RowProducts(rows, None, Scratch())
    out = row_products.attend(query, key, value, None)
    assert (out is None) == (abs(score) != 60)
    seen_in_the_sample = row == 0 and not (score == 60 or -80 < score < 0)
    assert (not row_products._tiles) == seen_in_the_sample
    for attended in (out, mask.attend(query, key, value, None)):
        if attended is not None:
            rounding = 1e-2 if score == 1e4 else 1e-4  # scores of 60 are rounded to 4e-6 each way, of 1e4 to 1e-3
            expected = dense(mask, query, key, value)
            torch.testing.assert_close(attended, expected, atol=rounding, rtol=rounding, equal_nan=True)


def test_values_that_overflow_under_their_weights_are_left_to_a_softmax():
    """A score of 64 makes a weight of 6e27, which fp32 holds; times 1e11 it no longer does."""
    query = key = torch.full((1, 1, 1, 1), 8.0)
    value = torch.full((1, 1, 1, 1), 1e11)
    assert RowProducts(torch.tensor([0]), None, Scratch()).attend(query, key, value, 1.0) is None
    assert torch.equal(RowMask(torch.tensor([0]), 1).attend(query, key, value, 1.0), value)


@pytest.mark.parametrize("extreme", [7, 10], ids=["in-a-tile", "behind-all"])
def test_an_extreme_key_that_a_row_does_not_see_changes_nothing(extreme):
    """It is computed with and masked, unless no row sees it; infinity times 0 would be no number."""
    rows = torch.tensor([3, 5, 9])
    query, key, value = drawn(1, 1, 1, 3, 12)
    mask = RowMask(rows, 12)
    expected = dense(mask, query, key, value)
    key[:, :, extreme:] = 1e6
    unmoved = slice(0, 2 if extreme == 7 else 3)
    out = mask.attend(query, key, value, None)
    torch.testing.assert_close(out[:, :, unmoved], expected[:, :, unmoved], **TOLERANCE)
