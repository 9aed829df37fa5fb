"""Activations as signed bytes: the input form of the integer-dot kernels (`fast` arithmetic).

Per 32 consecutive values: scale = amax / 127, byte = value * (127 / amax) rounded half to even.
A block of zeros has scale 0 and bytes 0. Each row is rounded on its own, so the bytes of a row do
not depend on the batch. `quantize_reference` is the NumPy definition.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import float32, int64, uint32
from numpy.typing import NDArray

from ds4.cuda.kernels.intrinsics import (
    address,
    cuda,
    device_function,
    div,
    f32_bits,
    fma,
    grid_wait,
    ld_f32x4,
    release_dependents,
    shfl_xor,
)

__all__ = ["launch_quantize", "quantize_kernel", "quantize_reference", "signed_byte"]

_WARPS = 4
_WARP_VALUES = 128
# Adding 1.5 * 2^23 leaves the rounded integer in the low bits of a float's pattern.
_ROUND = np.float32(12582912.0)
_LEVELS = np.float32(127.0)


def quantize_reference(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round rows to bytes: f32[B, K] to (i8[B, K], f32[B, K / 32]). K is a multiple of 32."""
    blocks = x.reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(axis=2)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, _LEVELS / amax, np.float32(0)).astype(np.float32)
    # The kernel fuses product and rounding; a float64 product of two float32 is exact.
    quants = np.rint(blocks.astype(np.float64) * inverse[..., None].astype(np.float64))
    return quants.astype(np.int8).reshape(x.shape), (amax / _LEVELS).astype(np.float32)


@device_function
def signed_byte(value, inverse):
    """The byte of one value, in the low 8 bits of a word."""
    return f32_bits(fma(value, inverse, _ROUND)) & uint32(255)


@functools.cache
def quantize_kernel() -> Any:
    """Kernel (x f32[B, K], quants u32[B K / 4], scales f32[B K / 32], n_values).

    Grid: one warp per 128 values, 4 warps a block; a lane owns 4 values and writes one word; 8
    lanes share a scale. Needs K % 32 == 0. No shared memory. Oracle: `quantize_reference`.
    """

    @cuda.jit
    def quantize(x, quants, scales, n_values):
        release_dependents()
        lane = cuda.threadIdx.x & 31
        warp = int64(cuda.blockIdx.x) * _WARPS + (cuda.threadIdx.x >> 5)
        first = warp * _WARP_VALUES + 4 * lane
        inside = first < n_values
        a = b = c = d = float32(0)
        grid_wait()
        if inside:
            a, b, c, d = ld_f32x4(address(x, first))
        amax = max(max(abs(a), abs(b)), max(abs(c), abs(d)))
        amax = max(amax, shfl_xor(amax, 1))
        amax = max(amax, shfl_xor(amax, 2))
        amax = max(amax, shfl_xor(amax, 4))
        inverse = float32(0)
        if amax > float32(0):
            inverse = div(_LEVELS, amax)
        if inside:
            quants[first >> 2] = (
                signed_byte(a, inverse)
                | (signed_byte(b, inverse) << uint32(8))
                | (signed_byte(c, inverse) << uint32(16))
                | (signed_byte(d, inverse) << uint32(24))
            )
            if lane & 7 == 0:
                scales[first >> 5] = div(amax, _LEVELS)

    return quantize


def launch_quantize(stream: Any, x: Any, quants: Any, scales: Any) -> None:
    """Enqueue the rounding of x f32[B, K] (contiguous, K % 32 == 0) into flat quants and scales."""
    n_values = x.size
    blocks = -(-n_values // (_WARPS * _WARP_VALUES))
    quantize_kernel()[blocks, 32 * _WARPS, stream](x, quants, scales, n_values)
