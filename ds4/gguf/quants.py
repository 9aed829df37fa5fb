"""NumPy decoders of the quant types: the definition of a weight's value.

Invariant: `dequantize` gives the bits that ggml's own decoder gives, for any bytes, including
scales that are infinite, subnormal or NaN. Every kernel is tested against it; speed is not its aim.

Numerics: all arithmetic in float32, in the order written; the order is part of the definition.
Source: the block formats of ggml (`ggml-quants.c`), as restated in each decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.errors import QuantFormatError
from ds4.gguf.constants import QuantType
from ds4.gguf.tables import IQ2_XXS_GRID, IQ2_XXS_SIGNS, MXFP4_VALUES

__all__ = ["IQ2_XXS_GRID", "IQ2_XXS_SIGNS", "MXFP4_VALUES", "dequantize", "read_i32"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def dequantize(blocks: Bytes, type: QuantType) -> Floats:  # noqa: A002 - the field's word for it
    """Expand quant blocks to float32.

    Args:
      blocks: u8[..., n_bytes], whole blocks along the last axis; any leading axes.
      type: how they are stored; `I32` gives the integers rounded to float32.

    Returns:
      f32[..., n_bytes / block_bytes * block_elements], a new array.

    Raises:
      QuantFormatError: the last axis is not whole blocks, or the array is not bytes.
    """
    rows = _whole_blocks(blocks, type)
    with np.errstate(all="ignore"):  # infinite and NaN scales are legal, and have one right answer
        values = _DECODERS[type](rows.reshape(-1, type.block_bytes))
    n_elements = blocks.shape[-1] // type.block_bytes * type.block_elements
    return values.reshape(*blocks.shape[:-1], n_elements)


def read_i32(blocks: Bytes) -> NDArray[np.int32]:
    """Integers of an `I32` tensor: u8[..., 4 n] to i32[..., n], a new array.

    Raises:
      QuantFormatError: the last axis is not a multiple of four bytes.
    """
    return _whole_blocks(blocks, QuantType.I32).view("<i4").astype(np.int32)


def _whole_blocks(blocks: Bytes, kind: QuantType) -> Bytes:
    if blocks.dtype != np.uint8 or blocks.ndim == 0 or blocks.shape[-1] % kind.block_bytes:
        raise QuantFormatError(
            "<array>",
            f"{kind.name} blocks",
            expected=f"u8[..., n] with n a multiple of {kind.block_bytes}",
            found=f"{blocks.dtype}{list(blocks.shape)}",
        )
    return np.ascontiguousarray(blocks)


def _f16(two_bytes: Bytes) -> Floats:
    """u8[N, 2] to f32[N, 1], exactly."""
    return np.ascontiguousarray(two_bytes).view("<f2").astype(np.float32)


def _f32_values(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16_values(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16_values(blocks: Bytes) -> Floats:
    # The upper half of a float32.
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _i32_values(blocks: Bytes) -> Floats:
    return blocks.view("<i4").astype(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    """34 bytes, 32 weights: f16 d at 0, i8 q[32] at 2; x = q d."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _f16(blocks[:, :2])


def _q2_k(blocks: Bytes) -> Floats:
    """84 bytes, 256 weights: u8 scales[16] at 0, u8 qs[64] at 16, f16 d at 80, f16 dmin at 82.

    Element 128 h + 32 j + l (h < 2, j < 4, l < 32) has q = bits 2j and 2j+1 of qs[32 h + l] and
    the scale byte s = scales[8 h + 2 j + (l >= 16)]; x = d (s & 15) q - dmin (s >> 4).
    """
    n = len(blocks)
    scales = blocks[:, :16]
    scale = (_f16(blocks[:, 80:82]) * (scales & 15).astype(np.float32)).reshape(n, 16, 1)
    minimum = (_f16(blocks[:, 82:84]) * (scales >> 4).astype(np.float32)).reshape(n, 16, 1)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    q = (blocks[:, 16:80].reshape(n, 2, 1, 32) >> shifts) & np.uint8(3)
    return scale * q.reshape(n, 16, 16).astype(np.float32) - minimum


