"""Quant blocks as they lie in a file, split into planes on the device. See `ds4.cuda.layout`.

A block is an odd number of 16-bit words, so the staged bytes are read as u16. A thread makes one
item of the plane of quants and, where it is the first of its block, the block's other items.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import int64, uint16, uint32

from ds4.cuda.kernels.intrinsics import cuda, device_function
from ds4.gguf.constants import QuantType

__all__ = ["ITEM_WEIGHTS", "launch_repack", "repack_kernel"]

ITEM_WEIGHTS = {QuantType.Q8_0: 4, QuantType.IQ2_XXS: 32, QuantType.Q2_K: 16}
"""Weights per thread."""

_THREADS = 256


@device_function
def _word(blocks, at):
    """Two neighbouring u16 as one u32."""
    return uint32(blocks[at]) | (uint32(blocks[at + 1]) << uint32(16))


@device_function
def _byte(blocks, at, index):
    """Byte `index` after u16 number `at`."""
    return (uint32(blocks[at + (index >> 1)]) >> uint32(8 * (index & 1))) & uint32(255)


def _q8_0() -> Any:
    @cuda.jit
    def q8_0(blocks, n_items, first, quants, scales):
        """Words of 34-byte blocks: d, 32 signed bytes."""
        i = int64(cuda.blockIdx.x) * _THREADS + cuda.threadIdx.x
        if i < n_items:
            block = i // 8
            quants[first + i] = _word(blocks, block * 17 + 1 + 2 * (i % 8))
            if i % 8 == 0:
                scales[first // 8 + block] = blocks[block * 17]

    return q8_0


def _iq2_xxs() -> Any:
    @cuda.jit
    def iq2_xxs(blocks, n_items, first, indices, signs, steps, scales):
        """Groups of 66-byte blocks: d, then 8 groups of four indices, four 7-bit signs, a scale."""
        i = int64(cuda.blockIdx.x) * _THREADS + cuda.threadIdx.x
        if i < n_items:
            block, group = i // 8, i % 8
            at = block * 33 + 1 + 4 * group
            indices[first + i] = _word(blocks, at)
            packed = _word(blocks, at + 2)
            spread = uint32(0)
            for octet in range(4):
                parity = uint32(0)
                for element in range(7):
                    bit = (packed >> uint32(7 * octet + element)) & uint32(1)
                    parity ^= bit
                    spread |= bit << uint32(4 * element + octet)
                spread |= parity << uint32(28 + octet)
            signs[first + i] = spread
            if group % 4 == 0:
                nibbles = uint32(0)
                for g in range(4):
                    step = uint32(blocks[at + 4 * g + 3]) >> uint32(12)
                    nibbles |= step << uint32(4 * g)
                steps[(first + i) // 4] = uint16(nibbles)
            if group == 0:
                scales[(first + i) // 8] = blocks[block * 33]

    return iq2_xxs


def _q2_k() -> Any:
    @cuda.jit
    def q2_k(blocks, n_items, first, quants, steps, scales):
        """Words of 84-byte blocks: 16 scale bytes, 64 bytes of 2-bit quants, d, dmin."""
        i = int64(cuda.blockIdx.x) * _THREADS + cuda.threadIdx.x
        if i < n_items:
            block, word = i // 16, i % 16
            start = block * 42
            quants[first + i] = _word(blocks, start + 8 + 2 * word)
            if word < 4:
                half, side = word // 2, word % 2
                packed = uint32(0)
                for j in range(4):
                    step = _byte(blocks, start, 8 * half + 2 * j + side)
                    packed |= step << uint32(8 * j)
                steps[(first // 16 + block) * 4 + word] = packed
            if word == 0:
                scales[first // 16 + block] = _word(blocks, start + 40)

    return q2_k


@functools.cache
def repack_kernel(kind: QuantType) -> Any:
    """Kernel (blocks u16[*], n_items, first, *planes of `layout_of(kind)`).

    Splits whole blocks into planes. n_items: items of the first plane, `weights / ITEM_WEIGHTS`;
    first: where they start in it, a multiple of a block's items.
    Grid: ceil(n_items / 256) blocks of 256 threads. Oracle: `ds4.cuda.layout.repack`, bit for bit.
    """
    makers = {QuantType.Q8_0: _q8_0, QuantType.IQ2_XXS: _iq2_xxs, QuantType.Q2_K: _q2_k}
    return makers[kind]()


def launch_repack(
    stream: Any, kind: QuantType, blocks: Any, n_weights: int, first_weight: int, planes: Any
) -> None:
    """Enqueue the split of staged blocks that hold n_weights weights, from weight first_weight on.

    Args:
      stream: a stream.
      kind: Q8_0, IQ2_XXS or Q2_K.
      blocks: u16 view of the staged bytes.
      n_weights: whole blocks of them.
      first_weight: index of the first in the planes; a multiple of the block size.
      planes: flat device arrays.
    """
    per_item = ITEM_WEIGHTS[kind]
    n_items = n_weights // per_item
    grid = -(-n_items // _THREADS)
    repack_kernel(kind)[grid, _THREADS, stream](blocks, n_items, first_weight // per_item, *planes)
