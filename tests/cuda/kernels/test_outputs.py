"""Greedy tokens and the join of ranks."""

import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels import outputs
from ds4.cuda.kernels.outputs import join_kernel
from ds4.partition.shards import tree_sum

BLOCKS, THREADS = 4, 16


def greedy(logits):
    b, n = logits.shape
    values = cuda.to_device(np.full((b, BLOCKS), np.nan, np.float32))
    indices = cuda.to_device(np.full((b, BLOCKS), -9, np.int32))
    tokens = cuda.to_device(np.full(b, -9, np.int32))
    # Not the cached kernels: these are made with the small grid below.
    argmax, final = outputs.argmax_kernel.__wrapped__(), outputs.argmax_final_kernel.__wrapped__()
    argmax[(BLOCKS, b), THREADS](cuda.to_device(logits), n, values, indices)
    final[b, 32](values, indices, tokens)
    return tokens.copy_to_host().tolist()


@pytest.mark.slow
def test_the_greedy_token_is_the_first_of_the_largest_and_minus_one_for_bad_logits(monkeypatch):
    # The full grid of 64 blocks of 256 threads takes the simulator minutes and shows no more.
    monkeypatch.setattr(outputs, "ARGMAX_BLOCKS", BLOCKS)
    monkeypatch.setattr(outputs, "_THREADS", THREADS)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, 200)).astype(np.float32)
    logits[0, [90, 150]] = 8.0
    logits[1, 60] = np.nan
    logits[2, 3] = np.inf
    logits[3, :] = -np.inf
    logits[3, 199] = -5.0
    assert greedy(logits) == [90, -1, -1, 199]


@pytest.mark.parametrize("n_ranks", [2, 4, 8])
def test_ranks_join_as_the_fixed_tree(n_ranks):
    rng = np.random.default_rng(n_ranks)
    parts = rng.standard_normal((n_ranks, 5)).astype(np.float32)
    out = cuda.to_device(np.full(5, np.nan, np.float32))
    join_kernel(n_ranks)[1, 256](cuda.to_device(parts), out)
    assert np.array_equal(out.copy_to_host(), tree_sum(parts))
