"""Writes DeepSeek V4 files of any shape with random weights, for tests of size and robustness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

from ds4.gguf import QuantType
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import TensorClass, TensorSpec, expected_tensors

SMALL = {
    "block_count": 3,
    "embedding_length": 256,
    "vocab_size": 300,
    "context_length": 1024,
    "attention.head_count": 8,
    "attention.head_count_kv": 1,
    "attention.key_length": 128,
    "attention.value_length": 128,
    "rope.dimension_count": 64,
    "attention.q_lora_rank": 64,
    "attention.output_lora_rank": 32,
    "attention.output_group_count": 8,
    "expert_count": 16,
    "expert_used_count": 4,
    "expert_feed_forward_length": 256,
    "expert_shared_count": 1,
    "hash_layer_count": 1,
    "attention.sliding_window": 16,
    "attention.indexer.head_count": 16,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 4,
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": 1e-6,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "expert_gating_func": 4,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "rope.freq_base": 10000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 256,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "attention.compress_rope_freq_base": 160000.0,
    "attention.compress_ratios": [0, 4, 128],
    "swiglu_clamp_exp": [10.0, 10.0, 10.0],
}


def metadata(**changes: object) -> dict[str, object]:
    """Metadata of a small model; a change to None removes the key. `__` stands for a dot."""
    values = {f"deepseek4.{key}": value for key, value in SMALL.items()}
    values["general.architecture"] = "deepseek4"
    for key, value in changes.items():
        name = key.replace("__", ".")
        full = name if name.startswith(("general.", "reap.")) else f"deepseek4.{name}"
        values[full] = value
    return {key: value for key, value in values.items() if value is not None}


def q2_mix(spec: TensorSpec) -> QuantType:
    """The type a tensor has in the 2-bit files."""
    if QuantType.I32 in spec.types:
        return QuantType.I32
    if len(spec.shape) == 1:
        return QuantType.F32
    return {
        TensorClass.ROUTED_UP: QuantType.IQ2_XXS,
        TensorClass.ROUTED_DOWN: QuantType.Q2_K,
        TensorClass.ATTENTION: QuantType.Q8_0,
        TensorClass.SHARED: QuantType.Q8_0,
        TensorClass.HEAD: QuantType.Q8_0,
    }.get(spec.role, QuantType.F16)


def random_bytes(
    spec: TensorSpec, kind: QuantType, rng: np.random.Generator, n_experts: int
) -> np.ndarray:
    """u8 rows of a tensor: random quants under sane scales."""
    n_rows, n_in = int(np.prod(spec.shape[:-1])), spec.shape[-1]
    scale = 1.0 / np.sqrt(n_in)
    if kind is QuantType.I32:
        order = np.argsort(rng.random((n_rows, n_experts)), axis=1)[:, :n_in]
        return order.astype("<i4").view(np.uint8)
    if len(spec.shape) == 1:
        values = 1.0 + 0.1 * rng.standard_normal(n_in)
        return values.astype(np.float32).view(np.uint8).reshape(1, -1)
    if kind in (QuantType.F32, QuantType.F16):
        values = rng.standard_normal((n_rows, n_in), dtype=np.float32) * scale
        return values.astype(np.float32 if kind is QuantType.F32 else np.float16).view(np.uint8)
    blocks = n_in // kind.block_elements
    raw = rng.integers(0, 256, (n_rows * blocks, kind.block_bytes), dtype=np.uint8)

    def half(value: float) -> np.ndarray:
        return np.frombuffer(np.float16(value).tobytes(), np.uint8)

    if kind is QuantType.Q8_0:
        raw[:, :2] = half(scale / 64)
    elif kind is QuantType.IQ2_XXS:
        raw[:, :2] = half(scale / 40)
    elif kind is QuantType.Q2_K:
        raw[:, 80:82] = half(scale / 10)
        raw[:, 82:84] = half(scale / 8)
    else:
        raise AssertionError(kind)
    return raw.reshape(n_rows, -1)


def write_model(
    path: Path,
    values: Mapping[str, object] | None = None,
    *,
    types: Callable[[TensorSpec], QuantType] = q2_mix,
    edit: Callable[[str, tuple[int, ...], QuantType], tuple[str, tuple[int, ...], QuantType] | None]
    | None = None,
    seed: int = 5,
) -> Path:
    """Write a model file.

    Args:
      values: metadata; `metadata()` when None.
      types: quantization type of each tensor.
      edit: may rename, reshape, retype or drop (None) a tensor, to make a wrong file.
      seed: of the weights.
    """
    values = metadata() if values is None else values
    shape = DeepSeek4Shape.from_metadata(str(path), metadata() | dict(values))
    writer = gguf.GGUFWriter(path, "deepseek4")
    for key, value in values.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    rng = np.random.default_rng(seed)
    for spec in expected_tensors(shape).values():
        kind = types(spec)
        entry = (spec.name, spec.shape, kind)
        if edit is not None:
            changed = edit(*entry)
            if changed is None:
                continue
            entry = changed
        name, dims, kind = entry
        made = TensorSpec(name=name, shape=dims, role=spec.role, types=spec.types)
        raw = random_bytes(made, kind, rng, shape.n_experts)
        row = dims[-1] // kind.block_elements * kind.block_bytes
        writer.add_tensor(
            name,
            raw.reshape(*dims[:-1], row),
            raw_dtype=gguf.GGMLQuantizationType(int(kind)),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
