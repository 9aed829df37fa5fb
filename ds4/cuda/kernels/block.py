"""Sums over a block, in one fixed order, and small float32 functions that kernels share."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import float32, uint32

from ds4.cuda.kernels.intrinsics import (
    cuda,
    device_function,
    div,
    grid_wait,
    release_dependents,
    shfl_xor,
)
from ds4.cuda.kernels.quantize import signed_byte
from ds4.cuda.kernels.reduce import warp_sum

__all__ = [
    "LOWEST",
    "begin",
    "block_sum",
    "exp",
    "inverse_root",
    "quantize_quad",
    "sigmoid",
    "swiglu",
]

LOWEST = np.float32(-3.0e38)
"""Stands for minus infinity where a difference of two of them must stay defined."""

_LEVELS = np.float32(127.0)


@device_function
def begin():
    """First statement of a kernel that reads or writes what other launches do.

    Lets the next launch start early, and waits until the launch before has ended and its writes are
    visible. Every kernel of a step must do both: the wait is what orders launches that overlap.
    """
    release_dependents()
    grid_wait()


@device_function
def quantize_quad(a, b, c, d, quad, quants, scales):
    """Write the byte form of four adjacent values, as `quantize.quantize_kernel` does.

    All lanes of a warp call it together, lane l with quad number q0 + l, q0 a multiple of 8.
    """
    amax = max(max(abs(a), abs(b)), max(abs(c), abs(d)))
    amax = max(amax, shfl_xor(amax, 1))
    amax = max(amax, shfl_xor(amax, 2))
    amax = max(amax, shfl_xor(amax, 4))
    inverse = float32(0)
    if amax > float32(0):
        inverse = div(_LEVELS, amax)
    quants[quad] = (
        signed_byte(a, inverse)
        | (signed_byte(b, inverse) << uint32(8))
        | (signed_byte(c, inverse) << uint32(16))
        | (signed_byte(d, inverse) << uint32(24))
    )
    if quad & 7 == 0:
        scales[quad >> 3] = div(amax, _LEVELS)


@functools.cache
def block_sum(n_warps: int) -> Any:
    """Device function (value, scratch f32[>= n_warps]) -> the block's sum, in every thread.

    Each warp by the butterfly, then the warps in ascending order. All threads must call it; it
    ends with a barrier, so `scratch` may be used again at once.
    """

    @device_function
    def total(value, scratch):
        value = warp_sum(value)
        if n_warps > 1:
            if cuda.threadIdx.x & 31 == 0:
                scratch[cuda.threadIdx.x >> 5] = value
            cuda.syncthreads()
            value = scratch[0]
            for w in range(1, n_warps):
                value = value + scratch[w]
            cuda.syncthreads()
        return value

    return total


@device_function
def exp(x):
    """Exp in float32, as the device library has it."""
    return float32(math.exp(x))


@device_function
def inverse_root(x):
    """1 / sqrt(x), both steps correctly rounded."""
    return div(float32(1), float32(math.sqrt(x)))


@device_function
def sigmoid(x):
    """1 / (1 + exp(-x)) in float32."""
    return div(float32(1), float32(1) + exp(-x))


@device_function
def swiglu(a, b, clamp):
    """silu(min(a, clamp)) * clip(b, -clamp, clamp)."""
    a = min(a, clamp)
    b = min(max(b, -clamp), clamp)
    return a * sigmoid(a) * b
