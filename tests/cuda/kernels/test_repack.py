"""Blocks split on the device against the layout's definition, bit for bit."""

import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels.repack import launch_repack
from ds4.cuda.layout import repack
from ds4.gguf.constants import QuantType


@pytest.mark.parametrize("kind", [QuantType.Q8_0, QuantType.IQ2_XXS, QuantType.Q2_K])
def test_any_blocks_come_to_lie_where_the_layout_says(kind):
    rng = np.random.default_rng(kind)
    k = 2 * kind.block_elements
    row_bytes = 2 * kind.block_bytes
    blocks = rng.integers(0, 256, (5, row_bytes), np.uint8)
    want = repack(blocks, kind)
    planes = [cuda.to_device(np.full_like(plane, 0xAAAA)) for plane in want]
    # In two pieces, as a file is read.
    for first, count in ((0, 2), (2, 3)):
        staged = cuda.to_device(blocks[first : first + count].reshape(-1).view(np.uint16).copy())
        launch_repack(0, kind, staged, count * k, first * k, planes)
    for got, plane in zip(planes, want, strict=True):
        assert np.array_equal(got.copy_to_host(), plane)
