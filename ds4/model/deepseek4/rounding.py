"""Activation rounding that the vendor's graph applies and that float engines leave out.

`none` keeps activations in float32. `vendor` rounds key-value rows through FP8 (E4M3, blocks of 64
of the unrotated part) and indexer queries and rows through a Hadamard transform and FP4 (E2M1,
blocks of 32), each with a power-of-two scale. Both apply after the rotary embedding.

Source: section "rounding simulated on activations" of the model's published inference code.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rounding", "round_fp4_hadamard", "round_fp8"]

_FP8_BLOCK = 64
_FP4_BLOCK = 32
_FP8_MAX = 448.0
_FP4_MAX = 6.0

Float = TypeVar("Float", np.float32, np.float64)


class Rounding(StrEnum):
    """The `--activation-rounding` switch."""

    NONE = "none"
    VENDOR = "vendor"


def _power_of_two_scale(amax: NDArray[Float], top: float) -> NDArray[np.float64]:
    """2 ** ceil(log2(amax / top)), exactly: frexp gives m in [0.5, 1) with amax / top = m * 2^e."""
    mantissa, exponent = np.frexp(amax.astype(np.float64) / top)
    scale: NDArray[np.float64] = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    return scale


def _nearest_even(
    x: NDArray[np.float64], mantissa_bits: int, min_exponent: int
) -> NDArray[np.float64]:
    """Round to a float with `mantissa_bits` stored bits; ties to the even code."""
    _, exponent = np.frexp(x)
    step = np.ldexp(1.0, np.maximum(exponent - 1, min_exponent) - mantissa_bits)
    rounded: NDArray[np.float64] = np.rint(x / step) * step
    return rounded


def _rounded_blocks(
    x: NDArray[Float], block: int, top: float, floor: float, mantissa: int, min_exponent: int
) -> NDArray[Float]:
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block).astype(np.float64)
    amax = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), floor)
    scale = _power_of_two_scale(amax, top)
    codes = _nearest_even(np.clip(blocks / scale, -top, top), mantissa, min_exponent)
    return (codes * scale).reshape(x.shape).astype(x.dtype)


def round_fp8(x: NDArray[Float], n_dims: int) -> NDArray[Float]:
    """FP8 E4M3 on x[..., : W - n_dims] in blocks of 64; the rotated tail of n_dims stays.

    A last block shorter than 64 is rounded as a block of its own.
    """
    out = x.copy()
    plain = x.shape[-1] - n_dims
    for start in range(0, plain, _FP8_BLOCK):
        stop = min(start + _FP8_BLOCK, plain)
        part = np.ascontiguousarray(x[..., start:stop])
        out[..., start:stop] = _rounded_blocks(part, stop - start, _FP8_MAX, 1e-4, 3, -6)
    return out


def hadamard(x: NDArray[Float]) -> NDArray[Float]:
    """Orthonormal Walsh-Hadamard transform of the last axis (Sylvester order, a power of two)."""
    width = x.shape[-1]
    y = x.copy()
    step = 1
    while step < width:
        pairs = y.reshape(*x.shape[:-1], width // (2 * step), 2, step)
        y = np.stack(
            (pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), axis=-2
        ).reshape(x.shape)
        step *= 2
    return y * x.dtype.type(width**-0.5)


def round_fp4_hadamard(x: NDArray[Float]) -> NDArray[Float]:
    """Hadamard transform of the last axis, then FP4 E2M1 in blocks of 32."""
    return _rounded_blocks(hadamard(x), _FP4_BLOCK, _FP4_MAX, _FP4_MAX * 2.0**-126, 1, 0)
