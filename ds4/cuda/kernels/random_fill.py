"""Random words, halves or constants, made on the device: the weights of synthetic models."""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, int64, uint32, uint64

from ds4.cuda.kernels.intrinsics import cuda, device_function, pack_f16x2

__all__ = ["fill_kernel"]

_HALF_RANGE = 0.035  # uniform, so the standard deviation is 0.02


@device_function
def _mix(i, seed):
    """A 32-bit hash of (index, seed): the finalizer of MurmurHash3 over their combination."""
    mask = uint64(0xFFFFFFFF)
    h = ((uint64(i) & mask) * uint64(0x9E3779B1) & mask) ^ uint64(seed)
    h = (h ^ (h >> uint64(16))) * uint64(0x85EBCA6B) & mask
    h = (h ^ (h >> uint64(13))) * uint64(0xC2B2AE35) & mask
    return uint32(h ^ (h >> uint64(16)))


@functools.cache
def fill_kernel(mode: str) -> Any:
    """Kernel (out, n, seed, value): random words, random halves, or one value in every item.

    Grid: any number of blocks of 256 threads; a thread strides over the array.
    """
    constant, halves = mode == "constant", mode == "halves"
    step = float32(2.0 * _HALF_RANGE / 65536.0)

    @cuda.jit
    def fill(out, n, seed, value):
        i = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        while i < n:
            if constant:
                out[i] = value
            elif halves:
                word = _mix(i, seed)
                low = float32(word & uint32(0xFFFF)) * step - float32(_HALF_RANGE)
                high = float32(word >> uint32(16)) * step - float32(_HALF_RANGE)
                out[i] = pack_f16x2(low, high)
            else:
                out[i] = _mix(i, seed)
            i += int64(cuda.gridDim.x) * cuda.blockDim.x

    return fill
