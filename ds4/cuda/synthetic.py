"""A full-size model of random weights, made on the device: for speed and memory measurements.

Shapes and types are those of the published DeepSeek V4 Flash files (Q2 mix); the values are random
with sane scales, so every kernel does the work it does for a real model and every number stays
finite. No file is read and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.cuda.kernels.random_fill import fill_kernel
from ds4.cuda.source import Piece, Uploader
from ds4.errors import ConfigError
from ds4.gguf import QuantType
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import TensorClass, expected_tensors

__all__ = ["SYNTHETIC_MODELS", "SyntheticSource", "flash_shape"]

SYNTHETIC_MODELS = ("deepseek4-flash",)
_L = 43
_SCALE_BITS = {
    # f16 patterns of the block scales that keep rows near unit size.
    QuantType.Q8_0: int(np.float16(0.0003).view(np.uint16)),
    QuantType.IQ2_XXS: int(np.float16(0.0005).view(np.uint16)),
}
_Q2_K_SCALES = int(np.float16(0.002).view(np.uint16)) | (
    int(np.float16(0.003).view(np.uint16)) << 16
)


def flash_shape(n_layers: int = _L) -> DeepSeek4Shape:
    """Shape of DeepSeek V4 Flash, or of its first `n_layers` layers."""
    p = "deepseek4."
    ratios = [0, 0, *(4 if i % 2 == 0 else 128 for i in range(2, _L))]
    metadata: dict[str, object] = {
        "general.architecture": "deepseek4",
        f"{p}block_count": n_layers,
        f"{p}embedding_length": 4096,
        f"{p}vocab_size": 129280,
        f"{p}context_length": 1048576,
        f"{p}attention.head_count": 64,
        f"{p}attention.head_count_kv": 1,
        f"{p}attention.key_length": 512,
        f"{p}attention.value_length": 512,
        f"{p}rope.dimension_count": 64,
        f"{p}attention.q_lora_rank": 1024,
        f"{p}attention.output_lora_rank": 1024,
        f"{p}attention.output_group_count": 8,
        f"{p}expert_count": 256,
        f"{p}expert_used_count": 6,
        f"{p}expert_feed_forward_length": 2048,
        f"{p}expert_shared_count": 1,
        f"{p}hash_layer_count": min(3, n_layers),
        f"{p}attention.sliding_window": 128,
        f"{p}attention.indexer.head_count": 64,
        f"{p}attention.indexer.key_length": 128,
        f"{p}attention.indexer.top_k": 512,
        f"{p}hyper_connection.count": 4,
        f"{p}hyper_connection.sinkhorn_iterations": 20,
        f"{p}hyper_connection.epsilon": 1e-6,
        f"{p}attention.layer_norm_rms_epsilon": 1e-6,
        f"{p}attention.compress_ratios": ratios,
        f"{p}swiglu_clamp_exp": [10.0] * _L,
        f"{p}rope.freq_base": 10000.0,
        f"{p}rope.scaling.factor": 16.0,
        f"{p}rope.scaling.yarn_beta_fast": 32.0,
        f"{p}rope.scaling.yarn_beta_slow": 1.0,
        f"{p}rope.scaling.original_context_length": 65536,
        f"{p}rope.scaling.type": "yarn",
        f"{p}attention.compress_rope_freq_base": 160000.0,
        f"{p}expert_weights_scale": 1.5,
        f"{p}expert_weights_norm": True,
        f"{p}expert_gating_func": 4,
    }
    return DeepSeek4Shape.from_metadata("<synthetic>", metadata)


def _types(shape: DeepSeek4Shape) -> dict[str, QuantType]:
    """Tensor types of the published Q2 mix."""
    by_role = {
        TensorClass.EMBEDDING: QuantType.F16,
        TensorClass.HEAD: QuantType.Q8_0,
        TensorClass.ATTENTION: QuantType.Q8_0,
        TensorClass.COMPRESSOR: QuantType.F16,
        TensorClass.INDEXER: QuantType.F16,
        TensorClass.HYPER: QuantType.F16,
        TensorClass.ROUTER: QuantType.F16,
        TensorClass.HASH: QuantType.I32,
        TensorClass.ROUTED_UP: QuantType.IQ2_XXS,
        TensorClass.ROUTED_DOWN: QuantType.Q2_K,
        TensorClass.SHARED: QuantType.Q8_0,
        TensorClass.NORM: QuantType.F32,
    }
    return {
        spec.name: QuantType.F32 if len(spec.shape) == 1 else by_role[spec.role]
        for spec in expected_tensors(shape).values()
    }


class SyntheticSource:
    """Random weights of a published shape; implements `WeightSource`.

    Args:
      model: one of `SYNTHETIC_MODELS`.
      seed: of the values.
      n_layers: leading layers only, for quick runs; None means all.

    Raises:
      ConfigError: no such model.
    """

    def __init__(self, model: str, *, seed: int = 7, n_layers: int | None = None) -> None:
        if model not in SYNTHETIC_MODELS:
            raise ConfigError(
                f"synthetic model must be one of {', '.join(SYNTHETIC_MODELS)}, got {model!r}"
            )
        self.shape = flash_shape(n_layers or _L)
        self._types = _types(self.shape)
        self._specs = expected_tensors(self.shape)
        self._rng = np.random.default_rng(seed)
        self._seed = seed

    def kind(self, name: str) -> QuantType | None:
        """See `WeightSource.kind`."""
        return self._types.get(name)

    def fill(
        self, storage: QuantType, pieces: Sequence[Piece], planes: Sequence[Any], up: Uploader
    ) -> None:
        """See `WeightSource.fill`; the values depend on the order of the calls, not on names."""
        for index, plane in enumerate(planes):
            n = int(plane.shape[0])
            mode, value = "random", 0
            if storage is QuantType.F16:
                mode = "halves"
            elif storage is QuantType.Q2_K and index == len(planes) - 1:
                mode, value = "constant", _Q2_K_SCALES
            elif storage in _SCALE_BITS and index == len(planes) - 1:
                mode, value = "constant", _SCALE_BITS[storage]
            self._seed = (self._seed * 1664525 + 1013904223) % 2**32
            kernel = fill_kernel(mode)
            blocks = max(1, min(2048, -(-n // 1024)))
            kernel[blocks, 256, up.device.stream](
                plane, np.int64(n), np.uint32(self._seed), np.uint32(value)
            )
        up.device.guard("synthetic weights", planes)

    def vector(self, name: str) -> NDArray[np.float32]:
        """See `WeightSource.vector`: norms are ones, biases small, sinks and ape random."""
        spec = self._specs[name]
        n = int(np.prod(spec.shape))
        if name.endswith("norm.weight"):
            return np.ones(n, np.float32)
        spread = 0.1 if spec.role is TensorClass.ROUTER else 0.5
        return self._rng.normal(0.0, spread, n).astype(np.float32)

    def hash_table(self, name: str) -> NDArray[np.int32]:
        """See `WeightSource.hash_table`: distinct experts for every token."""
        s = self.shape
        first = self._rng.integers(0, s.n_experts, s.n_vocab)
        # An odd stride visits distinct experts, as their number is a power of two.
        ids = (first[:, None] + 37 * np.arange(s.n_used)) % s.n_experts
        return ids.astype(np.int32).reshape(-1)
