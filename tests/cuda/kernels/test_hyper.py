"""Hyper-connections against the formula in float64."""

import cases
import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels.hyper import MIX_COLUMNS, collapse_kernel, mix_kernel
from ds4.cuda.kernels.quantize import quantize_reference

EPS = 1e-6


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sinkhorn(c, iterations):
    c = np.exp(c - c.max(axis=1, keepdims=True))
    c = c / c.sum(axis=1, keepdims=True) + EPS
    for i in range(iterations):
        if i:
            c = c / (c.sum(axis=1, keepdims=True) + EPS)
        c = c / (c.sum(axis=0, keepdims=True) + EPS)
    return c


@pytest.mark.parametrize(("d", "halves"), [(16, False), (136, True), (256, True)])
def test_a_sublayer_s_input_and_post_weights_equal_the_formula(d, halves):
    rng = np.random.default_rng(1)
    n, iterations = 24, 3
    fn = (0.3 * rng.standard_normal((n, 4 * d))).astype(np.float16)
    x, y = rng.standard_normal((2, 4 * d)), rng.standard_normal((2, d))
    post, comb = rng.random((2, 4)), rng.random((2, 16))
    scale, base, norm = rng.random(3), rng.standard_normal(n), rng.random(d) + 0.5
    f32 = [cuda.to_device(a.astype(np.float32)) for a in (x, y, post, comb, scale, base, norm)]
    dx, dy, dpost, dcomb, dscale, dbase, dnorm = f32
    stored = fn.view(np.uint32).reshape(-1) if halves else fn.astype(np.float32).ravel()
    splits = -(-d // MIX_COLUMNS)
    parts, out = cases.poisoned(2, splits, n + 1), cases.poisoned(2, d)
    rows = cuda.to_device(np.arange(2, dtype=np.int32))
    mix_kernel(d, n, halves=halves, has_post=True)[(splits, 2), 128](
        cuda.to_device(stored), dx, dy, dpost, dcomb, rows, dx, parts
    )
    rounds = d % 128 == 0
    quants = cuda.to_device(np.zeros(2 * d // 4, np.uint32))
    scales = cases.poisoned(2 * -(-d // 32))
    collapse_kernel(d, n, 1, iterations, EPS, EPS, rounds=rounds)[(2, 2), 32](
        parts, dscale, dbase, dx, dnorm, out, dpost, dcomb, quants, scales
    )
    if rounds:
        want_quants, want_scales = quantize_reference(out.copy_to_host())
        assert np.array_equal(quants.copy_to_host().view(np.int8), want_quants.ravel())
        assert np.array_equal(scales.copy_to_host(), want_scales.ravel())
    streams = x.reshape(2, 4, d)
    mixed = np.einsum("bic,bid->bcd", comb.reshape(2, 4, 4), streams)
    mixed = mixed + post[:, :, None] * y[:, None]
    assert cases.error(dx.copy_to_host(), mixed.reshape(2, -1)) < 1e-6
    flat = mixed.reshape(2, -1)
    f = flat / np.sqrt((flat**2).mean(axis=1, keepdims=True) + EPS)
    m = f @ fn.astype(np.float64).T
    pre = sigmoid(m[:, :4] * scale[0] + base[:4]) + EPS
    u = np.einsum("bi,bid->bd", pre, mixed)
    want = u / np.sqrt((u**2).mean(axis=1, keepdims=True) + EPS) * norm
    assert cases.error(out.copy_to_host(), want) < 3e-6
    want_post = 2 * sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    assert cases.error(dpost.copy_to_host(), want_post) < 3e-6
    c = (m[:, 8:] * scale[2] + base[8:]).reshape(2, 4, 4)
    want_comb = np.stack([sinkhorn(one, iterations) for one in c]).reshape(2, 16)
    assert cases.error(dcomb.copy_to_host(), want_comb) < 3e-6


def test_the_head_collapses_the_rows_it_is_asked_for():
    rng = np.random.default_rng(2)
    d, n = 8, 4
    fn, x, y = (rng.standard_normal(s).astype(np.float32) for s in ((n, 32), (3, 32), (3, d)))
    post, comb = rng.random((3, 4)).astype(np.float32), rng.random((3, 16)).astype(np.float32)
    outs = {}
    for rows in ([2], [0, 2]):
        b = len(rows)
        target, parts, out = (
            cases.poisoned(b, 32),
            cases.poisoned(b, 1, n + 1),
            cases.poisoned(b, d),
        )
        arrays = [cuda.to_device(a) for a in (fn.ravel(), x, y, post, comb)]
        order = cuda.to_device(np.array(rows, np.int32))
        mix_kernel(d, n, halves=False, has_post=True)[(1, b), 128](*arrays, order, target, parts)
        ones = cuda.to_device(np.ones(d, np.float32))
        collapse_kernel(d, n, 1, 2, EPS, EPS)[(1, b), 32](
            parts, ones, ones, target, ones, out, arrays[3], arrays[4], order, order
        )
        assert np.array_equal(arrays[3].copy_to_host(), post), "the head has no post weights"
        outs[b] = out.copy_to_host()
    assert np.array_equal(outs[1][0], outs[2][1])
