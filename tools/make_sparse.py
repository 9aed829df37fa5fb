"""Write the header of a full-size DeepSeek V4 Flash file in the Q2 mix; its data is a hole.

The file says 80.8 GiB and takes a few megabytes on disk, because every weight is an unwritten zero.
It serves what needs the header of a real file and not its weights: opening times, byte accounting,
plans and refusals. The layout is written by the `gguf` package, not by ds4.

usage: python tools/make_sparse.py OUT.gguf
"""

from __future__ import annotations

import argparse
import itertools
import os
import string
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from ds4.gguf import QuantType
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import TensorClass, TensorSpec, expected_tensors

N_LAYERS = 43
N_VOCAB = 129280
N_MERGES = 127741
RATIOS = [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, N_LAYERS))]

INTEGERS = {
    "block_count": N_LAYERS,
    "embedding_length": 4096,
    "vocab_size": N_VOCAB,
    "context_length": 1048576,
    "attention.head_count": 64,
    "attention.head_count_kv": 1,
    "attention.key_length": 512,
    "attention.value_length": 512,
    "rope.dimension_count": 64,
    "attention.q_lora_rank": 1024,
    "attention.output_lora_rank": 1024,
    "attention.output_group_count": 8,
    "expert_count": 256,
    "expert_used_count": 6,
    "expert_feed_forward_length": 2048,
    "expert_shared_count": 1,
    "expert_gating_func": 4,
    "hash_layer_count": 3,
    "attention.sliding_window": 128,
    "attention.indexer.head_count": 64,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 512,
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 20,
    "rope.scaling.original_context_length": 65536,
}
FLOATS = {
    "rope.freq_base": 10000.0,
    "rope.scaling.factor": 16.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "attention.compress_rope_freq_base": 160000.0,
    "expert_weights_scale": 1.5,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "hyper_connection.epsilon": 1e-6,
}
# The Q2 mix: routed experts in two bits, other matrices as here, vectors in F32.
TYPES = {
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
}
SPECIAL = {
    0: "<｜begin▁of▁sentence｜>",
    1: "<｜end▁of▁sentence｜>",
    2: "<｜▁pad▁｜>",
    128803: "<｜User｜>",
    128804: "<｜Assistant｜>",
    128821: "<think>",
    128822: "</think>",
    128825: "｜DSML｜",
    128828: "<｜latest_reminder｜>",
}


def byte_characters() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = itertools.count(256)
    return [chr(byte if byte in kept else next(moved)) for byte in range(256)]


def merges() -> Iterator[tuple[str, str]]:
    """Pairs to merge, each into a new word whose left part exists already."""
    letters = string.ascii_lowercase
    for length in itertools.count(1):
        for left in itertools.product(letters, repeat=length):
            yield from (("".join(left), right) for right in letters)


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of a vocabulary of the real size."""
    pairs = list(itertools.islice(merges(), N_MERGES))
    words = iter(byte_characters() + [left + right for left, right in pairs])
    tokens = [
        SPECIAL.get(index) or next(words, f"<｜place▁holder▁no▁{index}｜>")
        for index in range(N_VOCAB)
    ]
    types = [3 if "｜" in token or index in SPECIAL else 1 for index, token in enumerate(tokens)]
    return tokens, [f"{left} {right}" for left, right in pairs], types


def tensor_type(spec: TensorSpec) -> QuantType:
    """Type of a tensor in the Q2 mix."""
    return QuantType.F32 if len(spec.shape) == 1 else TYPES[spec.role]


def write(path: Path) -> tuple[int, int]:
    """Write the file; returns the number of tensors and the size in bytes."""
    writer = gguf.GGUFWriter(path, "deepseek4")
    prefix = "deepseek4."
    metadata: dict[str, object] = {"general.architecture": "deepseek4"}
    writer.add_string("general.name", "DeepSeek V4 Flash, header only")
    for name, value in INTEGERS.items():
        writer.add_uint32(prefix + name, value)
        metadata[prefix + name] = value
    for name, number in FLOATS.items():
        writer.add_float32(prefix + name, number)
        metadata[prefix + name] = number
    writer.add_bool(prefix + "expert_weights_norm", True)
    writer.add_string(prefix + "rope.scaling.type", "yarn")
    writer.add_array(prefix + "attention.compress_ratios", RATIOS)
    writer.add_array(prefix + "swiglu_clamp_exp", [10.0] * N_LAYERS)
    metadata[prefix + "expert_weights_norm"] = True
    metadata[prefix + "attention.compress_ratios"] = RATIOS
    metadata[prefix + "swiglu_clamp_exp"] = [10.0] * N_LAYERS

    tokens, pairs, types = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("joyai-llm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(pairs)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)

    data_bytes = 0
    specs = expected_tensors(DeepSeek4Shape.from_metadata(str(path), metadata))
    for spec in specs.values():
        kind = tensor_type(spec)
        n_bytes = int(np.prod(spec.shape)) // kind.block_elements * kind.block_bytes
        writer.add_tensor_info(
            spec.name,
            spec.shape,
            np.dtype(np.float32),
            n_bytes,
            raw_dtype=gguf.GGMLQuantizationType(int(kind)),
        )
        data_bytes += -(-n_bytes // writer.data_alignment) * writer.data_alignment
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header_bytes = path.stat().st_size
    header_bytes += -header_bytes % writer.data_alignment
    os.truncate(path, header_bytes + data_bytes)
    return len(specs), header_bytes + data_bytes


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    path = parser.parse_args().out
    n_tensors, n_bytes = write(path)
    on_disk = path.stat().st_blocks * 512
    print(f"{path}: {n_tensors} tensors, {n_bytes} bytes, {on_disk} on disk")


if __name__ == "__main__":
    main()
