"""Random weights and the float64 products that kernels are compared with."""

import numpy as np
from numba import cuda

from ds4.cuda.kernels.quant_matmul import Activations, DeviceMatrix
from ds4.cuda.kernels.quantize import quantize_reference
from ds4.cuda.layout import repack
from ds4.gguf.constants import QuantType
from ds4.gguf.quants import dequantize

# Float32 accumulation in another order than the reference's.
EXACT_TOLERANCE = 2e-6


def random_blocks(rng, rows, k, kind):
    """u8[rows, n] of legal blocks whose values are near one."""
    n = k // kind.block_elements
    blocks = rng.integers(0, 256, (rows, n, kind.block_bytes), np.uint8)

    def halves(low, high):
        values = rng.uniform(low, high, (rows, n)).astype("<f2")
        return values[..., None].view(np.uint8)

    if kind is QuantType.F16:
        return rng.standard_normal((rows, k)).astype("<f2").view(np.uint8)
    if kind is QuantType.Q2_K:
        blocks[..., 80:82] = halves(0.02, 0.1)
        blocks[..., 82:84] = halves(0.02, 0.1)
    else:
        blocks[..., :2] = halves(0.002, 0.02)
    return blocks.reshape(rows, -1)


def device_matrix(blocks, kind):
    k = blocks.shape[1] // kind.block_bytes * kind.block_elements
    planes = tuple(cuda.to_device(p) for p in repack(blocks, kind))
    return DeviceMatrix(kind, len(blocks), k, planes)


def activations(x):
    """Device activations of x, and the values that fast kernels see: rounded to bytes."""
    quants, scales = quantize_reference(x)
    rounded = (quants.reshape(len(x), -1, 32) * scales[..., None]).reshape(x.shape)
    device = Activations(
        cuda.to_device(x),
        cuda.to_device(np.ascontiguousarray(quants).view(np.uint32).reshape(-1)),
        cuda.to_device(scales.reshape(-1)),
    )
    return device, rounded


def product(blocks, kind, x):
    """x @ dequantize(blocks).T in float64."""
    return x.astype(np.float64) @ dequantize(blocks, kind).astype(np.float64).T


def error(got, want):
    """Relative 2-norm of the difference; infinite where anything is not finite."""
    if not np.isfinite(got).all():
        return np.inf
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def poisoned(*shape):
    return cuda.to_device(np.full(shape, np.nan, np.float32))
