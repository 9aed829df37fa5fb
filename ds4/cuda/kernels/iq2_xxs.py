"""One warp's share of an IQ2_XXS row: codebook vectors to signed bytes or floats, and their dot.

The invariant: the bytes that come out of a selector are the decoder's magnitudes with its signs,
for every index and sign word (`tests/cuda/test_layout.py` proves the identity on the planes).

A codebook entry is a byte-permute selector: nibble j picks the level of element j out of eight
bytes, the three levels and their negatives; the sign bits of the octet are or-ed in at bit 2 of
each nibble. So 8 weights cost one shared load, three `prmt`, two shifts and one logic operation,
instead of a 64-bit lookup, a parity and two byte-wise negations. With 32 copies of the table each
lane reads its own bank: a lookup never conflicts.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, int32, int64, uint32

from ds4.cuda.kernels.intrinsics import (
    address,
    bit_and,
    device_function,
    dp4a,
    f16_to_f32,
    fma,
    i8_to_f32,
    ld_table,
    ld_u16_stream,
    ld_u32x4_stream,
    merge_bits,
    prmt,
    shl,
    shr,
    u32_to_i32,
)

__all__ = ["PIECE_WEIGHTS", "PIECE_WORDS", "iq2_xxs_piece"]

PIECE_WEIGHTS = 128
# Registers of one loaded piece: four index words, four sign words, steps, scale.
PIECE_WORDS = 10

_SIGN_BITS = 0x44444444
_EIGHTH = 0.125


@functools.cache
def iq2_xxs_piece(k: int, *, exact: bool) -> tuple[Any, Any]:
    """Device functions (load, dot) of a lane's piece of 128 weights of a row of k.

    The codebook is u32[256 * copies], entry e for lane l at copies e + l % copies: 32
    copies when fast, 16 when exact, where x takes the room; `table` is the shared address of the
    lane's copy of entry 0. `plus` and `minus` are words 256 and 257 of the selectors: as values
    from memory they stay in registers, as constants the compiler makes them anew for every use.

    load(indices, signs, steps, scales, row, piece, w, at): ten registers into w[at : at + 10].
    dot(w, at, xw, xs, x, x_at, table, plus, minus, acc) -> acc plus the piece's products: fast
    with the 32 words xw and the 4 scales xs, exact with the 128 floats of shared x from x_at.
    """
    copies = 16 if exact else 32
    stride = 4 * copies

    @device_function
    def selector_of(index_word, sign_word, octet, table):
        """Selector of octet 0..3 of a group, signs included."""
        if octet == 0:
            byte, signs = prmt(index_word, uint32(0), uint32(0x4440)), shl(sign_word, uint32(2))
        elif octet == 1:
            byte, signs = prmt(index_word, uint32(0), uint32(0x4441)), shl(sign_word, uint32(1))
        elif octet == 2:
            byte, signs = prmt(index_word, uint32(0), uint32(0x4442)), sign_word
        else:
            byte, signs = prmt(index_word, uint32(0), uint32(0x4443)), shr(sign_word, uint32(1))
        return merge_bits(ld_table(table, byte, uint32(stride)), signs, uint32(_SIGN_BITS))

    @device_function
    def load(indices, signs, steps, scales, row, piece, w, at):
        group = int64(row) * (k // 32) + 4 * piece
        i0, i1, i2, i3 = ld_u32x4_stream(address(indices, group))
        s0, s1, s2, s3 = ld_u32x4_stream(address(signs, group))
        w[at], w[at + 1], w[at + 2], w[at + 3] = i0, i1, i2, i3
        w[at + 4], w[at + 5], w[at + 6], w[at + 7] = s0, s1, s2, s3
        w[at + 8] = ld_u16_stream(address(steps, int64(row) * (k // 128) + piece))
        w[at + 9] = ld_u16_stream(address(scales, int64(row) * (k // 256) + (piece >> 1)))

    @device_function
    def octet_dot(index_word, sign_word, octet, xw, first, table, plus, minus, total):
        selector = selector_of(index_word, sign_word, octet, table)
        low = prmt(plus, minus, selector)
        high = prmt(plus, minus, shr(selector, uint32(16)))
        return dp4a(high, xw[first + 1], dp4a(low, xw[first], total))

    @device_function
    def octet_chain(index_word, sign_word, octet, x, first, table, plus, minus, total):
        selector = selector_of(index_word, sign_word, octet, table)
        low = prmt(plus, minus, selector)
        high = prmt(plus, minus, shr(selector, uint32(16)))
        for j in range(4):
            total = fma(i8_to_f32(low, int32(j)), x[first + j], total)
        for j in range(4):
            total = fma(i8_to_f32(high, int32(j)), x[first + 4 + j], total)
        return total

    @device_function
    def dot(w, at, xw, xs, x, x_at, table, plus, minus, acc):
        scale = f16_to_f32(w[at + 9]) * float32(_EIGHTH)
        for g in range(4):
            step = u32_to_i32(bit_and(shr(w[at + 8], uint32(4 * g)), uint32(15)))
            step = int32(step * int32(2) + int32(1))
            index_word, sign_word = w[at + g], w[at + 4 + g]
            if exact:
                first = x_at + 32 * g
                chain = float32(0)
                chain = octet_chain(index_word, sign_word, 0, x, first, table, plus, minus, chain)
                chain = octet_chain(
                    index_word, sign_word, 1, x, first + 8, table, plus, minus, chain
                )
                chain = octet_chain(
                    index_word, sign_word, 2, x, first + 16, table, plus, minus, chain
                )
                chain = octet_chain(
                    index_word, sign_word, 3, x, first + 24, table, plus, minus, chain
                )
                acc = fma(chain, scale * float32(step), acc)
            else:
                total = int32(0)
                total = octet_dot(index_word, sign_word, 0, xw, 8 * g, table, plus, minus, total)
                total = octet_dot(
                    index_word, sign_word, 1, xw, 8 * g + 2, table, plus, minus, total
                )
                total = octet_dot(
                    index_word, sign_word, 2, xw, 8 * g + 4, table, plus, minus, total
                )
                total = octet_dot(
                    index_word, sign_word, 3, xw, 8 * g + 6, table, plus, minus, total
                )
                # At most 32 * 43 * 127 * 31 < 2^23: exact in float32.
                acc = fma(float32(int32(total * step)), scale * xs[g], acc)
        return acc

    return load, dot
