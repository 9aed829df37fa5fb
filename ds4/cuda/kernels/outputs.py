"""End of a step: the greedy token, and the join of ranks' partial sums."""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, int32

from ds4.cuda.kernels.block import LOWEST, begin
from ds4.cuda.kernels.intrinsics import cuda, device_function

__all__ = ["ARGMAX_BLOCKS", "argmax_final_kernel", "argmax_kernel", "join_kernel"]

ARGMAX_BLOCKS = 64
_THREADS = 256


@device_function
def _block_best(value, index, bad, values, indices, bads):
    """Largest value of the block, ties to the lower index, at thread 0; bad is ORed."""
    thread = cuda.threadIdx.x
    values[thread] = value
    indices[thread] = index
    bads[thread] = bad
    cuda.syncthreads()
    step = _THREADS // 2
    while step > 0:
        if thread < step:
            other = thread + step
            if values[other] > values[thread] or (
                values[other] == values[thread] and indices[other] < indices[thread]
            ):
                values[thread] = values[other]
                indices[thread] = indices[other]
            bads[thread] |= bads[other]
        cuda.syncthreads()
        step = step // 2


@functools.cache
def argmax_kernel() -> Any:
    """Kernel (logits f32[B, V], n, values f32[B, ARGMAX_BLOCKS], indices i32 likewise).

    Each block reduces one slice of the row; an index of -1 says that the slice holds a NaN.
    Grid: (ARGMAX_BLOCKS, B) blocks of 256 threads.
    """

    @cuda.jit
    def argmax(logits, n, values_out, indices_out):
        begin()
        b = cuda.blockIdx.y
        values = cuda.shared.array(_THREADS, float32)
        indices = cuda.shared.array(_THREADS, int32)
        bads = cuda.shared.array(_THREADS, int32)
        share = (n + ARGMAX_BLOCKS - 1) // ARGMAX_BLOCKS
        low = cuda.blockIdx.x * share
        high = min(low + share, n)
        best = float32(-float("inf"))
        at = int32(n)
        bad = int32(0)
        for i in range(low + cuda.threadIdx.x, high, _THREADS):
            value = logits[b, i]
            if value != value:
                bad = int32(1)
            if value > best or at == n:
                best = value
                at = int32(i)
        _block_best(best, at, bad, values, indices, bads)
        if cuda.threadIdx.x == 0:
            values_out[b, cuda.blockIdx.x] = values[0]
            indices_out[b, cuda.blockIdx.x] = -1 if bads[0] != 0 else indices[0]

    return argmax


@functools.cache
def argmax_final_kernel() -> Any:
    """Kernel (values, indices as `argmax_kernel` wrote them, tokens i32[B]).

    tokens[b] is the index of the largest logit, ties to the lower one; -1 if a logit is a NaN or
    the largest is not finite. Grid: B blocks of one warp; thread 0 works.
    """

    @cuda.jit
    def final(values, indices, tokens):
        begin()
        b = cuda.blockIdx.x
        if cuda.threadIdx.x == 0:
            best = values[b, 0]
            at = indices[b, 0]
            bad = at < 0
            for i in range(1, ARGMAX_BLOCKS):
                index = indices[b, i]
                if index < 0:
                    bad = True
                if values[b, i] > best:
                    best = values[b, i]
                    at = index
            if bad or best < LOWEST or best > -LOWEST:
                at = int32(-1)
            tokens[b] = at

    return final


@functools.cache
def join_kernel(n_ranks: int) -> Any:
    """Kernel (parts f32[n_ranks, n], out f32[n]): the fixed tree over ranks, ((0+1)+(2+3))+...

    Grid: ceil(n / 256) blocks of 256 threads. n_ranks is 2, 4 or 8.
    """

    @cuda.jit
    def join(parts, out):
        begin()
        i = cuda.blockIdx.x * _THREADS + cuda.threadIdx.x
        if i < out.shape[0]:
            left = parts[0, i] + parts[1, i]
            if n_ranks > 2:
                left = left + (parts[2, i] + parts[3, i])
            if n_ranks > 4:
                left = left + ((parts[4, i] + parts[5, i]) + (parts[6, i] + parts[7, i]))
            out[i] = left

    return join
