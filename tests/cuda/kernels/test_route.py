"""The router against the CPU backend's."""

import numpy as np
import pytest
from numba import cuda

from ds4.cpu.kernels import moe
from ds4.cuda.kernels.route import route_kernel

E, K, B = 40, 3, 2


@pytest.mark.parametrize("hashed", [False, True])
def test_experts_and_weights_are_the_cpu_backend_s(hashed):
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((B, E + 1)).astype(np.float32)
    logits[0, 1 + 7] = logits[0, 1 + 30] = 9.0  # a tie: the lower id comes first
    bias = (0.1 * rng.standard_normal(E)).astype(np.float32)
    bias[7] = bias[30] = 0.5
    table = np.stack([rng.permutation(E)[:K] for _ in range(6)]).astype(np.int32)
    tokens = np.array([5, 2], np.int32)
    gate, up = (rng.standard_normal((B, 9)).astype(np.float32) for _ in range(2))
    ids = cuda.to_device(np.full((B, K), -1, np.int32))
    weights, h = (cuda.to_device(np.full((B, n), np.nan, np.float32)) for n in (K, 8))
    route_kernel(E, K, hashed=hashed, biased=not hashed)[(2, B), 256](
        cuda.to_device(logits), 1, cuda.to_device(bias), cuda.to_device(table.ravel()),
        cuda.to_device(tokens), np.float32(1.5), cuda.to_device(gate), 1, cuda.to_device(up), 0, 8,
        np.float32(0.5), ids, weights, h,
    )  # fmt: skip
    want_ids, want_weights = np.empty(B * K, np.int32), np.empty(B * K, np.float32)
    none_f, none_i = np.zeros(0, np.float32), np.zeros(0, np.int32)
    moe.route(
        np.ascontiguousarray(logits[:, 1:]).ravel(), none_f if hashed else bias,
        table.ravel() if hashed else none_i, tokens, B, E, K, np.float32(1.5), want_ids,
        want_weights,
    )  # fmt: skip
    assert ids.copy_to_host().ravel().tolist() == want_ids.tolist()
    assert np.allclose(weights.copy_to_host().ravel(), want_weights, rtol=1e-6, atol=0)
    if not hashed:
        assert ids.copy_to_host()[0, :2].tolist() == [7, 30]
    a = np.minimum(gate[:, 1:].astype(np.float64), 0.5)
    want = a / (1 + np.exp(-a)) * np.clip(up[:, :8], -0.5, 0.5)
    assert np.allclose(h.copy_to_host(), want, rtol=1e-5, atol=1e-7)
