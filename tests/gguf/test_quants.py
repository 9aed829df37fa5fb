"""The NumPy decoders against the `gguf` package, bit for bit."""

import gguf
import numpy as np
import pytest

from ds4.errors import QuantFormatError
from ds4.gguf import IQ2_XXS_GRID, IQ2_XXS_SIGNS, QuantType, dequantize, read_i32
from ds4.gguf.constants import BLOCKS, GGML_TYPE_NAMES

FLOAT_TYPES = [t for t in QuantType if t is not QuantType.I32]
# Where the f16 scales of a block lie.
SCALES = {
    QuantType.Q8_0: [0],
    QuantType.Q2_K: [80, 82],
    QuantType.Q4_K: [0, 2],
    QuantType.IQ2_XXS: [0],
}
# Zeros, ones, smallest and largest subnormal, smallest and largest normal, infinities, a quiet and
# a signaling NaN with payloads.
SPECIAL_F16 = [0x0000, 0x8000, 0x3C00, 0xBC00, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF]
SPECIAL_F16 += [0x7C00, 0xFC00, 0x7E01, 0xFE55, 0x7D01]


def oracle(blocks, kind):
    with np.errstate(all="ignore"):
        return gguf.dequantize(blocks.copy(), gguf.GGMLQuantizationType(int(kind)))


def assert_same_bits(blocks, kind):
    np.testing.assert_array_equal(
        dequantize(blocks, kind).view(np.uint32), oracle(blocks, kind).view(np.uint32)
    )


def test_block_sizes_and_names_are_those_of_ggml():
    known = {int(t): t.name for t in gguf.GGMLQuantizationType}
    assert known == GGML_TYPE_NAMES
    for kind, layout in BLOCKS.items():
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind))]
        assert (layout.n_elements, layout.n_bytes) == size
    assert set(BLOCKS) == set(QuantType)


@pytest.mark.parametrize("kind", FLOAT_TYPES, ids=lambda t: t.name)
def test_random_bytes_decode_to_the_bits_of_the_oracle(kind):
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (50, 3, 4 * kind.block_bytes), dtype=np.uint8)
    values = dequantize(blocks, kind)
    assert values.shape == (50, 3, 4 * kind.block_elements)
    assert values.dtype == np.float32
    assert_same_bits(blocks, kind)


@pytest.mark.parametrize("kind", SCALES, ids=lambda t: t.name)
def test_every_pair_of_special_scales_decodes_to_the_bits_of_the_oracle(kind):
    rng = np.random.default_rng(1000 + int(kind))
    special = np.array(SPECIAL_F16, "<u2")
    first, second = (a.ravel() for a in np.meshgrid(special, special))
    blocks = rng.integers(0, 256, (len(first), kind.block_bytes), dtype=np.uint8)
    for place, scales in zip(SCALES[kind], (first, second), strict=False):
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    assert_same_bits(blocks, kind)


def test_every_16_bit_float_decodes_to_the_bits_of_the_oracle():
    blocks = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    assert_same_bits(blocks, QuantType.F16)
    assert_same_bits(blocks, QuantType.BF16)


def test_every_mxfp4_scale_and_code_decodes_to_the_bits_of_the_oracle():
    blocks = np.empty((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 0x11
    assert_same_bits(blocks, QuantType.MXFP4)
    assert_same_bits(blocks ^ np.r_[np.uint8(0), np.full(16, 0xA5, np.uint8)], QuantType.MXFP4)


def test_every_iq2_xxs_codebook_entry_and_sign_index_is_used_as_the_oracle_uses_it():
    index = np.arange(256, dtype=np.uint32)
    words = np.empty((256, 8, 2), "<u4")
    words[:, :, 0] = (index * 0x01010101)[:, None]
    sign = index & 127
    words[:, :, 1] = (sign | (sign << 7) | (sign << 14) | (sign << 21) | (index << 28))[:, None]
    blocks = np.concatenate(
        [np.full((256, 1), 0x3C00, "<u2").view(np.uint8), words.reshape(256, 16).view(np.uint8)],
        axis=1,
    )
    assert_same_bits(blocks, QuantType.IQ2_XXS)


def test_iq2_xxs_tables_have_the_published_form():
    assert IQ2_XXS_GRID.shape == (256, 8)
    assert IQ2_XXS_GRID.dtype == np.uint8
    assert set(np.unique(IQ2_XXS_GRID)) == {8, 25, 43}
    assert len({bytes(row) for row in IQ2_XXS_GRID}) == 256
    assert IQ2_XXS_SIGNS.tobytes() == gguf.quants.IQ2_XXS.ksigns
    with pytest.raises(ValueError, match="read-only"):
        IQ2_XXS_GRID[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        IQ2_XXS_SIGNS[0] = 1


@pytest.mark.parametrize("kind", [QuantType.Q8_0, QuantType.Q2_K], ids=lambda t: t.name)
def test_strided_rows_decode_like_contiguous_ones(kind):
    rng = np.random.default_rng(5)
    wide = rng.integers(0, 256, (8, 3 * kind.block_bytes), dtype=np.uint8)
    part = wide[::2, kind.block_bytes : 2 * kind.block_bytes]
    np.testing.assert_array_equal(
        dequantize(part, kind).view(np.uint32), dequantize(part.copy(), kind).view(np.uint32)
    )


@pytest.mark.parametrize("kind", list(QuantType), ids=lambda t: t.name)
def test_no_rows_and_no_blocks_decode_to_empty_arrays(kind):
    assert dequantize(np.empty((0, kind.block_bytes), np.uint8), kind).shape == (
        0,
        kind.block_elements,
    )
    assert dequantize(np.empty((3, 0), np.uint8), kind).shape == (3, 0)


def test_decoding_never_aliases_its_input():
    source = np.zeros(8, np.uint8)
    values = dequantize(source, QuantType.F32)
    values[:] = 1.0
    assert not source.any()
    integers = read_i32(source)
    integers[:] = 1
    assert not source.any()


def test_i32_is_read_exactly():
    integers = np.array([[0, 1, -1], [2**31 - 1, -(2**31), 7]], "<i4")
    np.testing.assert_array_equal(read_i32(integers.view(np.uint8)), integers)
    np.testing.assert_array_equal(
        dequantize(integers.view(np.uint8), QuantType.I32), integers.astype(np.float32)
    )


@pytest.mark.parametrize(
    "blocks",
    [np.zeros((2, 35), np.uint8), np.zeros(33, np.uint8), np.zeros((2, 34), np.int8)],
    ids=["one byte more", "one byte less", "not u8"],
)
def test_bytes_that_are_not_whole_blocks_are_refused(blocks):
    with pytest.raises(QuantFormatError, match=r"Q8_0 blocks: expected u8.* multiple of 34, found"):
        dequantize(blocks, QuantType.Q8_0)


def test_a_zero_dimensional_array_is_refused():
    with pytest.raises(QuantFormatError, match="I32 blocks"):
        read_i32(np.array(3, np.uint8))
