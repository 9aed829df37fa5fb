"""Start of a step: rotary angles of every row's position, and embedding rows.

A row of a step is one token of one session. What a row is lies in fixed device arrays (`tokens`,
`positions`, `slots`, `firsts`, `lasts`, one i32 per row of the bucket), never in launch arguments,
so one captured launch serves every step. A row with slot -1 is idle: its state is not touched and
its results mean nothing.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import float32, float64, int64, uint32

from ds4.cuda.kernels.block import begin
from ds4.cuda.kernels.intrinsics import cuda, f16_to_f32

__all__ = ["N_ANGLES", "angles_kernel", "embed_kernel"]

N_ANGLES = 4
"""Kinds of angles of a row at position t: 0 window layers at t; 1 compressed layers at t; 2 and 3
compressed layers at the first position of t's window of 4 and of 128."""


@functools.cache
def angles_kernel(half: int) -> Any:
    """Kernel (positions i32[B], frequencies f64[2, half], cos f32[B, 4, half], sin likewise).

    Grid: B blocks of N_ANGLES * half threads, rounded up to whole warps; one thread per angle.
    Computed in float64 and rounded once. Oracle: NumPy's cos and sin of position * frequency.
    """

    @cuda.jit
    def angles(positions, frequencies, cosines, sines):
        begin()
        b = cuda.blockIdx.x
        kind = cuda.threadIdx.x // half
        i = cuda.threadIdx.x % half
        if kind < N_ANGLES:
            position = positions[b]
            if kind == 2:
                position = position // 4 * 4
            if kind == 3:
                position = position // 128 * 128
            angle = float64(position) * frequencies[min(kind, 1), i]
            cosines[b, kind, i] = float32(math.cos(angle))
            sines[b, kind, i] = float32(math.sin(angle))

    return angles


@functools.cache
def embed_kernel(d: int, n_streams: int, *, halves: bool) -> Any:
    """Kernel (table, tokens i32[B], x f32[B, n_streams * d]): row tokens[b], for every stream.

    Grid: (ceil(d / 2 / 128), B) blocks of 128 threads; a thread copies two weights. The table is
    u32[V d / 2] of two halves, or f32[V d]. Oracle: the dequantized row.
    """
    pairs = d // 2

    @cuda.jit
    def embed(table, tokens, x):
        begin()
        b = cuda.blockIdx.y
        i = cuda.blockIdx.x * 128 + cuda.threadIdx.x
        if i < pairs:
            at = int64(tokens[b]) * pairs + i
            if halves:
                word = table[at]
                low, high = f16_to_f32(word), f16_to_f32(word >> uint32(16))
            else:
                low, high = table[2 * at], table[2 * at + 1]
            for s in range(n_streams):
                x[b, s * d + 2 * i] = low
                x[b, s * d + 2 * i + 1] = high

    return embed
