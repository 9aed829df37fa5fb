"""Device layouts of quantized weights: the file's bits in an order that loads in whole words.

Invariant: for every type `unpack(repack(blocks)) == blocks`, so no value changes. A block of a GGUF
file mixes scales and quants at odd offsets (34, 66, 84 bytes); here each kind of field is its own
plane, a flat array whose row r starts at item `r * items_per_row`: a lane reads 16 aligned bytes.
This module knows no device; the loader does the same on one, tested against this.

The planes, for rows of K weights:

| type | plane | dtype | items per row | content |
|---|---|---|---|---|
| F16 | values | u32 | K / 2 | two halves, the earlier one low |
| Q8_0 | quants | u32 | K / 4 | four signed bytes, the earliest lowest |
| | scales | u16 | K / 32 | f16 bits of d |
| IQ2_XXS | indices | u32 | K / 32 | the four codebook indices of a group of 32, unchanged |
| | signs | u32 | K / 32 | bit 4 j + l: element j of octet l is negative |
| | steps | u16 | K / 128 | nibble i: the scale nibble of group i of four |
| | scales | u16 | K / 256 | f16 bits of d |
| Q2_K | quants | u32 | K / 16 | the 64 quant bytes of a block, unchanged |
| | steps | u32 | K / 64 | scale bytes 8 n + 2 j + h of a block, as byte j of word 2 n + h |
| | scales | u32 | K / 256 | f16 bits of d low, of dmin high |

IQ2_XXS grows from 66 to 70 bytes per 256 weights: the sign that ggml leaves to parity is stored, so
that a kernel spends no instruction on it, and signs lie where a byte-permute selector wants them.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import QuantFormatError
from ds4.gguf.constants import QuantType
from ds4.gguf.tables import IQ2_XXS_GRID, IQ2_XXS_SIGNS

__all__ = [
    "IQ2_XXS_LEVELS",
    "LAYOUTS",
    "PackedLayout",
    "Plane",
    "Planes",
    "iq2_xxs_selectors",
    "layout_of",
    "repack",
    "unpack",
]

Planes = tuple[NDArray[Any], ...]
IQ2_XXS_LEVELS: Final = (8, 25, 43)


@attrs.frozen
class Plane:
    """One field of a type: `row_items(K)` items of `dtype` per row, rows back to back.

    Attributes:
      name: what it holds.
      dtype: NumPy name of an unsigned integer type.
      weights_per_item: weights that share one item.
    """

    name: str
    dtype: str
    weights_per_item: int

    def row_items(self, k: int) -> int:
        """Items of one row of k weights."""
        return k // self.weights_per_item

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of k weights."""
        return self.row_items(k) * np.dtype(self.dtype).itemsize


@attrs.frozen
class PackedLayout:
    """The planes of one quant type, in the order in which kernels take them."""

    type: QuantType
    planes: tuple[Plane, ...]

    def n_bytes(self, rows: int, k: int) -> int:
        """Device bytes of a [rows, k] matrix, without alignment between planes."""
        return rows * sum(plane.row_bytes(k) for plane in self.planes)


LAYOUTS: Final[dict[QuantType, PackedLayout]] = {
    layout.type: layout
    for layout in (
        PackedLayout(QuantType.F16, (Plane("values", "uint32", 2),)),
        PackedLayout(QuantType.Q8_0, (Plane("quants", "uint32", 4), Plane("scales", "uint16", 32))),
        PackedLayout(
            QuantType.IQ2_XXS,
            (
                Plane("indices", "uint32", 32),
                Plane("signs", "uint32", 32),
                Plane("steps", "uint16", 128),
                Plane("scales", "uint16", 256),
            ),
        ),
        PackedLayout(
            QuantType.Q2_K,
            (
                Plane("quants", "uint32", 16),
                Plane("steps", "uint32", 64),
                Plane("scales", "uint32", 256),
            ),
        ),
    )
}


def layout_of(kind: QuantType) -> PackedLayout:
    """Layout of a type.

    Raises:
      QuantFormatError: CUDA kernels do not multiply this type.
    """
    if kind not in LAYOUTS:
        names = ", ".join(k.name for k in LAYOUTS)
        raise QuantFormatError("<layout>", "quant type", expected=names, found=kind.name)
    return LAYOUTS[kind]


def repack(blocks: NDArray[np.uint8], kind: QuantType) -> Planes:
    """Split rows of file blocks into planes.

    Args:
      blocks: u8[rows, n_bytes], whole blocks; columns may be any range of whole blocks of a row.
      kind: their type.

    Returns:
      One flat array per plane of `layout_of(kind)`.

    Raises:
      QuantFormatError: the type has no layout, or the bytes are not whole blocks.
    """
    layout_of(kind)
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] % kind.block_bytes:
        raise QuantFormatError(
            "<array>",
            f"{kind.name} rows",
            expected=f"u8[rows, n] with n a multiple of {kind.block_bytes}",
            found=f"{blocks.dtype}{list(blocks.shape)}",
        )
    rows = np.ascontiguousarray(blocks)
    if kind is QuantType.F16:
        if rows.shape[1] % 4:
            raise QuantFormatError(
                "<array>",
                "F16 rows",
                expected="an even number of weights",
                found=rows.shape[1] // 2,
            )
        return (rows.reshape(-1).view("<u4"),)
    return _REPACK[kind](rows.reshape(-1, kind.block_bytes))


