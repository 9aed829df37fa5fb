"""The canonical shards: partition laws and bit equality of the joined tree in every world."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ds4.errors import ConfigError
from ds4.partition.shards import (
    N_SHARDS,
    WORLDS,
    empty_partial,
    join,
    owned_blocks,
    owned_shards,
    shard_blocks,
    shard_partial,
    tree_sum,
)

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
partials = hnp.arrays(np.float32, (N_SHARDS, 5), elements=floats)


def bits(array):
    return array.view(np.uint32).tolist()


@given(st.integers(0, 200_000))
def test_shards_cover_every_block_once_in_order(n_blocks):
    covered = [shard_blocks(n_blocks, v) for v in range(N_SHARDS)]
    assert covered[0].start == 0
    assert covered[-1].stop == n_blocks
    assert all(a.stop == b.start for a, b in pairwise(covered))
    sizes = [len(b) for b in covered]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 5000), st.sampled_from(WORLDS))
def test_ranks_own_whole_adjacent_shards(n_blocks, world):
    shards = [v for rank in range(world) for v in owned_shards(world, rank)]
    assert shards == list(range(N_SHARDS))
    for rank in range(world):
        expected = [b for v in owned_shards(world, rank) for b in shard_blocks(n_blocks, v)]
        assert list(owned_blocks(n_blocks, world, rank)) == expected


def test_a_dimension_of_257_leaves_no_gap_and_no_overlap():
    assert [len(shard_blocks(257, v)) for v in range(8)] == [32] * 7 + [33]


@given(partials)
def test_the_tree_is_the_documented_expression(s):
    with np.errstate(over="ignore", invalid="ignore"):
        expected = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
        assert bits(tree_sum(s)) == bits(expected)


@given(partials)
def test_joined_subtrees_equal_the_whole_tree_bit_for_bit(s):
    with np.errstate(over="ignore", invalid="ignore"):
        whole = tree_sum(s)
        for world in WORLDS:
            parts = [tree_sum(s[list(owned_shards(world, r))]) for r in range(world)]
            assert bits(join(parts)) == bits(whole), world


@given(partials)
def test_two_ranks_may_add_in_either_order(s):
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = tree_sum(s[:4]), tree_sum(s[4:])
        assert bits(join([a, b])) == bits(join([b, a])) == bits(tree_sum(s))


def test_the_order_of_shards_matters_so_the_equalities_above_can_fail():
    s = np.random.default_rng(1).standard_normal((8, 50)).astype(np.float32)
    swapped = s[[0, 2, 1, 3, 4, 5, 6, 7]]
    sequential = s[0]
    for term in s[1:]:
        sequential = sequential + term
    assert bits(tree_sum(s)) != bits(tree_sum(swapped))
    assert bits(tree_sum(s)) != bits(sequential)


@given(st.lists(hnp.arrays(np.float32, 3, elements=floats), max_size=5))
def test_no_partial_is_negative_zero(terms):
    with np.errstate(over="ignore", invalid="ignore"):
        partial = shard_partial(terms, (3,))
    assert not (np.signbit(partial) & (partial == 0)).any()


def test_a_shard_of_negative_zeros_and_an_empty_shard_both_give_positive_zero():
    minus = np.float32([-0.0, -0.0])
    assert bits(shard_partial([minus, minus], (2,))) == [0, 0]
    assert bits(shard_partial([], (2,))) == [0, 0]
    assert bits(empty_partial((2,))) == [0, 0]


def test_an_empty_shard_of_positive_zeros_keeps_other_bits_in_every_world():
    """With 4 blocks over 8 shards every second shard is empty; nothing may notice."""
    values = np.float32([[1.5], [-2.25], [-0.0], [3e-45]])
    parts = np.stack(
        [shard_partial([values[b] for b in shard_blocks(4, v)], (1,)) for v in range(N_SHARDS)]
    )
    assert bits(tree_sum(parts)) == bits((values[0] + values[1]) + (values[2] + values[3]))


def test_terms_are_added_in_the_given_order():
    a, b, c = np.float32([1e8]), np.float32([1.0]), np.float32([-1e8])
    assert shard_partial([a, b, c], (1,)).tolist() == [0.0]
    assert shard_partial([a, c, b], (1,)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: owned_shards(3, 0), "world must be one of 1, 2, 4, 8, got 3"),
        (lambda: owned_shards(2, 2), "rank must be from 0 to 1 in a world of 2, got 2"),
        (lambda: owned_shards(2, -1), "rank must be from 0 to 1 in a world of 2, got -1"),
        (lambda: shard_blocks(-1, 0), "n_blocks must be >= 0, got -1"),
        (lambda: shard_blocks(1, 8), "shard must be from 0 to 7, got 8"),
        (lambda: tree_sum(np.zeros((8, 2))), "partials must be float32, got float64"),
        (lambda: tree_sum(np.zeros((3, 2), np.float32)), "1, 2, 4 or 8 leading entries"),
        (lambda: shard_partial([np.zeros(2)], (2,)), "a term must be float32"),
    ],
)
def test_wrong_arguments_are_named(call, text):
    with pytest.raises(ConfigError, match=text):
        call()