def _q4_k(blocks: Bytes) -> Floats:
    """144 bytes, 256 weights: f16 d at 0, f16 dmin at 2, u8 s[12] at 4, u8 qs[128] at 16.

    Sub-block j of 32 weights has a 6-bit scale and minimum. For j < 4 they are the low six bits of
    s[j] and s[j+4]; for the others s[j+4] holds both low nibbles, and the top two bits of s[j-4]
    and s[j] complete them. Element 32 j + l is a nibble of qs[32 (j // 2) + l], the low one for
    even j; x = d scale q - dmin minimum.
    """
    n = len(blocks)
    first, second, nibbles = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (nibbles & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (nibbles >> 4) | ((second >> 6) << 4)], axis=1)
    scale = (_f16(blocks[:, 0:2]) * scales.astype(np.float32)).reshape(n, 8, 1)
    minimum = (_f16(blocks[:, 2:4]) * minima.astype(np.float32)).reshape(n, 8, 1)
    shifts = np.array([0, 4], np.uint8)[:, None]
    q = (blocks[:, 16:].reshape(n, 4, 1, 32) >> shifts) & np.uint8(15)
    return scale * q.reshape(n, 8, 32).astype(np.float32) - minimum


def _iq2_xxs(blocks: Bytes) -> Floats:
    """66 bytes, 256 weights: f16 d at 0, then 8 groups of two u32 (a, b) at 2.

    Group k: the bytes of a are four codebook indices; bits 7l to 7l+6 of b pick the sign byte of
    vector l; bits 28 to 31 of b are a scale s. Element 32 k + 8 l + j is
    d (0.5 + s) 0.25 grid[a_l][j], negative where bit j of the sign byte is set.
    """
    n = len(blocks)
    words = np.ascontiguousarray(blocks[:, 2:]).view("<u4").reshape(n, 8, 2)
    indices = np.ascontiguousarray(blocks[:, 2:]).reshape(n, 8, 8)[:, :, :4]
    packed = words[:, :, 1]
    step = np.float32(0.5) + (packed >> 28).astype(np.float32)
    scale = (_f16(blocks[:, :2]) * step * np.float32(0.25)).reshape(n, 8, 1, 1)
    shifts = np.arange(0, 28, 7, dtype=np.uint32)
    sign_bytes = IQ2_XXS_SIGNS[(packed[:, :, None] >> shifts) & np.uint32(127)]
    negative = (sign_bytes[..., None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
    signs = np.where(negative, np.float32(-1), np.float32(1))
    weights: Floats = scale * IQ2_XXS_GRID[indices].astype(np.float32) * signs
    return weights


def _mxfp4(blocks: Bytes) -> Floats:
    """17 bytes, 32 weights: u8 e at 0, u8 qs[16] at 1.

    The low nibble of qs[i] is element i, the high one element 16 + i; x = 2^(e-127) times the
    4-bit float. The table holds doubled values, so the scale is 2^(e-128), subnormal for e < 2;
    e = 255 is a number here, as in ggml, and not the NaN of the OCP standard.
    """
    n = len(blocks)
    exponent = blocks[:, :1].astype(np.uint32)
    subnormal = np.uint32(1 << 21) << np.minimum(exponent, 1)
    normal = (np.maximum(exponent, 1) - 1) << 23
    half_scale = np.where(exponent < 2, subnormal, normal).astype(np.uint32).view(np.float32)
    shifts = np.array([0, 4], np.uint8)[:, None]
    codes = (blocks[:, None, 1:] >> shifts) & np.uint8(15)
    weights: Floats = half_scale * MXFP4_VALUES[codes.reshape(n, 32)].astype(np.float32)
    return weights


_DECODERS: Final[dict[QuantType, Callable[[Bytes], Floats]]] = {
    QuantType.F32: _f32_values,
    QuantType.F16: _f16_values,
    QuantType.BF16: _bf16_values,
    QuantType.I32: _i32_values,
    QuantType.Q8_0: _q8_0,
    QuantType.Q2_K: _q2_k,
    QuantType.Q4_K: _q4_k,
    QuantType.IQ2_XXS: _iq2_xxs,
    QuantType.MXFP4: _mxfp4,
}
