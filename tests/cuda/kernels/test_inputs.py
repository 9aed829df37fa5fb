"""Angles and embedding rows."""

import numpy as np
from numba import cuda

from ds4.cuda.kernels.inputs import N_ANGLES, angles_kernel, embed_kernel


def test_angles_are_those_of_the_position_and_of_the_starts_of_its_windows():
    half, positions = 3, np.array([0, 7, 300], np.int32)
    frequencies = np.array([[1.0, 0.1, 0.01], [1.0, 0.05, 0.002]])
    cosines = cuda.to_device(np.full((3, N_ANGLES, half), np.nan, np.float32))
    sines = cuda.to_device(np.full((3, N_ANGLES, half), np.nan, np.float32))
    angles_kernel(half)[3, 32](
        cuda.to_device(positions), cuda.to_device(frequencies), cosines, sines
    )
    t = positions.astype(np.float64)[:, None, None]
    at = np.concatenate([t, t, t // 4 * 4, t // 128 * 128], axis=1)
    want = at * frequencies[[0, 1, 1, 1]]
    # Device and host libraries may differ in the last bit of a float64 cosine.
    assert np.abs(cosines.copy_to_host() - np.cos(want)).max() < 1e-7
    assert np.abs(sines.copy_to_host() - np.sin(want)).max() < 1e-7


def test_every_stream_gets_the_row_of_its_token_in_either_storage():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((5, 6)).astype(np.float16)
    tokens = cuda.to_device(np.array([3, 0], np.int32))
    for halves in (True, False):
        stored = table.view(np.uint32).reshape(-1) if halves else table.astype(np.float32).ravel()
        x = cuda.to_device(np.full((2, 24), np.nan, np.float32))
        embed_kernel(6, 4, halves=halves)[(1, 2), 128](cuda.to_device(stored), tokens, x)
        want = np.tile(table[[3, 0]].astype(np.float32), (1, 4))
        assert np.array_equal(x.copy_to_host(), want)
