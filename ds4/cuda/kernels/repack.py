"""File blocks to planes on the device: `layout.repack` at the speed of the memory.

The invariant: the planes have the bits of `layout.repack`, which is the definition. Raw blocks are
read as 16-bit words, since block sizes (34, 66, 84 bytes) are even and nothing better.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from numba import int64, uint16, uint32

from ds4.cuda.kernels.intrinsics import cuda, device_function, grid_wait, release_dependents
from ds4.cuda.layout import layout_of
from ds4.errors import QuantFormatError
from ds4.gguf.constants import QuantType

__all__ = ["launch_repack"]

_THREADS = 128
# Weights that one thread repacks.
_PIECE = {QuantType.Q8_0: 32, QuantType.IQ2_XXS: 32, QuantType.Q2_K: 64}


@device_function
def _word(raw, at):
    """Two 16-bit words as one of 32 bits."""
    return uint32(uint32(raw[at]) | (uint32(raw[at + 1]) << uint32(16)))


@functools.cache
def _q8_0_kernel() -> Any:
    """Kernel (raw u16[17 n], quants u32[8 n], scales u16[n], n): one thread a block of 32."""

    @cuda.jit
    def q8_0(raw, quants, scales, n):
        release_dependents()
        block = int64(cuda.blockIdx.x) * _THREADS + cuda.threadIdx.x
        grid_wait()
        if block < n:
            scales[block] = raw[17 * block]
            for i in range(8):
                quants[8 * block + i] = _word(raw, 17 * block + 1 + 2 * i)

    return q8_0


@functools.cache
def _iq2_xxs_kernel() -> Any:
    """Kernel (raw u16[33 n / 8], indices and signs u32[n], steps u16[n / 4], scales u16[n / 8], n).

    One thread a group of 32; the first of four writes their steps, the first of eight the scale.
    """

    @cuda.jit
    def iq2_xxs(raw, indices, signs, steps, scales, n):
        release_dependents()
        group = int64(cuda.blockIdx.x) * _THREADS + cuda.threadIdx.x
        grid_wait()
        if group < n:
            base = 33 * (group >> 3)
            at = base + 1 + 4 * (group & 7)
            indices[group] = _word(raw, at)
            packed = _word(raw, at + 2)
            spread = uint32(0)
            for octet in range(4):
                seven = uint32((packed >> uint32(7 * octet)) & uint32(127))
                byte = uint32(seven | ((cuda.popc(seven) & 1) << 7))
                for element in range(8):
                    bit = (byte >> uint32(element)) & uint32(1)
                    spread = uint32(spread | (bit << uint32(4 * element + octet)))
            signs[group] = spread
            if group & 3 == 0:
                nibbles = uint32(0)
                for i in range(4):
                    nibble = _word(raw, at + 4 * i + 2) >> uint32(28)
                    nibbles = uint32(nibbles | (nibble << uint32(4 * i)))
                steps[group >> 2] = uint16(nibbles)
            if group & 7 == 0:
                scales[group >> 3] = raw[base]

    return iq2_xxs


@functools.cache
def _q2_k_kernel() -> Any:
    """Kernel (raw u16[42 n / 4], quants u32[4 n], steps u32[n], scales u32[n / 4], n).

    One thread a piece of 64 weights; the first of four writes the scales.
    """

    @cuda.jit
    def q2_k(raw, quants, steps, scales, n):
        release_dependents()
        piece = int64(cuda.blockIdx.x) * _THREADS + cuda.threadIdx.x
        grid_wait()
        if piece < n:
            base = 42 * (piece >> 2)
            part = piece & 3
            for i in range(4):
                quants[4 * piece + i] = _word(raw, base + 8 + 8 * part + 2 * i)
            # Piece 2 n + h has scale bytes 8 n + 2 j + h: byte h of 16-bit words 4 n + j.
            word = uint32(0)
            for j in range(4):
                pair = uint32(raw[base + 4 * (part >> 1) + j])
                byte = (pair >> uint32(8 * (part & 1))) & uint32(255)
                word = uint32(word | (byte << uint32(8 * j)))
            steps[piece] = word
            if part == 0:
                scales[piece >> 2] = _word(raw, base + 40)

    return q2_k


def launch_repack(stream: Any, kind: QuantType, raw: Any, planes: Sequence[Any]) -> None:
    """Enqueue the repacking of whole blocks into planes.

    Args:
      stream: Numba stream.
      kind: Q8_0, IQ2_XXS or Q2_K; F16 blocks are their own plane.
      raw: u16, flat, the blocks as they are in the file.
      planes: flat device arrays of `layout_of(kind)`, of exactly the right sizes.

    Raises:
      QuantFormatError: the type has no repacking, or sizes do not agree.
    """
    if kind not in _PIECE:
        raise QuantFormatError("<repack>", "quant type", expected="a block type", found=kind.name)
    n_weights = raw.size * 2 // kind.block_bytes * kind.block_elements
    sizes = [p.row_items(n_weights) for p in layout_of(kind).planes]
    if raw.size * 2 % kind.block_bytes or [p.size for p in planes] != sizes:
        raise QuantFormatError(
            "<repack>", f"{kind.name} planes", expected=sizes, found=[p.size for p in planes]
        )
    kernel = {
        QuantType.Q8_0: _q8_0_kernel,
        QuantType.IQ2_XXS: _iq2_xxs_kernel,
        QuantType.Q2_K: _q2_k_kernel,
    }[kind]()
    n = n_weights // _PIECE[kind]
    kernel[-(-n // _THREADS), _THREADS, stream](raw, *planes, n)
