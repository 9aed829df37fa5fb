"""Weights of the CPU backend: views of the mapped file, cut for one rank.

Matrices stay packed in the file's mapping and are decoded inside the kernels; only vectors are
expanded, to float32. A rank touches the rows, columns and experts of its own shards, so the pages
of the rest are never read.
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.gguf import GGUFFile, dequantize
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import check_hash_table
from ds4.partition.shards import N_SHARDS

__all__ = ["Compressor", "LayerWeights", "Matrix", "Weights"]


@attrs.frozen(kw_only=True)
class Matrix:
    """A packed matrix.

    Attributes:
      kind: `QuantType` as int.
      data: u8[*], all rows of the tensor.
      row_bytes: bytes of a row.
      n_out: rows (of one expert, for stacked tensors).
      n_in: columns.
      block_elements, block_bytes: the type's quant block.
    """

    kind: int
    data: NDArray[np.uint8]
    row_bytes: int
    n_out: int
    n_in: int
    block_elements: int
    block_bytes: int


@attrs.frozen(kw_only=True)
class Compressor:
    """Weights of a compressor: the attention's or the indexer's."""

    kv: Matrix
    gate: Matrix
    ape: NDArray[np.float32]
    norm: NDArray[np.float32]
    width: int


@attrs.frozen(kw_only=True)
class LayerWeights:
    """All weights of one layer; see `ds4.model.deepseek4.tensors` for shapes."""

    hc_attn: tuple[Matrix, NDArray[np.float32], NDArray[np.float32]]
    hc_ffn: tuple[Matrix, NDArray[np.float32], NDArray[np.float32]]
    attn_norm: NDArray[np.float32]
    q_a: Matrix
    q_a_norm: NDArray[np.float32]
    q_b: Matrix
    kv: Matrix
    kv_norm: NDArray[np.float32]
    sinks: NDArray[np.float32]
    output_a: Matrix
    output_b: Matrix
    compressor: Compressor | None
    index_q: Matrix | None
    index_proj: Matrix | None
    index_compressor: Compressor | None
    ffn_norm: NDArray[np.float32]
    router: Matrix
    router_bias: NDArray[np.float32]
    hash_table: NDArray[np.int32]
    gate: Matrix
    up: Matrix
    down: Matrix
    shared_gate: Matrix
    shared_up: Matrix
    shared_down: Matrix


def shard_bounds(n: int) -> NDArray[np.int64]:
    """i64[9]: shard v of n units is [bounds[v], bounds[v + 1])."""
    return np.array([v * n // N_SHARDS for v in range(N_SHARDS + 1)], np.int64)


class Weights:
    """All weights of a model as one rank sees them.

    Args:
      file: an opened file, checked against `shape`; kept open by the caller.
      shape: the model's shape.

    Raises:
      ModelFileError: a hash table names no expert.
    """

    def __init__(self, file: GGUFFile, shape: DeepSeek4Shape) -> None:
        self.file = file
        self.shape = shape
        self.embedding = self._matrix("token_embd.weight")
        self.output = self._matrix("output.weight")
        self.output_norm = self._vector("output_norm.weight")
        self.output_hc = (
            self._matrix("output_hc_fn.weight"),
            self._vector("output_hc_scale.weight"),
            self._vector("output_hc_base.weight"),
        )
        self.layers = [self._layer(i) for i in range(shape.n_layers)]

    def _matrix(self, name: str) -> Matrix:
        info = self.file.tensors[name]
        return Matrix(
            kind=int(info.type),
            data=self.file.rows(name).reshape(-1),
            row_bytes=info.row_bytes,
            n_out=info.shape[-2],
            n_in=info.shape[-1],
            block_elements=info.type.block_elements,
            block_bytes=info.type.block_bytes,
        )

    def _vector(self, name: str) -> NDArray[np.float32]:
        info = self.file.tensors[name]
        return dequantize(self.file.rows(name), info.type).reshape(-1).astype(np.float32)

    def _compressor(self, prefix: str, width: int) -> Compressor:
        return Compressor(
            kv=self._matrix(f"{prefix}_kv.weight"),
            gate=self._matrix(f"{prefix}_gate.weight"),
            ape=self._vector(f"{prefix}_ape.weight"),
            norm=self._vector(f"{prefix}_norm.weight"),
            width=width,
        )

    def _layer(self, i: int) -> LayerWeights:
        s = self.shape
        b = f"blk.{i}."
        ratio = s.ratios[i]
        indexed = ratio == 4

        def hyper(part: str) -> tuple[Matrix, NDArray[np.float32], NDArray[np.float32]]:
            return (
                self._matrix(f"{b}hc_{part}_fn.weight"),
                self._vector(f"{b}hc_{part}_scale.weight"),
                self._vector(f"{b}hc_{part}_base.weight"),
            )

        bias = np.zeros(0, np.float32)
        if f"{b}exp_probs_b.bias" in self.file.tensors:
            bias = self._vector(f"{b}exp_probs_b.bias")
        table = np.frombuffer(b"", np.int32)
        if i < s.n_hash_layers:
            name = f"{b}ffn_gate_tid2eid.weight"
            table = self.file.rows(name).reshape(-1).view(np.int32)
            rows = table.reshape(s.n_vocab, s.n_used)
            check_hash_table(self.file.path, name, rows, s.n_experts)
        gate, up = self._matrix(f"{b}ffn_gate_exps.weight"), self._matrix(f"{b}ffn_up_exps.weight")
        return LayerWeights(
            hc_attn=hyper("attn"),
            hc_ffn=hyper("ffn"),
            attn_norm=self._vector(f"{b}attn_norm.weight"),
            q_a=self._matrix(f"{b}attn_q_a.weight"),
            q_a_norm=self._vector(f"{b}attn_q_a_norm.weight"),
            q_b=self._matrix(f"{b}attn_q_b.weight"),
            kv=self._matrix(f"{b}attn_kv.weight"),
            kv_norm=self._vector(f"{b}attn_kv_a_norm.weight"),
            sinks=self._vector(f"{b}attn_sinks.weight"),
            output_a=self._matrix(f"{b}attn_output_a.weight"),
            output_b=self._matrix(f"{b}attn_output_b.weight"),
            compressor=self._compressor(f"{b}attn_compressor", s.head_dim) if ratio else None,
            index_q=self._matrix(f"{b}indexer.attn_q_b.weight") if indexed else None,
            index_proj=self._matrix(f"{b}indexer.proj.weight") if indexed else None,
            index_compressor=(
                self._compressor(f"{b}indexer_compressor", s.index_dim) if indexed else None
            ),
            ffn_norm=self._vector(f"{b}ffn_norm.weight"),
            router=self._matrix(f"{b}ffn_gate_inp.weight"),
            router_bias=bias,
            hash_table=table,
            gate=gate,
            up=up,
            down=self._matrix(f"{b}ffn_down_exps.weight"),
            shared_gate=self._matrix(f"{b}ffn_gate_shexp.weight"),
            shared_up=self._matrix(f"{b}ffn_up_shexp.weight"),
            shared_down=self._matrix(f"{b}ffn_down_shexp.weight"),
        )
