"""Eight weights of a row as four words of two halves: how a quant type enters a tensor-core tile.

The invariant: a value is the decoder's, scaled by `SCALE_BITS` and rounded to half precision at
most twice. Scaling by a power of two keeps small products out of the subnormal halves; the tile's
epilogue takes it back exactly. What this module does not know: tiles, shared memory, threads.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, int64, uint32

from ds4.cuda.kernels.intrinsics import (
    address,
    bit_and,
    device_function,
    f16_to_f32,
    fma_f16x2,
    ld_table,
    ld_u16_stream,
    ld_u32_stream,
    ld_u32x2,
    ld_u32x4_stream,
    merge_bits,
    mul_f16x2,
    pack_f16x2,
    prmt,
    shl,
    shr,
    sub_f16x2,
    u32_to_i32,
)
from ds4.cuda.layout import IQ2_XXS_LEVELS
from ds4.gguf.constants import QuantType

__all__ = ["N_REGISTERS", "SCALE_BITS", "eight_weights"]

# Registers that hold eight fetched weights until they are converted.
N_REGISTERS = 4
# log2 of the factor on the weights of a tile.
SCALE_BITS = {QuantType.F16: 0, QuantType.Q8_0: 0, QuantType.IQ2_XXS: 9, QuantType.Q2_K: 6}

_A, _B, _C = IQ2_XXS_LEVELS
_LEVELS = _A | _B << 8 | _C << 16
_NEGATIVES = (256 - _A) | (256 - _B) << 8 | (256 - _C) << 16
_HALF_1152 = 0x64806480
_HALF_1024 = 0x64006400
_BYTES_TO_BIASED = 0x80808080


@device_function
def _signed_pair(biased, selector):
    """Two signed bytes (biased by 128) as halves, exactly: 1024 + byte + 128 - 1152."""
    return sub_f16x2(prmt(biased, uint32(_HALF_1024), selector), uint32(_HALF_1152))


@functools.cache
def eight_weights(kind: QuantType, k: int) -> tuple[Any, Any]:
    """Device functions (fetch, convert) for weights 8 c to 8 c + 7 of block kb of 32 of a row of k.

    fetch(p0, p1, p2, p3, row, kb, c) -> four words; p0 to p3 are the type's planes, missing ones
    repeat the first. convert(r0, r1, r2, r3, kb, c, table) -> four words of halves, in order; table
    is the shared address of the IQ2_XXS selectors, unused by other types.
    """
    makers = {
        QuantType.F16: _f16,
        QuantType.Q8_0: _q8_0,
        QuantType.IQ2_XXS: _iq2_xxs,
        QuantType.Q2_K: _q2_k,
    }
    fetch, convert = makers[kind](k)
    return fetch, convert


def _f16(k: int) -> tuple[Any, Any]:
    @device_function
    def fetch(p0, p1, p2, p3, row, kb, c):
        return ld_u32x4_stream(address(p0, int64(row) * (k // 2) + 16 * kb + 4 * c))

    @device_function
    def convert(r0, r1, r2, r3, kb, c, table):
        return r0, r1, r2, r3

    return fetch, convert


@device_function
def _eight_bytes(low, high, scale):
    """Eight signed bytes times a half pair."""
    low = uint32(low ^ uint32(_BYTES_TO_BIASED))
    high = uint32(high ^ uint32(_BYTES_TO_BIASED))
    a = mul_f16x2(_signed_pair(low, uint32(0x5150)), scale)
    b = mul_f16x2(_signed_pair(low, uint32(0x5352)), scale)
    c = mul_f16x2(_signed_pair(high, uint32(0x5150)), scale)
    d = mul_f16x2(_signed_pair(high, uint32(0x5352)), scale)
    return a, b, c, d


def _q8_0(k: int) -> tuple[Any, Any]:
    @device_function
    def fetch(p0, p1, p2, p3, row, kb, c):
        low, high = ld_u32x2(address(p0, int64(row) * (k // 4) + 8 * kb + 2 * c))
        scale = ld_u16_stream(address(p1, int64(row) * (k // 32) + kb))
        return low, high, scale, uint32(0)

    @device_function
    def convert(r0, r1, r2, r3, kb, c, table):
        return _eight_bytes(r0, r1, prmt(r2, r2, uint32(0x1010)))

    return fetch, convert


def _iq2_xxs(k: int) -> tuple[Any, Any]:
    factor = float(2 ** (SCALE_BITS[QuantType.IQ2_XXS] - 3))

    @device_function
    def fetch(p0, p1, p2, p3, row, kb, c):
        group = int64(row) * (k // 32) + kb
        steps = ld_u16_stream(address(p2, group >> 2))
        scale = ld_u16_stream(address(p3, group >> 3))
        return (
            ld_u32_stream(address(p0, group)),
            ld_u32_stream(address(p1, group)),
            shr(steps, uint32(4 * (kb & 3))),
            scale,
        )

    @device_function
    def convert(r0, r1, r2, r3, kb, c, table):
        entry = ld_table(table, prmt(r0, uint32(0), uint32(0x4440 + c)), uint32(4))
        signs = shl(bit_and(shr(r1, uint32(c)), uint32(0x11111111)), uint32(2))
        selector = merge_bits(entry, signs, uint32(0x44444444))
        low = prmt(uint32(_LEVELS), uint32(_NEGATIVES), selector)
        high = prmt(uint32(_LEVELS), uint32(_NEGATIVES), shr(selector, uint32(16)))
        step = float32(u32_to_i32(bit_and(r2, uint32(15)))) * float32(2) + float32(1)
        scale = f16_to_f32(r3) * float32(factor) * step
        return _eight_bytes(low, high, pack_f16x2(scale, scale))

    return fetch, convert


def _q2_k(k: int) -> tuple[Any, Any]:
    factor = float(2 ** SCALE_BITS[QuantType.Q2_K])

    @device_function
    def fetch(p0, p1, p2, p3, row, kb, c):
        half, block = (kb >> 2) & 1, kb >> 3
        low, high = ld_u32x2(address(p0, int64(row) * (k // 16) + 16 * block + 8 * half + 2 * c))
        steps = ld_u32_stream(address(p1, int64(row) * (k // 64) + 4 * block + 2 * half + (c >> 1)))
        return low, high, steps, ld_u32_stream(address(p2, int64(row) * (k // 256) + block))

    @device_function
    def pair(word, selector, scale, minimum):
        """Two of the four 2-bit quants (one per byte) times a scale, less a minimum."""
        q = sub_f16x2(prmt(word, uint32(_HALF_1024), selector), uint32(_HALF_1024))
        return fma_f16x2(q, scale, minimum)

    @device_function
    def convert(r0, r1, r2, r3, kb, c, table):
        part = uint32(kb & 3)
        low = bit_and(shr(r0, uint32(part * uint32(2))), uint32(0x03030303))
        high = bit_and(shr(r1, uint32(part * uint32(2))), uint32(0x03030303))
        step = bit_and(shr(r2, uint32(part * uint32(8))), uint32(255))
        d = f16_to_f32(r3) * float32(factor)
        d_min = f16_to_f32(shr(r3, uint32(16))) * float32(factor)
        scale = d * float32(u32_to_i32(bit_and(step, uint32(15))))
        minimum = -(d_min * float32(u32_to_i32(shr(step, uint32(4)))))
        scales, minima = pack_f16x2(scale, scale), pack_f16x2(minimum, minimum)
        w0 = pair(low, uint32(0x5150), scales, minima)
        w1 = pair(low, uint32(0x5352), scales, minima)
        w2 = pair(high, uint32(0x5150), scales, minima)
        w3 = pair(high, uint32(0x5352), scales, minima)
        return w0, w1, w2, w3

    return fetch, convert
