"""Device functions that multiply a few rows of a weight matrix by B activation rows in one warp.

The invariant: what a lane multiplies, and in which order it adds, depends on K and the shards
alone. Batch size, rows per warp and unrolling only move work between warps, so every batch bucket
and every row slice gives the same bits. These functions know nothing about grids or outputs.

A lane takes pieces of 16 bytes: piece p of a row (or shard) belongs to lane p % 32, and a lane adds
its pieces in ascending order. All weight loads of a group are issued before the first use, and the
first group before `grid_wait`, so that they overlap the end of the kernel before.
Calls are written out where a loop would be too large for the compiler to unroll: an array indexed
by a loop variable that survives to run time lives in memory instead of registers.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
from numba import float32, int32, int64, uint32

from ds4.cuda.kernels.intrinsics import (
    address,
    cuda,
    device_function,
    dp4a,
    f16_to_f32,
    fma,
    grid_wait,
    i8_to_f32,
    ld_f32,
    ld_f32x4,
    ld_u16_stream,
    ld_u32x4,
    ld_u32x4_stream,
)
from ds4.cuda.kernels.reduce import N_SHARDS

__all__ = ["RowPlan", "f16_rows", "q8_0_rows"]

_LANES = 32


@attrs.frozen
class RowPlan:
    """How one warp walks the rows of a matrix.

    Attributes:
      batch: activation rows B.
      k: weights of a row that this rank holds, or the most that one call takes.
      rows: matrix rows per warp: 1, 2 or 4.
      unroll: pieces per row in flight: 1, 2, 4 or 8.
      first_shard: first of the held shards, if the sum is sharded.
      n_shards: held shards; 0 for an unsharded sum.
      total_k: weights of a whole row; differs from k where a rank holds only some shards.
      row_k: weights between rows, if a warp takes only a part of k of them.
    """

    batch: int
    k: int
    rows: int
    unroll: int
    first_shard: int = 0
    n_shards: int = 0
    total_k: int = 0
    row_k: int = 0

    @property
    def n_sums(self) -> int:
        """Partial sums a lane keeps per row and batch row."""
        return max(self.n_shards, 1)


def _steps(plan: RowPlan, piece: int, block: int) -> tuple[int, bool]:
    """(pieces of one lane in the longest shard, whether all lanes always have that many)."""
    if plan.n_shards == 0:
        pieces = plan.k // piece
        return -(-pieces // _LANES), pieces % _LANES == 0
    blocks = plan.total_k // block
    pieces = -(-blocks // N_SHARDS) * (block // piece)
    full = blocks % N_SHARDS == 0 and pieces % _LANES == 0
    return -(-pieces // _LANES), full


@device_function
def four(word, x0, x1, x2, x3, dot):
    """The four signed bytes of a word times x0 to x3, added to dot in ascending order."""
    dot = fma(i8_to_f32(word, int32(0)), x0, dot)
    dot = fma(i8_to_f32(word, int32(1)), x1, dot)
    dot = fma(i8_to_f32(word, int32(2)), x2, dot)
    return fma(i8_to_f32(word, int32(3)), x3, dot)


@functools.cache
def q8_0_rows(plan: RowPlan, *, exact: bool) -> Any:
    """Device function: Q8_0 rows times activations, into a lane's partial sums.

    Arguments: quants u32, scales u16 (planes); row, last_row; first, length (pieces of the row to
    take; ignored where the plan has shards); lane; x (u32 quants or, exact, f32), xs (f32 scales,
    unused when exact), x_row (weights between batch rows of x), x_first (first weight of the row's
    input); acc f32[rows * batch * n_sums], row-major, set here. Rows past last_row repeat it; the
    caller drops them.

    Numerics: fast: int32 dots of 16 products, times (d * x scale), added by fma. Exact: a chain of
    16 fma in float32, times d, added by fma.
    """
    n_batch, n_rows, k = plan.batch, plan.rows, plan.k
    n_sums = plan.n_sums
    steps, full = _steps(plan, 16, 32)
    total = steps * n_sums
    unroll = min(plan.unroll, 1 << (total - 1).bit_length())
    groups = -(-total // unroll)
    even = groups * unroll == total
    n_words, n_scales, n_acc = n_rows * unroll * 4, n_rows * unroll, n_rows * n_batch * n_sums
    sharded = plan.n_shards > 0
    blocks, first_shard = plan.total_k // 32, plan.first_shard
    origin = (first_shard * blocks) // N_SHARDS
    row_k = plan.row_k or k

    @device_function
    def bounds(t, first, length):
        """(first piece, pieces) of the segment that step t of a lane belongs to."""
        if not sharded:
            return first, length
        shard = first_shard + t // steps
        low = (shard * blocks) // 8
        return (low - origin) * 2, ((shard + 1) * blocks // 8 - low) * 2

    @device_function
    def one(b, u, t, at, w, d, acc, lane, x, xs, x_row, x_first):
        """Batch row b times the pieces at `at` of all rows."""
        before = int64(b) * x_row + x_first
        which = b * n_sums
        if sharded:
            which += t // steps
        if exact:
            xp = address(x, before + 16 * lane) + at * 64
            x0, x1, x2, x3 = ld_f32x4(xp)
            x4, x5, x6, x7 = ld_f32x4(xp + 16)
            x8, x9, xa, xb = ld_f32x4(xp + 32)
            xc, xd, xe, xf = ld_f32x4(xp + 48)
            for r in range(n_rows):
                j = (r * unroll + u) * 4
                dot = four(w[j], x0, x1, x2, x3, float32(0))
                dot = four(w[j + 1], x4, x5, x6, x7, dot)
                dot = four(w[j + 2], x8, x9, xa, xb, dot)
                dot = four(w[j + 3], xc, xd, xe, xf, dot)
                i = r * n_batch * n_sums + which
                acc[i] = fma(dot, f16_to_f32(d[r * unroll + u]), acc[i])
        else:
            x0, x1, x2, x3 = ld_u32x4(address(x, (before >> 2) + 4 * lane) + at * 16)
            x_scale = ld_f32(address(xs, (before >> 5) + (lane >> 1)) + at * 2)
            for r in range(n_rows):
                j = (r * unroll + u) * 4
                dot = dp4a(w[j], x0, int32(0))
                dot = dp4a(w[j + 1], x1, dot)
                dot = dp4a(w[j + 2], x2, dot)
                dot = dp4a(w[j + 3], x3, dot)
                i = r * n_batch * n_sums + which
                acc[i] = fma(float32(dot), f16_to_f32(d[r * unroll + u]) * x_scale, acc[i])

    @device_function
    def step(u, g, w, d, acc, first, length, lane, x, xs, x_row, x_first):
        """All batch rows times one piece of every row."""
        t = g * unroll + u
        start, count = bounds(t, first, length)
        at = (t % steps) * 32
        inside = full or at + lane < count
        if not even:
            inside = inside and t < total
        at += start
        if inside:
            one(0, u, t, at, w, d, acc, lane, x, xs, x_row, x_first)
            if n_batch > 1:
                one(1, u, t, at, w, d, acc, lane, x, xs, x_row, x_first)
            if n_batch > 2:
                one(2, u, t, at, w, d, acc, lane, x, xs, x_row, x_first)
                one(3, u, t, at, w, d, acc, lane, x, xs, x_row, x_first)
            if n_batch > 4:
                one(4, u, t, at, w, d, acc, lane, x, xs, x_row, x_first)
                one(5, u, t, at, w, d, acc, lane, x, xs, x_row, x_first)
                one(6, u, t, at, w, d, acc, lane, x, xs, x_row, x_first)
                one(7, u, t, at, w, d, acc, lane, x, xs, x_row, x_first)

    @device_function
    def rows(quants, scales, row, last_row, first, length, lane, x, xs, x_row, x_first, acc):
        w = cuda.local.array(n_words, uint32)
        d = cuda.local.array(n_scales, uint32)
        for i in range(n_acc):
            acc[i] = float32(0)
        for g in range(groups):
            for r in range(n_rows):
                this_row = min(row + r, last_row)
                weight = address(quants, int64(this_row) * (row_k // 4) + 4 * lane)
                scale = address(scales, int64(this_row) * (row_k // 32) + (lane >> 1))
                for u in range(unroll):
                    t = g * unroll + u
                    start, count = bounds(t, first, length)
                    at = (t % steps) * 32
                    j = (r * unroll + u) * 4
                    inside = full or at + lane < count
                    if not even:
                        inside = inside and t < total
                    at += start
                    if inside:
                        w0, w1, w2, w3 = ld_u32x4_stream(weight + at * 16)
                        w[j] = w0
                        w[j + 1] = w1
                        w[j + 2] = w2
                        w[j + 3] = w3
                        d[r * unroll + u] = ld_u16_stream(scale + at)
            if g == 0:
                grid_wait()
            step(0, g, w, d, acc, first, length, lane, x, xs, x_row, x_first)
            if unroll > 1:
                step(1, g, w, d, acc, first, length, lane, x, xs, x_row, x_first)
            if unroll > 2:
                step(2, g, w, d, acc, first, length, lane, x, xs, x_row, x_first)
                step(3, g, w, d, acc, first, length, lane, x, xs, x_row, x_first)
            if unroll > 4:
                step(4, g, w, d, acc, first, length, lane, x, xs, x_row, x_first)
                step(5, g, w, d, acc, first, length, lane, x, xs, x_row, x_first)
                step(6, g, w, d, acc, first, length, lane, x, xs, x_row, x_first)
                step(7, g, w, d, acc, first, length, lane, x, xs, x_row, x_first)

    return rows


@functools.cache
def f16_rows(plan: RowPlan) -> Any:
    """Device function: F16 rows times float32 activations, into a lane's partial sums.

    Arguments: values u32 (plane); row, last_row; k_row (weights between rows), k_first (first
    column); lane; x f32, x_row, x_first; acc f32[rows * batch], set here. Not sharded.

    Numerics: two fma chains a lane, over the first and the last four halves of its pieces, added at
    the end. There is no other arithmetic for F16: exact and fast agree in every bit.
    """
    n_batch, n_rows, k = plan.batch, plan.rows, plan.k
    pieces = k // 8
    total = -(-pieces // _LANES)
    full = pieces % _LANES == 0
    unroll = min(plan.unroll, 1 << (total - 1).bit_length())
    groups = -(-total // unroll)
    even = groups * unroll == total
    n_words, n_acc = n_rows * unroll * 4, n_rows * n_batch

    @device_function
    def one(b, u, at, w, acc, other, lane, x, x_row, x_first):
        """Batch row b times the pieces at `at` of all rows."""
        xp = address(x, int64(b) * x_row + x_first + 8 * lane) + at * 32
        x0, x1, x2, x3 = ld_f32x4(xp)
        x4, x5, x6, x7 = ld_f32x4(xp + 16)
        for r in range(n_rows):
            j = (r * unroll + u) * 4
            i = r * n_batch + b
            a, c = acc[i], other[i]
            a = fma(f16_to_f32(w[j]), x0, a)
            c = fma(f16_to_f32(w[j + 2]), x4, c)
            a = fma(f16_to_f32(w[j] >> uint32(16)), x1, a)
            c = fma(f16_to_f32(w[j + 2] >> uint32(16)), x5, c)
            a = fma(f16_to_f32(w[j + 1]), x2, a)
            c = fma(f16_to_f32(w[j + 3]), x6, c)
            acc[i] = fma(f16_to_f32(w[j + 1] >> uint32(16)), x3, a)
            other[i] = fma(f16_to_f32(w[j + 3] >> uint32(16)), x7, c)

    @device_function
    def step(u, g, w, acc, other, lane, x, x_row, x_first):
        """All batch rows times one piece of every row."""
        at = (g * unroll + u) * 32
        if (full and even) or at + lane < pieces:
            one(0, u, at, w, acc, other, lane, x, x_row, x_first)
            if n_batch > 1:
                one(1, u, at, w, acc, other, lane, x, x_row, x_first)
            if n_batch > 2:
                one(2, u, at, w, acc, other, lane, x, x_row, x_first)
                one(3, u, at, w, acc, other, lane, x, x_row, x_first)
            if n_batch > 4:
                one(4, u, at, w, acc, other, lane, x, x_row, x_first)
                one(5, u, at, w, acc, other, lane, x, x_row, x_first)
                one(6, u, at, w, acc, other, lane, x, x_row, x_first)
                one(7, u, at, w, acc, other, lane, x, x_row, x_first)

    @device_function
    def rows(values, row, last_row, k_row, k_first, lane, x, x_row, x_first, acc):
        w = cuda.local.array(n_words, uint32)
        other = cuda.local.array(n_acc, float32)
        for i in range(n_acc):
            acc[i] = float32(0)
            other[i] = float32(0)
        x_first = x_first + k_first
        for g in range(groups):
            for r in range(n_rows):
                this_row = min(row + r, last_row)
                weight = address(values, ((int64(this_row) * k_row + k_first) >> 1) + 4 * lane)
                for u in range(unroll):
                    at = (g * unroll + u) * 32
                    j = (r * unroll + u) * 4
                    if (full and even) or at + lane < pieces:
                        w0, w1, w2, w3 = ld_u32x4_stream(weight + at * 16)
                        w[j] = w0
                        w[j + 1] = w1
                        w[j + 2] = w2
                        w[j + 3] = w3
            if g == 0:
                grid_wait()
            step(0, g, w, acc, other, lane, x, x_row, x_first)
            if unroll > 1:
                step(1, g, w, acc, other, lane, x, x_row, x_first)
            if unroll > 2:
                step(2, g, w, acc, other, lane, x, x_row, x_first)
                step(3, g, w, acc, other, lane, x, x_row, x_first)
            if unroll > 4:
                step(4, g, w, acc, other, lane, x, x_row, x_first)
                step(5, g, w, acc, other, lane, x, x_row, x_first)
                step(6, g, w, acc, other, lane, x, x_row, x_first)
                step(7, g, w, acc, other, lane, x, x_row, x_first)
        for i in range(n_acc):
            acc[i] = acc[i] + other[i]

    return rows
