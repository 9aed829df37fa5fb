"""Mixture of experts on the CPU: router, routed experts grouped by expert, canonical-shard sum.

A rank computes the slots whose expert lies in its shards and no others. The sum over a token's
slots has a defined order: shard v adds its routed experts in slot order, then its part of the
shared expert; shards are joined by the fixed tree.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from ds4.cpu.kernels import simd
from ds4.cpu.kernels.elementwise import sigmoid
from ds4.cpu.kernels.matmul import decode_span, tree_sum

_ZERO = np.float32(0.0)
_FLOOR = np.float32(6.103515625e-5)


@njit(nogil=True)
def _affinity(g):
    """sqrt(softplus(g)); softplus in float64 with the usual guards."""
    x = np.float64(g)
    if x > 20.0:
        y = x
    elif x < -20.0:
        y = math.exp(x)
    else:
        y = math.log1p(math.exp(x))
    return np.float32(math.sqrt(y))


@njit(nogil=True, cache=True)
def route(logits, bias, table, tokens, n_rows, n_experts, n_used, scale, ids, weights):
    """Choose the experts of every row and their weights.

    Args:
      logits: f32[n_rows * E].
      bias: f32[E], for the selection only; empty means zeros.
      table: i32[V * K] of a hash-routed layer, or empty for a scored one.
      tokens: i32[n_rows], used by hash-routed layers.
      ids: out i32[n_rows * K]: table order, or descending score with ties to the lower id.
      weights: out f32[n_rows * K] from the unbiased affinities, normalised, times scale.
    """
    p = np.empty(n_experts, np.float32)
    score = np.empty(n_experts, np.float32)
    for r in range(n_rows):
        for e in range(n_experts):
            p[e] = _affinity(logits[r * n_experts + e])
        at = r * n_used
        if table.size > 0:
            for j in range(n_used):
                ids[at + j] = table[tokens[r] * n_used + j]
        else:
            for e in range(n_experts):
                score[e] = p[e] + bias[e] if bias.size > 0 else p[e]
            for j in range(n_used):
                best = 0
                for e in range(1, n_experts):
                    if score[e] > score[best]:
                        best = e
                ids[at + j] = best
                score[best] = np.float32(-np.inf)
        total = _ZERO
        for j in range(n_used):
            total += p[ids[at + j]]
        total = max(total, _FLOOR)
        for j in range(n_used):
            weights[at + j] = p[ids[at + j]] / total * scale


@njit(nogil=True, cache=True)
def group_slots(ids, n_slots, local, n_local, offsets, slots):
    """Sort the owned slots by local expert, keeping slot order within an expert.

    Args:
      ids: i32[n_slots], global expert of each slot (slot = row * K + j).
      local: i32[E], global expert to local index, -1 where another rank owns it.
      offsets: out i64[n_local + 1]; slots: out i32[n_slots].
    """
    for e in range(n_local + 1):
        offsets[e] = 0
    for s in range(n_slots):
        e = local[ids[s]]
        if e >= 0:
            offsets[e + 1] += 1
    for e in range(n_local):
        offsets[e + 1] += offsets[e]
    fill = offsets[:n_local].copy()
    for s in range(n_slots):
        e = local[ids[s]]
        if e >= 0:
            slots[fill[e]] = s
            fill[e] += 1


@njit(nogil=True)
def _swiglu(a, b, clamp):
    """silu(min(a, clamp)) * clip(b, -clamp, clamp)."""
    a = min(a, clamp)
    b = min(max(b, -clamp), clamp)
    return a * sigmoid(a) * b


@njit(nogil=True, parallel=True, cache=True)
def experts_up(
    kind, gate, up, row_bytes, n_local, d, f, x, n_used, weights, offsets, slots, clamp, h
):
    """h[slot, o] = weight[slot] * swiglu(W1_e x, W3_e x) for every owned slot.

    gate and up are u8[n_local * f * row_bytes]; x is f32[rows * d]; h is out f32[n_slots * f].
    """
    pieces = 4
    for task in prange(n_local * pieces):
        e = task // pieces
        begin, end = offsets[e], offsets[e + 1]
        if end > begin:
            piece = task % pieces
            w1 = np.empty(d, np.float32)
            w3 = np.empty(d, np.float32)
            for o in range(f * piece // pieces, f * (piece + 1) // pieces):
                at = (e * f + o) * row_bytes
                decode_span(kind, gate, at, d, w1, 0)
                decode_span(kind, up, at, d, w3, 0)
                i = begin
                while i + 4 <= end:
                    s0, s1, s2, s3 = slots[i], slots[i + 1], slots[i + 2], slots[i + 3]
                    x0, x1 = s0 // n_used * d, s1 // n_used * d
                    x2, x3 = s2 // n_used * d, s3 // n_used * d
                    a = simd.dot4(w1, 0, x, x0, x1, x2, x3, d)
                    b = simd.dot4(w3, 0, x, x0, x1, x2, x3, d)
                    h[s0 * f + o] = weights[s0] * _swiglu(a[0], b[0], clamp)
                    h[s1 * f + o] = weights[s1] * _swiglu(a[1], b[1], clamp)
                    h[s2 * f + o] = weights[s2] * _swiglu(a[2], b[2], clamp)
                    h[s3 * f + o] = weights[s3] * _swiglu(a[3], b[3], clamp)
                    i += 4
                while i < end:
                    s0 = slots[i]
                    a0 = simd.dot(w1, 0, x, s0 // n_used * d, d)
                    b0 = simd.dot(w3, 0, x, s0 // n_used * d, d)
                    h[s0 * f + o] = weights[s0] * _swiglu(a0, b0, clamp)
                    i += 1


@njit(nogil=True, parallel=True, cache=True)
def experts_down(kind, down, row_bytes, n_local, d, f, h, offsets, slots, y):
    """y[slot, o] = sum_i W2_e[o, i] * h[slot, i] for every owned slot; y is f32[n_slots * d]."""
    pieces = 4
    for task in prange(n_local * pieces):
        e = task // pieces
        begin, end = offsets[e], offsets[e + 1]
        if end > begin:
            piece = task % pieces
            w2 = np.empty(f, np.float32)
            for o in range(d * piece // pieces, d * (piece + 1) // pieces):
                decode_span(kind, down, (e * d + o) * row_bytes, f, w2, 0)
                i = begin
                while i + 4 <= end:
                    s0, s1, s2, s3 = slots[i], slots[i + 1], slots[i + 2], slots[i + 3]
                    v = simd.dot4(w2, 0, h, s0 * f, s1 * f, s2 * f, s3 * f, f)
                    y[s0 * d + o] = v[0]
                    y[s1 * d + o] = v[1]
                    y[s2 * d + o] = v[2]
                    y[s3 * d + o] = v[3]
                    i += 4
                while i < end:
                    y[slots[i] * d + o] = simd.dot(w2, 0, h, slots[i] * f, f)
                    i += 1


@njit(nogil=True, parallel=True, cache=True)
def swiglu_rows(a, b, length, clamp, out):
    """out[i] = swiglu(a[i], b[i]) over `length` elements."""
    pieces = 8
    for piece in prange(pieces):
        for i in range(length * piece // pieces, length * (piece + 1) // pieces):
            out[i] = _swiglu(a[i], b[i], clamp)


@njit(nogil=True, parallel=True, cache=True)
def combine(y, ids, shard_of, shared, n_rows, n_used, d, v0, v1, out):
    """out[r] = tree over shards v0 .. v1 - 1 of (routed slots in slot order, then shared part).

    Args:
      y: f32[n_rows * K * d], valid where the slot's expert lies in the shards.
      ids: i32[n_rows * K]; shard_of: i32[E].
      shared: f32[(v1 - v0) * n_rows * d], partial sums of the shared expert.
      out: f32[n_rows * d], this rank's subtree.
    """
    n = v1 - v0
    for r in prange(n_rows):
        parts = np.empty(n * d, np.float32)
        for i in range(n * d):
            parts[i] = _ZERO
        for j in range(n_used):
            v = shard_of[ids[r * n_used + j]]
            if v0 <= v < v1:
                at = (v - v0) * d
                from_slot = (r * n_used + j) * d
                for i in range(d):
                    parts[at + i] += y[from_slot + i]
        s = np.empty(8, np.float32)
        for i in range(d):
            for v in range(n):
                s[v] = parts[v * d + i] + shared[(v * n_rows + r) * d + i]
            out[r * d + i] = tree_sum(s, n)
