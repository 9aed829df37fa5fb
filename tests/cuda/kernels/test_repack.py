"""Repacking on the device has the bits of the definition in `ds4.cuda.layout`."""

import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels.repack import launch_repack
from ds4.cuda.layout import layout_of, repack
from ds4.errors import QuantFormatError
from ds4.gguf.constants import QuantType


def poisoned_planes(kind, n_weights):
    return [
        cuda.to_device(np.full(p.row_items(n_weights), 0xBEEF, p.dtype))
        for p in layout_of(kind).planes
    ]


@pytest.mark.parametrize("kind", [QuantType.Q8_0, QuantType.IQ2_XXS, QuantType.Q2_K])
@pytest.mark.parametrize("n_blocks", [1, 3, 21])
def test_device_planes_are_the_definition_s(kind, n_blocks):
    raw = np.random.default_rng(n_blocks).integers(
        0, 256, (1, n_blocks * kind.block_bytes), np.uint8
    )
    planes = poisoned_planes(kind, n_blocks * kind.block_elements)
    launch_repack(0, kind, cuda.to_device(raw.reshape(-1).view(np.uint16)), planes)
    for got, want in zip(planes, repack(raw, kind), strict=True):
        assert np.array_equal(got.copy_to_host(), want)


def test_types_and_sizes_that_do_not_fit_are_refused():
    raw = cuda.to_device(np.zeros(17, np.uint16))
    with pytest.raises(QuantFormatError, match="F16"):
        launch_repack(0, QuantType.F16, raw, [])
    with pytest.raises(QuantFormatError, match="Q8_0 planes"):
        launch_repack(0, QuantType.Q8_0, raw, poisoned_planes(QuantType.Q8_0, 64))
