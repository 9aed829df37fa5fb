"""Activations rounded to bytes by the kernel and by its reference."""

import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels.quantize import launch_quantize, quantize_reference


@pytest.mark.parametrize("shape", [(1, 32), (1, 160), (3, 256)])
def test_the_kernel_rounds_like_the_reference(shape):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(shape).astype(np.float32)
    x[0, :32] = 0.0
    quants = cuda.to_device(np.full(x.size // 4, 0xDEADBEEF, np.uint32))
    scales = cuda.to_device(np.full(x.size // 32, np.nan, np.float32))
    launch_quantize(0, cuda.to_device(x), quants, scales)
    want_quants, want_scales = quantize_reference(x)
    assert np.array_equal(quants.copy_to_host().view(np.int8).reshape(shape), want_quants)
    assert np.array_equal(scales.copy_to_host().reshape(want_scales.shape), want_scales)


def test_ties_round_to_even_and_the_largest_value_is_127():
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = [127.0, 0.5, 1.5, -2.5, -127.0]
    quants, scales = quantize_reference(x)
    assert quants[0, :5].tolist() == [127, 0, 2, -2, -127]
    assert scales[0, 0] == 1.0
