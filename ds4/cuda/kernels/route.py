"""The router: which experts a row uses and their weights; and the shared expert's activation."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import float32, float64, int32, int64

from ds4.cuda.kernels.block import LOWEST, begin, swiglu
from ds4.cuda.kernels.intrinsics import cuda, device_function, div, shfl_xor

__all__ = ["LANES_PER_BLOCK", "route_kernel"]

LANES_PER_BLOCK = 256
_FLOOR = np.float32(6.103515625e-5)


@device_function
def _affinity(g):
    """sqrt(softplus(g)), softplus in float64 with the usual guards."""
    x = float64(g)
    if x > 20.0:
        y = x
    elif x < -20.0:
        y = math.exp(x)
    else:
        y = math.log1p(math.exp(x))
    return float32(math.sqrt(y))


@functools.cache
def route_kernel(n_experts: int, n_used: int, *, hashed: bool, biased: bool) -> Any:
    """Kernel: experts and weights of every row, and h = swiglu(gate, up) of the shared expert.

    Args: logits f32[B, *] from column l_column; bias f32[E], for the selection only (read if
    biased); table i32[V n_used] (read if hashed); tokens i32[B]; scale; gate, up f32[B, *], the
    shared expert's projections, each with its first column; lanes of this rank; clamp; ids out
    i32[B, n_used]; weights out f32[B, n_used]; h out f32[B, lanes].
    Grid: (1 + ceil(lanes / LANES_PER_BLOCK), B) blocks of LANES_PER_BLOCK threads. Block 0 routes
    with all threads for the affinities and its first warp for the choice: descending score, ties to
    the lower id, or table order. Oracle:
    `ds4.cpu.kernels.moe.route`.
    """
    per_lane = -(-n_experts // 32)

    @cuda.jit
    def route(
        logits, l_column, bias, table, tokens, scale, gate, gate_column, up, up_column, lanes,
        clamp, ids, weights, h,
    ):  # fmt: skip
        begin()
        b = cuda.blockIdx.y
        if cuda.blockIdx.x > 0:
            i = (cuda.blockIdx.x - 1) * LANES_PER_BLOCK + cuda.threadIdx.x
            if i < lanes:
                h[b, i] = swiglu(gate[b, gate_column + i], up[b, up_column + i], clamp)
            return
        affinity = cuda.shared.array(n_experts, float32)
        for e in range(cuda.threadIdx.x, n_experts, LANES_PER_BLOCK):
            affinity[e] = _affinity(logits[b, l_column + e])
        cuda.syncthreads()
        lane = cuda.threadIdx.x
        if lane >= 32:
            return
        score = cuda.local.array(per_lane, float32)
        for i in range(per_lane):
            e = lane + 32 * i
            score[i] = LOWEST
            if e < n_experts:
                score[i] = affinity[e]
                if biased:
                    score[i] = affinity[e] + bias[e]
        total = float32(0)
        mine = float32(0)
        for k in range(n_used):
            if hashed:
                winner = int32(table[int64(tokens[b]) * n_used + k])
            else:
                best = score[0]
                winner = int32(lane)
                for i in range(1, per_lane):
                    if score[i] > best:
                        best = score[i]
                        winner = int32(lane + 32 * i)
                for step in range(5):
                    other = shfl_xor(best, 1 << step)
                    other_id = shfl_xor(winner, 1 << step)
                    if other > best or (other == best and other_id < winner):
                        best = other
                        winner = other_id
                for i in range(per_lane):
                    if lane + 32 * i == winner:
                        score[i] = LOWEST
            own = affinity[winner]
            total = total + own
            if lane == k:
                mine = own
                ids[b, k] = winner
        total = max(total, _FLOOR)
        if lane < n_used:
            weights[b, lane] = div(mine, total) * scale

    return route
