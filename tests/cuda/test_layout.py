"""Device layouts keep every bit of a weight file and mean the same values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.cuda.layout import (
    IQ2_XXS_LEVELS,
    LAYOUTS,
    iq2_xxs_selectors,
    layout_of,
    repack,
    unpack,
)
from ds4.errors import QuantFormatError
from ds4.gguf.constants import QuantType
from ds4.gguf.quants import dequantize
from ds4.gguf.tables import IQ2_XXS_GRID

KINDS = sorted(LAYOUTS)


@st.composite
def matrices(draw):
    kind = draw(st.sampled_from(KINDS))
    rows = draw(st.integers(1, 3))
    blocks = draw(st.integers(1, 3)) * (2 if kind is QuantType.F16 else 1)
    data = draw(
        st.binary(
            min_size=rows * blocks * kind.block_bytes, max_size=rows * blocks * kind.block_bytes
        )
    )
    return kind, np.frombuffer(data, np.uint8).reshape(rows, -1)


@given(matrices())
def test_any_bytes_come_back_from_the_planes(matrix):
    kind, blocks = matrix
    planes = repack(blocks, kind)
    assert np.array_equal(unpack(planes, len(blocks), kind), blocks)


@given(matrices())
def test_planes_have_the_documented_sizes(matrix):
    kind, blocks = matrix
    rows = len(blocks)
    k = blocks.shape[1] // kind.block_bytes * kind.block_elements
    layout = layout_of(kind)
    planes = repack(blocks, kind)
    assert [p.dtype.name for p in planes] == [p.dtype for p in layout.planes]
    assert [p.size for p in planes] == [rows * p.row_items(k) for p in layout.planes]
    assert sum(p.nbytes for p in planes) == layout.n_bytes(rows, k)


@given(matrices(), st.data())
def test_a_row_range_of_the_planes_is_the_planes_of_the_row_range(matrix, data):
    kind, blocks = matrix
    first = data.draw(st.integers(0, len(blocks) - 1))
    k = blocks.shape[1] // kind.block_bytes * kind.block_elements
    whole, part = repack(blocks, kind), repack(blocks[first:], kind)
    for plane, a, b in zip(layout_of(kind).planes, whole, part, strict=True):
        assert np.array_equal(a[first * plane.row_items(k) :], b)


def test_iq2_xxs_selectors_and_sign_words_give_the_decoder_s_values():
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (7, 66), np.uint8)
    blocks[:, :2] = np.array([1.0], "<f2").view(np.uint8)
    indices, signs, steps, _ = repack(blocks, QuantType.IQ2_XXS)
    selectors = iq2_xxs_selectors()
    table = selectors[256:].view(np.int8).astype(np.float32)
    want = dequantize(blocks, QuantType.IQ2_XXS).reshape(-1, 32)
    for group in range(len(want)):
        nibble = int(steps[group // 4]) >> 4 * (group % 4) & 15
        for octet in range(4):
            entry = int(selectors[int(indices[group]) >> 8 * octet & 255])
            entry |= (int(signs[group]) << 2 >> octet) & 0x44444444
            got = [table[entry >> 4 * j & 15] for j in range(8)]
            scale = np.float32((0.5 + nibble) * 0.25)
            assert np.array_equal(scale * np.array(got), want[group, 8 * octet : 8 * octet + 8])


def test_the_selectors_restate_the_codebook():
    table = np.array(IQ2_XXS_LEVELS)
    nibbles = iq2_xxs_selectors()[:256, None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(
        15
    )
    assert np.array_equal(table[nibbles], IQ2_XXS_GRID)


@pytest.mark.parametrize("kind", [QuantType.Q4_K, QuantType.MXFP4, QuantType.I32])
def test_a_type_without_kernels_is_refused_by_name(kind):
    with pytest.raises(QuantFormatError, match=kind.name):
        layout_of(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_partial_blocks_are_refused(kind):
    with pytest.raises(QuantFormatError, match=kind.name):
        repack(np.zeros((2, kind.block_bytes + 1), np.uint8), kind)


def test_an_odd_number_of_halves_is_refused():
    with pytest.raises(QuantFormatError, match="even number"):
        repack(np.zeros((2, 6), np.uint8), QuantType.F16)
