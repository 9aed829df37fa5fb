"""Row-wise arithmetic between the matrix products: norms, rotary embedding, hyper-connections.

Every function computes a row from that row alone, in a fixed order. `exp_f32` is our own so that
its bits do not depend on the C library of the machine a rank runs on.

Source of the formulas: DeepSeek V4 as published; see `docs/ARCHITECTURE.md` for the letters.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ds4.cpu.kernels import simd

_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_P0 = np.float32(1.9875691500e-4)
_P1 = np.float32(1.3981999507e-3)
_P2 = np.float32(8.3334519073e-3)
_P3 = np.float32(4.1665795894e-2)
_P4 = np.float32(1.6666665459e-1)
_P5 = np.float32(5.0000001201e-1)
_LOWEST = np.float32(-87.0)
_HIGHEST = np.float32(88.0)


@njit(nogil=True)
def exp_f32(x):
    """exp(x) in float32, within 2 ulp; 0 below -87, inf above 88.

    Source: range reduction by ln 2 in two parts and the degree-5 minimax polynomial of Cephes.
    """
    if x < _LOWEST:
        return np.float32(0.0)
    if x > _HIGHEST:
        return np.float32(np.inf)
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _P0 * r + _P1
    p = p * r + _P2
    p = p * r + _P3
    p = p * r + _P4
    p = p * r + _P5
    p = p * (r * r) + r + _ONE
    return p * simd.bits_to_f32((np.int64(n) + 127) << 23)


@njit(nogil=True)
def sigmoid(x):
    """1 / (1 + exp(-x)) in float32."""
    return _ONE / (_ONE + exp_f32(-x))


@njit(nogil=True)
def rms_scale(x, at, length, eps):
    """1 / sqrt(mean(x^2) + eps) of `length` elements, float32."""
    mean = simd.dot(x, at, x, at, length) / np.float32(length)
    return _ONE / np.sqrt(mean + eps)


@njit(nogil=True, parallel=True, cache=True)
def rms_norm(x, n_rows, length, weight, eps, out):
    """out[r, i] = x[r, i] * rms_scale(x[r]) * weight[i]; an empty weight means ones.

    x and out are f32[n_rows * length] and may be the same array.
    """
    weighted = weight.size > 0
    for r in prange(n_rows):
        at = r * length
        scale = rms_scale(x, at, length, eps)
        if weighted:
            for i in range(length):
                out[at + i] = x[at + i] * scale * weight[i]
        else:
            for i in range(length):
                out[at + i] = x[at + i] * scale


@njit(nogil=True, parallel=True, cache=True)
def rope(x, n_rows, n_heads, width, n_dims, cos, sin):
    """Rotate adjacent pairs of the last n_dims of every head, in place.

    x is f32[n_rows * n_heads * width]; cos and sin are f32[n_rows * n_dims / 2]. Negating sin
    rotates back.
    """
    half = n_dims // 2
    for task in prange(n_rows * n_heads):
        r = task // n_heads
        at = task * width + width - n_dims
        for i in range(half):
            a, b = x[at + 2 * i], x[at + 2 * i + 1]
            c, s = cos[r * half + i], sin[r * half + i]
            x[at + 2 * i] = a * c - b * s
            x[at + 2 * i + 1] = a * s + b * c


@njit(nogil=True)
def _sinkhorn(c, n, iterations, eps):
    """Softmax over each row of c[n, n], then alternate column and row normalisation, in place."""
    for i in range(n):
        top = c[i, 0]
        for j in range(1, n):
            top = max(top, c[i, j])
        total = np.float32(0.0)
        for j in range(n):
            c[i, j] = exp_f32(c[i, j] - top)
            total += c[i, j]
        for j in range(n):
            c[i, j] = c[i, j] / total + eps
    for it in range(iterations):
        if it > 0:
            for i in range(n):
                total = np.float32(0.0)
                for j in range(n):
                    total += c[i, j]
                for j in range(n):
                    c[i, j] /= total + eps
        for j in range(n):
            total = np.float32(0.0)
            for i in range(n):
                total += c[i, j]
            for i in range(n):
                c[i, j] /= total + eps


@njit(nogil=True, parallel=True, cache=True)
def hc_pre(m, scale, base, streams, n_rows, n, d, iterations, hc_eps, norm, rms_eps, x, post, comb):
    """Hyper-connections before a sublayer: collapse the streams to its normalised input.

    Args:
      m: f32[n_rows * (2n + n^2)], control projection of the normalised streams.
      scale, base: f32[3], f32[2n + n^2].
      streams: f32[n_rows * n * d].
      norm: f32[d], the sublayer's RMS norm weight.
      x: out f32[n_rows * d].
      post: out f32[n_rows * n].
      comb: out f32[n_rows * n * n], row index summed over in `hc_post`.
    """
    width = 2 * n + n * n
    for r in prange(n_rows):
        pre = np.empty(n, np.float32)
        c = np.empty((n, n), np.float32)
        for i in range(n):
            pre[i] = sigmoid(m[r * width + i] * scale[0] + base[i]) + hc_eps
            post[r * n + i] = np.float32(2.0) * sigmoid(
                m[r * width + n + i] * scale[1] + base[n + i]
            )
            for j in range(n):
                k = 2 * n + i * n + j
                c[i, j] = m[r * width + k] * scale[2] + base[k]
        _sinkhorn(c, n, iterations, hc_eps)
        for i in range(n):
            for j in range(n):
                comb[(r * n + i) * n + j] = c[i, j]
        for e in range(d):
            x[r * d + e] = np.float32(0.0)
        for i in range(n):
            simd.axpy(pre[i], streams, (r * n + i) * d, x, r * d, d)
        s = rms_scale(x, r * d, d, rms_eps)
        for e in range(d):
            x[r * d + e] = x[r * d + e] * s * norm[e]


@njit(nogil=True, parallel=True, cache=True)
def hc_post(y, streams, n_rows, n, d, post, comb):
    """streams[c] = post[c] * y + sum_i comb[i, c] * streams[i], in place.

    y is f32[n_rows * d], streams f32[n_rows * n * d].
    """
    for r in prange(n_rows):
        old = streams[r * n * d : (r + 1) * n * d].copy()
        for c in range(n):
            at = (r * n + c) * d
            p = post[r * n + c]
            for e in range(d):
                streams[at + e] = p * y[r * d + e]
            for i in range(n):
                simd.axpy(comb[(r * n + i) * n + c], old, i * d, streams, at, d)


@njit(nogil=True, parallel=True, cache=True)
def hc_head(m, scale, base, streams, n_rows, n, d, hc_eps, norm, rms_eps, x):
    """Collapse the streams for the output head: sum_i c_i * streams[i], then RMS norm.

    m is f32[n_rows * n], scale f32[1], base f32[n]; x is out f32[n_rows * d].
    """
    for r in prange(n_rows):
        for e in range(d):
            x[r * d + e] = np.float32(0.0)
        for i in range(n):
            c = sigmoid(m[r * n + i] * scale[0] + base[i]) + hc_eps
            simd.axpy(c, streams, (r * n + i) * d, x, r * d, d)
        s = rms_scale(x, r * d, d, rms_eps)
        for e in range(d):
            x[r * d + e] = x[r * d + e] * s * norm[e]
