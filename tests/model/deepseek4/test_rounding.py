from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ds4.model.deepseek4.rounding import hadamard, round_fp4_hadamard, round_fp8

E4M3 = sorted(
    {m / 512 for m in range(8)}
    | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)} - {480.0}
)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(x: float, codes: list[float]) -> float:
    """Round to the nearest code, ties to the code with the even index."""
    best = min(codes, key=lambda c: (abs(c - abs(x)), codes.index(c) % 2))
    return float(np.copysign(best, x))


def by_hand(x: np.ndarray, codes: list[float], floor: float) -> np.ndarray:
    amax = max(float(np.abs(x).max()), floor)
    scale = 1.0
    while amax / scale > codes[-1]:
        scale *= 2
    while amax / scale <= codes[-1] / 2:
        scale /= 2
    return np.array([scale * nearest(float(v) / scale, codes) for v in x])


blocks = hnp.arrays(np.float32, 64, elements=st.floats(-1e4, 1e4, width=32))


@given(blocks)
def test_fp8_rounds_each_block_of_64_to_the_nearest_code(x):
    found = round_fp8(np.concatenate((x, x[:8])), 8)
    np.testing.assert_array_equal(found[:64], by_hand(x, E4M3, 1e-4).astype(np.float32))
    np.testing.assert_array_equal(found[64:], x[:8])


@given(hnp.arrays(np.float64, 32, elements=st.floats(-1e3, 1e3)))
def test_fp4_rounds_each_block_of_32_of_the_transform(x):
    transformed = hadamard(x)
    expected = by_hand(transformed, E2M1, 6 * 2.0**-126)
    np.testing.assert_array_equal(round_fp4_hadamard(x), expected)


@pytest.mark.parametrize("width", [2, 32, 128])
def test_the_hadamard_transform_is_orthonormal_and_symmetric(width):
    matrix = hadamard(np.eye(width))
    np.testing.assert_allclose(matrix @ matrix, np.eye(width), atol=1e-12)
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(width)] for i in range(width)])
    np.testing.assert_allclose(matrix, signs / np.sqrt(width))


def test_no_rows_is_no_error():
    assert round_fp8(np.empty((0, 192), np.float32), 64).shape == (0, 192)
    assert round_fp4_hadamard(np.empty((0, 128), np.float32)).shape == (0, 128)
