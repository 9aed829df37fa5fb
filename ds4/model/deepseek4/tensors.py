"""Every tensor of a DeepSeek V4 file: name, shape, role, accepted types.

The table is generated from the shape, so any consistent model can be checked, and it is the one
place that knows the names. Which slice of a tensor a rank keeps is decided elsewhere
(`ds4.partition`); this module only says what the whole file holds and what a token reads of it.

Source: tensor names of llama.cpp's `deepseek4` architecture, as used by antirez/ds4's files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

import attrs
import numpy as np

from ds4.errors import ModelFileError, UnsupportedModelError
from ds4.gguf import GGUFFile, QuantType, TensorInfo
from ds4.model.deepseek4.shape import DeepSeek4Shape

__all__ = [
    "TensorClass",
    "TensorSpec",
    "bytes_by_class",
    "bytes_read_per_token",
    "check_tensors",
    "expected_tensors",
    "load_shape",
]


class TensorClass(StrEnum):
    """What a tensor is for; the rows of the byte accounting."""

    EMBEDDING = "token embedding"
    HEAD = "output head"
    ATTENTION = "attention projections"
    COMPRESSOR = "compressors"
    INDEXER = "indexers"
    HYPER = "hyper-connections"
    ROUTER = "router"
    HASH = "hash tables"
    ROUTED_UP = "routed gate and up"
    ROUTED_DOWN = "routed down"
    SHARED = "shared experts"
    NORM = "norms and sinks"


_MATRIX = frozenset(QuantType) - {QuantType.I32}
_VECTOR = frozenset({QuantType.F32, QuantType.F16, QuantType.BF16})
_INTEGER = frozenset({QuantType.I32})


@attrs.frozen(kw_only=True)
class TensorSpec:
    """What one tensor must look like.

    Attributes:
      name: full name in the file.
      shape: NumPy order; the last axis is contiguous and is the summed one of a matrix.
      role: row of the byte accounting.
      types: accepted quantization types.
      layer: layer index, or -1 for tensors outside the layers.
      optional: may be absent (a missing router bias means zeros).
    """

    name: str
    shape: tuple[int, ...]
    role: TensorClass
    types: frozenset[QuantType] = _MATRIX
    layer: int = -1
    optional: bool = False


def expected_tensors(shape: DeepSeek4Shape) -> dict[str, TensorSpec]:
    """Name to spec of every tensor a model of this shape has, in the order of computation."""
    return {spec.name: spec for spec in _specs(shape)}


def _specs(s: DeepSeek4Shape) -> Iterator[TensorSpec]:
    d, streams = s.d_model, s.n_streams
    hyper = TensorClass.HYPER
    yield TensorSpec(name="token_embd.weight", shape=(s.n_vocab, d), role=TensorClass.EMBEDDING)
    for layer in range(s.n_layers):
        yield from _layer_specs(s, layer)
    yield TensorSpec(name="output_hc_fn.weight", shape=(streams, streams * d), role=hyper)
    for name, n in (("base", streams), ("scale", 1)):
        yield TensorSpec(name=f"output_hc_{name}.weight", shape=(n,), role=hyper, types=_VECTOR)
    yield TensorSpec(name="output_norm.weight", shape=(d,), role=TensorClass.NORM, types=_VECTOR)
    yield TensorSpec(name="output.weight", shape=(s.n_vocab, d), role=TensorClass.HEAD)


def _layer_specs(s: DeepSeek4Shape, layer: int) -> Iterator[TensorSpec]:
    d, hd, f, e = s.d_model, s.head_dim, s.d_expert, s.n_experts
    ratio = s.ratios[layer]
    mix = 2 * s.n_streams + s.n_streams**2

    def spec(
        name: str,
        shape: tuple[int, ...],
        role: TensorClass,
        types: frozenset[QuantType] = _MATRIX,
        *,
        optional: bool = False,
    ) -> TensorSpec:
        return TensorSpec(
            name=f"blk.{layer}.{name}",
            shape=shape,
            role=role,
            types=types,
            layer=layer,
            optional=optional,
        )

    def vector(name: str, n: int, role: TensorClass = TensorClass.NORM) -> TensorSpec:
        return spec(name, (n,), role, _VECTOR)

    for part in ("attn", "ffn"):
        yield spec(f"hc_{part}_fn.weight", (mix, s.n_streams * d), TensorClass.HYPER)
        yield vector(f"hc_{part}_base.weight", mix, TensorClass.HYPER)
        yield vector(f"hc_{part}_scale.weight", 3, TensorClass.HYPER)
    yield vector("attn_norm.weight", d)
    yield spec("attn_q_a.weight", (s.q_rank, d), TensorClass.ATTENTION)
    yield vector("attn_q_a_norm.weight", s.q_rank)
    yield spec("attn_q_b.weight", (s.n_heads * hd, s.q_rank), TensorClass.ATTENTION)
    yield spec("attn_kv.weight", (hd, d), TensorClass.ATTENTION)
    yield vector("attn_kv_a_norm.weight", hd)
    yield vector("attn_sinks.weight", s.n_heads)
    low = s.n_groups * s.group_rank
    yield spec("attn_output_a.weight", (low, s.group_width), TensorClass.ATTENTION)
    yield spec("attn_output_b.weight", (d, low), TensorClass.ATTENTION)
    if ratio:
        yield from _compressor_specs(s, layer, "attn_compressor", hd, TensorClass.COMPRESSOR)
    if ratio == 4:
        width = s.n_index_heads * s.index_dim
        yield spec("indexer.attn_q_b.weight", (width, s.q_rank), TensorClass.INDEXER)
        yield spec("indexer.proj.weight", (s.n_index_heads, d), TensorClass.INDEXER)
        yield from _compressor_specs(
            s, layer, "indexer_compressor", s.index_dim, TensorClass.INDEXER
        )
    yield vector("ffn_norm.weight", d)
    yield spec("ffn_gate_inp.weight", (e, d), TensorClass.ROUTER)
    if layer < s.n_hash_layers:
        yield spec("ffn_gate_tid2eid.weight", (s.n_vocab, s.n_used), TensorClass.HASH, _INTEGER)
    else:
        yield spec("exp_probs_b.bias", (e,), TensorClass.ROUTER, _VECTOR, optional=True)
    yield spec("ffn_gate_exps.weight", (e, f, d), TensorClass.ROUTED_UP)
    yield spec("ffn_up_exps.weight", (e, f, d), TensorClass.ROUTED_UP)
    yield spec("ffn_down_exps.weight", (e, d, f), TensorClass.ROUTED_DOWN)
    yield spec("ffn_gate_shexp.weight", (f, d), TensorClass.SHARED)
    yield spec("ffn_up_shexp.weight", (f, d), TensorClass.SHARED)
    yield spec("ffn_down_shexp.weight", (d, f), TensorClass.SHARED)


def _compressor_specs(
    s: DeepSeek4Shape, layer: int, name: str, width: int, role: TensorClass
) -> Iterator[TensorSpec]:
    ratio = s.ratios[layer]
    halves = (2 if ratio == 4 else 1) * width
    prefix = f"blk.{layer}.{name}"
    for part in ("kv", "gate"):
        yield TensorSpec(
            name=f"{prefix}_{part}.weight", shape=(halves, s.d_model), role=role, layer=layer
        )
    yield TensorSpec(name=f"{prefix}_ape.weight", shape=(ratio, halves), role=role, layer=layer)
    yield TensorSpec(
        name=f"{prefix}_norm.weight",
        shape=(width,),
        role=TensorClass.NORM,
        types=_VECTOR,
        layer=layer,
    )


def load_shape(file: GGUFFile) -> DeepSeek4Shape:
    """Shape of an opened file, after checking its metadata and every tensor of its header.

    Raises:
      UnsupportedModelError, ModelFileError: see `DeepSeek4Shape.from_metadata`, `check_tensors`.
    """
    names = file.tensors
    drafts = ("mtp.", "dspark.")
    if "token_embd.weight" not in names and any(name.startswith(drafts) for name in names):
        raise UnsupportedModelError(
            file.path,
            "tensor token_embd.weight",
            expected="a main model",
            found="a draft (MTP or DSpark) file",
        )
    shape = DeepSeek4Shape.from_metadata(file.path, file.metadata, names)
    check_tensors(file, shape)
    return shape


def check_tensors(file: GGUFFile, shape: DeepSeek4Shape) -> None:
    """Check that every expected tensor is there with its shape, an accepted type and whole blocks.

    Only the header and the small hash tables are read. Tensors that are not expected are ignored.

    Raises:
      ModelFileError: names the tensor, what was expected and what was found.
    """
    for spec in expected_tensors(shape).values():
        info = file.tensors.get(spec.name)
        if info is None:
            if spec.optional:
                continue
            raise ModelFileError(
                file.path,
                f"tensor {spec.name}",
                expected=f"shape {_dims(spec.shape)}",
                found="no such tensor",
            )
        _check_one(file, spec, info)
    for layer in range(shape.n_layers):
        gate, up = (file.tensors[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up"))
        if gate.type is not up.type:
            raise UnsupportedModelError(
                file.path,
                f"tensor {up.name}",
                expected=f"type {gate.type.name}, as {gate.name} has",
                found=up.type.name,
                offset=up.offset,
            )


def _dims(shape: tuple[int, ...]) -> str:
    """A shape in the order the file states it: contiguous axis first."""
    return str(list(reversed(shape)))


def _check_one(file: GGUFFile, spec: TensorSpec, info: TensorInfo) -> None:
    what = f"tensor {spec.name}"
    if info.shape != spec.shape:
        raise ModelFileError(
            file.path,
            what,
            expected=f"dimensions {_dims(spec.shape)}",
            found=_dims(info.shape),
            offset=info.offset,
        )
    if info.type not in spec.types:
        raise ModelFileError(
            file.path,
            what,
            expected="type " + " or ".join(sorted(t.name for t in spec.types)),
            found=info.type.name,
            offset=info.offset,
        )


def check_hash_table(
    path: str, name: str, table: np.ndarray[tuple[int, ...], np.dtype[np.int32]], n_experts: int
) -> None:
    """Check that every id of a hash table, i32[V, K], names an expert, and no row repeats one.

    Raises:
      ModelFileError: names the first bad token.
    """
    bad = (table < 0) | (table >= n_experts)
    if bad.any():
        token, slot = np.argwhere(bad)[0]
        raise ModelFileError(
            path,
            f"tensor {name}, token {token}, slot {slot}",
            expected=f"an expert id from 0 to {n_experts - 1}",
            found=int(table[token, slot]),
        )
    ordered = np.sort(table, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if repeated.any():
        token = int(np.argmax(repeated))
        raise ModelFileError(
            path,
            f"tensor {name}, token {token}",
            expected="distinct experts",
            found=table[token].tolist(),
        )


def bytes_by_class(file: GGUFFile, shape: DeepSeek4Shape) -> Mapping[TensorClass, tuple[int, int]]:
    """(tensors, bytes) in the file of each class."""
    totals = dict.fromkeys(TensorClass, (0, 0))
    for spec in expected_tensors(shape).values():
        info = file.tensors.get(spec.name)
        if info is not None:
            count, total = totals[spec.role]
            totals[spec.role] = (count + 1, total + info.n_bytes)
    return totals


def bytes_read_per_token(file: GGUFFile, shape: DeepSeek4Shape) -> Mapping[TensorClass, int]:
    """Weight bytes one decoded token reads, by class.

    One row of the embedding and of each hash table; K of E routed experts; everything else whole.
    """
    read = dict.fromkeys(TensorClass, 0)
    for spec in expected_tensors(shape).values():
        info = file.tensors.get(spec.name)
        if info is None:
            continue
        if spec.role in (TensorClass.EMBEDDING, TensorClass.HASH):
            read[spec.role] += info.row_bytes
        elif spec.role in (TensorClass.ROUTED_UP, TensorClass.ROUTED_DOWN):
            read[spec.role] += info.n_bytes // shape.n_experts * shape.n_used
        else:
            read[spec.role] += info.n_bytes
    return read
