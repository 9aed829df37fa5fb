"""Sums over a block, in one fixed order, and small float32 functions that kernels share."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import float32

from ds4.cuda.kernels.intrinsics import cuda, device_function, div
from ds4.cuda.kernels.reduce import warp_sum

__all__ = ["LOWEST", "block_sum", "exp", "inverse_root", "sigmoid", "swiglu"]

LOWEST = np.float32(-3.0e38)
"""Stands for minus infinity where a difference of two of them must stay defined."""


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
