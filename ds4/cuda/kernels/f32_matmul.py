"""Matrix products with float32 weights: types without a packed kernel, expanded exactly at load.

One warp computes one output element for one row: element i goes to lane i % 32 by fused
multiply-adds in order of i, then the butterfly of `reduce.warp_sum`. That is the order of
`ds4.cpu.kernels.simd.dot`, so these products have the CPU backend's bits. They are for small models
and for comparison; the packed kernels of `quant_matmul` carry the large ones.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, int64

from ds4.cuda.kernels.block import begin, swiglu
from ds4.cuda.kernels.intrinsics import cuda, device_function, fma
from ds4.cuda.kernels.reduce import N_SHARDS, warp_sum

__all__ = ["WARPS", "experts_down_kernel", "experts_up_kernel", "product_kernel", "sharded_kernel"]

WARPS = 4


@device_function
def _dot(w, w_at, x, row, x_at, n, lane):
    """Lane sum of w[w_at + i] * x[row, x_at + i], i < n, in every lane."""
    acc = float32(0)
    for i in range(lane, n, 32):
        acc = fma(w[w_at + i], x[row, x_at + i], acc)
    return warp_sum(acc)


@device_function
def _tree(parts, n):
    """Balanced binary tree over parts[:n], n a power of two; overwrites parts."""
    while n > 1:
        n = n // 2
        for v in range(n):
            parts[v] = parts[2 * v] + parts[2 * v + 1]
    return parts[0]


@functools.cache
def product_kernel() -> Any:
    """Kernel (w f32[rows k], n_rows, k, x f32[B, X], group_rows, out f32[B, >= rows]).

    out[b, o] = row o . x[b, g k : (g + 1) k] with g = o // group_rows.
    Grid: (ceil(rows / WARPS), B) blocks of WARPS warps. Oracle: float64 product.
    """

    @cuda.jit
    def product(w, n_rows, k, x, group_rows, out):
        begin()
        lane = cuda.threadIdx.x & 31
        o = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        b = cuda.blockIdx.y
        if o < n_rows:
            total = _dot(w, int64(o) * k, x, b, o // group_rows * k, k, lane)
            if lane == 0:
                out[b, o] = total

    return product


@functools.cache
def sharded_kernel(n_shards: int) -> Any:
    """Kernel (w f32[rows k], n_rows, k, bounds i32[n_shards + 1], x, out): the subtree's sum.

    Shard v sums columns bounds[v] to bounds[v + 1]; the shards are added as the fixed tree.
    Grid and order as `product_kernel`.
    """

    @cuda.jit
    def sharded(w, n_rows, k, bounds, x, out):
        begin()
        lane = cuda.threadIdx.x & 31
        o = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        b = cuda.blockIdx.y
        if o < n_rows:
            parts = cuda.local.array(N_SHARDS, float32)
            for v in range(n_shards):
                low = bounds[v]
                parts[v] = _dot(w, int64(o) * k + low, x, b, low, bounds[v + 1] - low, lane)
            total = _tree(parts, n_shards)
            if lane == 0:
                out[b, o] = total

    return sharded


@functools.cache
def experts_up_kernel(n_used: int) -> Any:
    """Kernel: h[b n_used + j, o] = weight * swiglu(W1_e x[b], W3_e x[b], clamp), e = ids[b, j].

    Args: gate, up f32[local experts * f * k]; local i32[E], expert to its place or -1 (skipped);
    ids i32[B, n_used]; weights f32[B, n_used]; x f32[B, k]; f; k; clamp; h f32[B n_used, f].
    Grid: (ceil(f / WARPS), B n_used) blocks of WARPS warps.
    """

    @cuda.jit
    def experts_up(gate, up, local, ids, weights, x, f, k, clamp, h):
        begin()
        lane = cuda.threadIdx.x & 31
        o = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        slot = cuda.blockIdx.y
        b = slot // n_used
        e = local[ids[b, slot % n_used]]
        if o < f and e >= 0:
            at = (int64(e) * f + o) * k
            a = _dot(gate, at, x, b, 0, k, lane)
            c = _dot(up, at, x, b, 0, k, lane)
            if lane == 0:
                h[slot, o] = weights[b, slot % n_used] * swiglu(a, c, clamp)

    return experts_up


@functools.cache
def experts_down_kernel(n_used: int, first_shard: int, n_shards: int) -> Any:
    """Kernel: out[b] = tree over shards of (routed slots in slot order, then the shared part).

    Args: down f32[local experts * d * f]; local, shard_of i32[E]; ids; h f32[B n_used, f]; shared
    f32[d, lanes] (this rank's columns); bounds i32[n_shards + 1], its columns of each shard; hs
    f32[B, lanes]; d; f; lanes; out f32[B, d].
    Grid: (ceil(d / WARPS), B) blocks of WARPS warps. Oracle: `ds4.cpu.kernels.moe.combine`.
    """

    @cuda.jit
    def experts_down(down, local, shard_of, ids, h, shared, bounds, hs, d, f, lanes, out):
        begin()
        lane = cuda.threadIdx.x & 31
        o = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        b = cuda.blockIdx.y
        if o < d:
            parts = cuda.local.array(N_SHARDS, float32)
            for v in range(n_shards):
                parts[v] = float32(0)
            for j in range(n_used):
                e = ids[b, j]
                place = local[e]
                if place >= 0:
                    y = _dot(down, (int64(place) * d + o) * f, h, b * n_used + j, 0, f, lane)
                    parts[shard_of[e] - first_shard] += y
            for v in range(n_shards):
                low = bounds[v]
                y = _dot(shared, int64(o) * lanes + low, hs, b, low, bounds[v + 1] - low, lane)
                parts[v] = parts[v] + y
            total = _tree(parts, n_shards)
            if lane == 0:
                out[b, o] = total

    return experts_down
