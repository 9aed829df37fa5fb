"""The sum over a token's slots: what another rank owns never enters it, whatever lies there."""

from __future__ import annotations

import numpy as np
import pytest

from ds4.cpu.kernels import moe

N_ROWS, N_USED, D = 3, 4, 5
SHARD_OF = np.array([3, 0, 7, 1, 4, 2, 6, 5], np.int32)


def combined(y, ids, shared, v0, v1):
    out = np.full(N_ROWS * D, 9.0, np.float32)
    moe.combine(
        y.reshape(-1), ids, SHARD_OF, shared[v0:v1].reshape(-1), N_ROWS, N_USED, D, v0, v1, out
    )
    return out


def inputs():
    rng = np.random.default_rng(1)
    ids = np.concatenate([rng.permutation(8)[:N_USED] for _ in range(N_ROWS)]).astype(np.int32)
    y = rng.standard_normal((N_ROWS * N_USED, D)).astype(np.float32)
    shared = rng.standard_normal((8, N_ROWS * D)).astype(np.float32)
    return ids, y, shared


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1.0])
@pytest.mark.parametrize(("v0", "v1"), [(0, 4), (4, 8), (2, 4), (5, 6)])
def test_slots_of_other_ranks_do_not_enter_the_sum(v0, v1, poison):
    ids, y, shared = inputs()
    unowned = (SHARD_OF[ids] < v0) | (SHARD_OF[ids] >= v1)
    assert unowned.any()
    assert not unowned.all()
    poisoned = y.copy()
    poisoned[unowned] = poison
    found = combined(poisoned, ids, shared, v0, v1)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(
        found.view(np.uint32), combined(y, ids, shared, v0, v1).view(np.uint32)
    )


def test_a_rank_without_slots_gives_positive_zero():
    ids = np.full(N_ROWS * N_USED, 2, np.int32)  # shard 7's, none of ours
    y = np.full((N_ROWS * N_USED, D), -1.0, np.float32)
    # The shared part of an empty lane range is a negative zero at worst; the sum begins at +0.0.
    found = combined(y, ids, np.full((8, N_ROWS * D), -0.0, np.float32), 0, 4)
    assert (found.view(np.uint32) == 0).all()


def test_the_ranks_join_to_the_whole_sum():
    ids, y, shared = inputs()
    halves = [combined(y, ids, shared, v0, v0 + 4) for v0 in (0, 4)]
    whole = combined(y, ids, shared, 0, 8)
    np.testing.assert_array_equal((halves[0] + halves[1]).view(np.uint32), whole.view(np.uint32))