def unpack(planes: Planes, rows: int, kind: QuantType) -> NDArray[np.uint8]:
    """Inverse of `repack`: planes back to u8[rows, n_bytes] file blocks."""
    layout_of(kind)
    if kind is QuantType.F16:
        return planes[0].view(np.uint8).reshape(rows, -1)
    return _UNPACK[kind](planes).reshape(rows, -1)


def _flat(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The array's memory as a flat array of another dtype."""
    return np.ascontiguousarray(array).reshape(-1).view(dtype)


def _repack_q8_0(blocks: NDArray[np.uint8]) -> Planes:
    return _flat(blocks[:, 2:], "<u4"), _flat(blocks[:, :2], "<u2")


def _unpack_q8_0(planes: Planes) -> NDArray[np.uint8]:
    quants, scales = planes
    return np.concatenate(
        [scales.view(np.uint8).reshape(-1, 2), quants.view(np.uint8).reshape(-1, 32)], axis=1
    )


def _repack_iq2_xxs(blocks: NDArray[np.uint8]) -> Planes:
    words = _flat(blocks[:, 2:], "<u4").reshape(-1, 8, 2)
    packed = words[:, :, 1]
    signs = np.zeros_like(packed)
    for octet in range(4):
        sign_bytes = IQ2_XXS_SIGNS[(packed >> np.uint32(7 * octet)) & np.uint32(127)]
        for element in range(8):
            bit = (sign_bytes.astype(np.uint32) >> np.uint32(element)) & np.uint32(1)
            signs |= bit << np.uint32(4 * element + octet)
    nibbles = (packed >> np.uint32(28)).astype(np.uint16).reshape(-1, 2, 4)
    shifts = np.arange(0, 16, 4, dtype=np.uint16)
    steps = np.bitwise_or.reduce(nibbles << shifts, axis=2)
    return (
        _flat(words[:, :, 0], "<u4"),
        signs.reshape(-1),
        _flat(steps, "<u2"),
        _flat(blocks[:, :2], "<u2"),
    )


def _unpack_iq2_xxs(planes: Planes) -> NDArray[np.uint8]:
    indices, signs, steps, scales = planes
    shifts = np.arange(0, 16, 4, dtype=np.uint16)
    nibbles = ((steps[:, None] >> shifts) & np.uint16(15)).astype(np.uint32).reshape(-1)
    packed = nibbles << np.uint32(28)
    for octet in range(4):
        for element in range(7):  # the eighth sign is the parity of these
            bit = (signs >> np.uint32(4 * element + octet)) & np.uint32(1)
            packed |= bit << np.uint32(7 * octet + element)
    words = np.stack([indices, packed], axis=1).astype("<u4")
    return np.concatenate(
        [scales.view(np.uint8).reshape(-1, 2), words.view(np.uint8).reshape(-1, 64)], axis=1
    )


def _repack_q2_k(blocks: NDArray[np.uint8]) -> Planes:
    steps = blocks[:, :16].reshape(-1, 2, 4, 2).transpose(0, 1, 3, 2)
    return _flat(blocks[:, 16:80], "<u4"), _flat(steps, "<u4"), _flat(blocks[:, 80:], "<u4")


def _unpack_q2_k(planes: Planes) -> NDArray[np.uint8]:
    quants, steps, scales = planes
    order = steps.view(np.uint8).reshape(-1, 2, 2, 4).transpose(0, 1, 3, 2)
    return np.concatenate(
        [
            np.ascontiguousarray(order).reshape(-1, 16),
            quants.view(np.uint8).reshape(-1, 64),
            scales.view(np.uint8).reshape(-1, 4),
        ],
        axis=1,
    )


_REPACK: Final = {
    QuantType.Q8_0: _repack_q8_0,
    QuantType.IQ2_XXS: _repack_iq2_xxs,
    QuantType.Q2_K: _repack_q2_k,
}
_UNPACK: Final = {
    QuantType.Q8_0: _unpack_q8_0,
    QuantType.IQ2_XXS: _unpack_iq2_xxs,
    QuantType.Q2_K: _unpack_q2_k,
}


def iq2_xxs_selectors() -> NDArray[np.uint32]:
    """The codebook as byte-permute selectors, and what they select from, u32[258].

    Nibble j of word e < 256 is the level (0..2) of element j of vector e. With 4 added to a nibble
    whose element is negative, it picks the element out of the eight bytes of words 256 and 257:
    the three levels and a zero, and their negatives.
    """
    levels = np.searchsorted(np.array(IQ2_XXS_LEVELS), IQ2_XXS_GRID).astype(np.uint32)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    selectors = np.bitwise_or.reduce(levels << shifts, axis=1)
    magnitudes = np.array([*IQ2_XXS_LEVELS, 0], np.int8)
    pair = np.stack([magnitudes, -magnitudes]).view(np.uint32).reshape(2)
    table: NDArray[np.uint32] = np.concatenate([selectors, pair])
    return table
