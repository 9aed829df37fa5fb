"""Indexer scores against NumPy, and the exact selection with ties."""

import cases
import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels.indexer import KEYS_PER_BLOCK, scores_kernel, select_kernel
from ds4.cuda.kernels.latent import N_PARTS, Part


@pytest.mark.parametrize("width", [8, 16])
def test_scores_are_weighted_sums_of_rectified_products(width):
    rng = np.random.default_rng(0)
    heads, rope, top_k, n_keys = 5, 4, 2, 40
    positions = np.array([4 * 37 + 2, 4 * top_k], np.int32)
    q, w = rng.standard_normal((2, heads * width + 4)), rng.standard_normal((2, heads + 2))
    keys = rng.standard_normal((n_keys, width))
    angle = rng.random((2, 4, rope // 2))
    table = np.zeros((1, 1, N_PARTS), np.int64)
    table[0, 0, Part.INDEX_ROWS] = 16
    state = np.concatenate([np.full(16, np.nan), keys.ravel()]).astype(np.float32)
    f32 = [cuda.to_device(a.astype(np.float32)) for a in (np.cos(angle), np.sin(angle), q, w)]
    scores = cases.poisoned(2, 64)
    scores_kernel(heads, width, rope, top_k)[(2, 2), 128](
        cuda.to_device(table), cuda.to_device(state), np.int32(0),
        cuda.to_device(np.zeros(2, np.int32)), cuda.to_device(positions), f32[0], f32[1], f32[2], 4,
        f32[3], 2, np.float32(0.5), scores,
    )  # fmt: skip
    got = scores.copy_to_host()
    visible = 37
    turned = q[0, 4:].reshape(heads, width).copy()
    tail = width - rope
    a, b = turned[:, tail::2].copy(), turned[:, tail + 1 :: 2].copy()
    c, s = np.cos(angle[0, 1]), np.sin(angle[0, 1])
    turned[:, tail::2], turned[:, tail + 1 :: 2] = a * c - b * s, a * s + b * c
    want = 0.5 * w[0, 2:] @ np.maximum(turned @ keys[:visible].T, 0)
    assert cases.error(got[0, :visible], want) < 2e-6
    assert np.isnan(got[0, visible:]).all(), "keys of the future must not be scored"
    assert np.isnan(got[1]).all(), "a row that sees at most top_k keys needs no scores"
    assert visible > KEYS_PER_BLOCK


@pytest.mark.parametrize("threads", [32, 64])
@pytest.mark.parametrize("kind", ["distinct", "ties", "all equal", "zeros of both signs"])
def test_selection_takes_the_largest_with_ties_to_the_lower_index(kind, threads):
    rng = np.random.default_rng(3)
    visible, top_k = 83, 10
    scores = rng.standard_normal(visible).astype(np.float32)
    if kind == "ties":
        scores = np.round(scores)
    if kind == "all equal":
        scores[:] = 1.5
    if kind == "zeros of both signs":
        scores = np.where(rng.random(visible) < 0.5, -0.0, 0.0).astype(np.float32)
    rows = np.full((2, 96), np.nan, np.float32)
    rows[0, :visible] = scores
    chosen = cuda.to_device(np.full((2, top_k), -7, np.int32))
    positions = np.array([4 * visible, 4 * top_k], np.int32)
    slots = cuda.to_device(np.zeros(2, np.int32))
    select_kernel(top_k, threads)[2, threads](
        slots, cuda.to_device(positions), cuda.to_device(rows), chosen
    )
    want = np.sort(np.argsort(-scores, kind="stable")[:top_k])
    assert chosen.copy_to_host()[0].tolist() == want.tolist()
    assert (chosen.copy_to_host()[1] == -7).all(), "nothing is chosen where all are attended"
