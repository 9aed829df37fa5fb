"""A rank's weights on its device: which part of which tensor, in which storage, and where.

Matrices that read the same input are stacked by rows, so that one launch multiplies them all. A
rank uploads only its own shards (`ds4.partition.ownership`). Types that have a packed kernel keep
their bits; any other is expanded to float32 exactly, which only small models can afford: the memory
plan says so before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.cpu.weights import shard_bounds
from ds4.cuda.kernels.quant_matmul import DeviceMatrix
from ds4.cuda.layout import iq2_xxs_selectors
from ds4.cuda.memory import Arena, MemoryLayout
from ds4.cuda.source import Piece, Uploader, WeightSource, plane_layout
from ds4.errors import ConfigError, ModelFileError
from ds4.gguf import QuantType
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.partition.ownership import Ownership

__all__ = ["DeviceLayer", "DeviceWeights", "Experts", "Hyper", "Pool", "Stack"]

Q8_0, F16, F32 = QuantType.Q8_0, QuantType.F16, QuantType.F32
_DENSE = (Q8_0, F16)


@attrs.frozen
class Stack:
    """Matrices that read the same input, stacked by rows per storage type.

    Attributes:
      matrices: storage to stacked matrix.
      places: name to (storage, first row of the stack): the column of its outputs.
    """

    matrices: Mapping[QuantType, DeviceMatrix]
    places: Mapping[str, tuple[QuantType, int]]


@attrs.frozen
class Hyper:
    """Hyper-connection of a sublayer: projection (F16 or F32), gains, biases."""

    fn: DeviceMatrix
    scale: Any
    base: Any


@attrs.frozen
class Pool:
    """A compressor's position bias (flat f32) and row norm."""

    ape: Any
    norm: Any


@attrs.frozen(kw_only=True)
class Experts:
    """Routed experts of this rank and the shared expert's down projection.

    Attributes:
      gate, up, down: matrices of all local experts, rows back to back in order of `local`.
      local: i32[E], place of an expert here, or -1.
      shard_of: i32[E], canonical shard of every expert.
      shared_down: [D, lanes] with this rank's columns.
      lane_bounds: i32[n_shards + 1] on the device: columns of each of this rank's shards.
      total_lanes: columns of the whole matrix.
      is_packed: whether the packed expert kernels multiply this layer, shared expert included; else
        all are F32 and the shared gate and up belong to the layer's `ffn_in`.
      shared_gate, shared_up: [lanes, D], of a packed layer.
    """

    gate: DeviceMatrix
    up: DeviceMatrix
    down: DeviceMatrix
    local: Any
    shard_of: Any
    shared_down: DeviceMatrix
    lane_bounds: Any
    total_lanes: int
    is_packed: bool
    shared_gate: DeviceMatrix | None
    shared_up: DeviceMatrix | None


@attrs.frozen(kw_only=True)
class DeviceLayer:
    """All weights of one layer that this rank keeps."""

    hc_attn: Hyper
    hc_ffn: Hyper
    attn_norm: Any
    into: Stack
    q_norm: Any
    kv_norm: Any
    up: Stack
    sinks: Any
    output_a: DeviceMatrix
    output_b: DeviceMatrix
    low_bounds: Any
    pool: Pool | None
    index_pool: Pool | None
    ffn_norm: Any
    ffn_in: Stack
    router_bias: Any
    is_biased: bool
    hash_table: Any
    is_hashed: bool
    experts: Experts


class DeviceWeights:
    """Plans, and with an arena also loads, the weights of one rank.

    Args:
      source: where they come from.
      own: this rank's shards.
      layout: gets every reservation.
      arena: made from an equal layout, or None to plan only; then every array is None.
      uploader: needed with an arena.

    Raises:
      ConfigError: gate and up of a layer differ in type, or the model has a size that the CUDA
        kernels do not take.
      ModelFileError: a hash table names no expert.
    """

    def __init__(
        self,
        source: WeightSource,
        own: Ownership,
        layout: MemoryLayout,
        arena: Arena | None = None,
        uploader: Uploader | None = None,
    ) -> None:
        self.source = source
        self.shape = s = source.shape
        self.own = own
        self._layout, self._arena, self._up = layout, arena, uploader
        _check_shape(s)
        groups = shard_bounds(s.n_groups)
        self.groups = (int(groups[own.attention[0]]), int(groups[own.attention[1]]))
        per_group = s.n_heads // s.n_groups
        self.heads = (self.groups[0] * per_group, self.groups[1] * per_group)
        rows = shard_bounds(s.n_vocab)
        self.vocab_rows = (int(rows[own.vocabulary[0]]), int(rows[own.vocabulary[1]]))
        name = "token_embd.weight"
        self.embedding = self._matrix(
            self._storage(name, (F16,), s.d_model), [self._whole(name, s.n_vocab, s.d_model)]
        )
        codebook = iq2_xxs_selectors()
        self.selectors = self._array("codebook", codebook.size, np.uint32, lambda: codebook)
        self.layers = [self._layer(i) for i in range(s.n_layers)]
        self.output_hc = self._hyper("output_hc", s.n_streams, 1)
        self.output_norm = self._vector("output_norm.weight", s.d_model)
        first, last = self.vocab_rows
        piece = Piece(
            tensor="output.weight", first=first, count=last - first, columns=(0, s.d_model)
        )
        self.output = self._stack({"logits": piece})

    # -- pieces ------------------------------------------------------------------------------

    def _whole(self, name: str, rows: int, k: int) -> Piece:
        return Piece(tensor=name, first=0, count=rows, columns=(0, k))

    def _storage(self, name: str, packed: Sequence[QuantType], k: int) -> QuantType:
        kind = self.source.kind(name)
        # The packed F16 kernels read whole vectors of eight halves.
        if kind is None or kind not in packed or (kind is F16 and k % 8):
            return F32
        return kind

    def _array(self, name: str, shape: int, dtype: Any, make: Callable[[], NDArray[Any]]) -> Any:
        place = self._layout.reserve("weights", name, shape, dtype)
        if self._arena is None or self._up is None:
            return None
        array = self._arena.view(place)
        if shape:
            values = make()
            if values.size != shape:
                raise ModelFileError(
                    "<weights>", f"tensor {name}", expected=f"{shape} elements", found=values.size
                )
            self._up.put(array, values.astype(dtype, copy=False))
        return array

    def _vector(self, name: str, n: int) -> Any:
        return self._array(name, n, np.float32, lambda: self.source.vector(name))

    def _integers(self, name: str, values: NDArray[Any]) -> Any:
        return self._array(name, values.size, np.int32, lambda: values)

    def _matrix(self, storage: QuantType, pieces: Sequence[Piece]) -> DeviceMatrix:
        rows, k = sum(piece.count for piece in pieces), pieces[0].n_columns
        name = pieces[0].tensor
        places = [
            self._layout.reserve("weights", f"{name} plane {i}", rows * (k // per_item), dtype)
            for i, (dtype, per_item) in enumerate(plane_layout(storage))
        ]
        if self._arena is None or self._up is None:
            return DeviceMatrix(storage, rows, k, ())
        planes = tuple(self._arena.view(place) for place in places)
        if rows:
            self.source.fill(storage, pieces, planes, self._up)
        return DeviceMatrix(storage, rows, k, planes)

    def _stack(self, pieces: Mapping[str, Piece]) -> Stack:
        by_storage: dict[QuantType, list[Piece]] = {}
        places: dict[str, tuple[QuantType, int]] = {}
        for name, piece in pieces.items():
            storage = self._storage(piece.tensor, _DENSE, piece.n_columns)
            group = by_storage.setdefault(storage, [])
            places[name] = (storage, sum(p.count for p in group))
            group.append(piece)
        matrices = {storage: self._matrix(storage, group) for storage, group in by_storage.items()}
        return Stack(matrices, places)

    def _hyper(self, prefix: str, n_mix: int, n_gains: int) -> Hyper:
        width = self.shape.n_streams * self.shape.d_model
        name = f"{prefix}_fn.weight"
        return Hyper(
            self._matrix(self._storage(name, (F16,), width), [self._whole(name, n_mix, width)]),
            self._vector(f"{prefix}_scale.weight", n_gains),
            self._vector(f"{prefix}_base.weight", n_mix),
        )

    # -- layers ------------------------------------------------------------------------------

    def _layer(self, i: int) -> DeviceLayer:
        s, b = self.shape, f"blk.{i}."
        ratio = s.ratios[i]
        n_mix = 2 * s.n_streams + s.n_streams**2
        hc = [self._hyper(f"{b}hc_{part}", n_mix, 3) for part in ("attn", "ffn")]
        c = 2 if ratio == 4 else 1
        into = {
            "q_a": self._whole(f"{b}attn_q_a.weight", s.q_rank, s.d_model),
            "kv": self._whole(f"{b}attn_kv.weight", s.head_dim, s.d_model),
        }
        h0, h1 = self.heads
        up = {
            "q_b": Piece(
                tensor=f"{b}attn_q_b.weight",
                first=h0 * s.head_dim,
                count=(h1 - h0) * s.head_dim,
                columns=(0, s.q_rank),
            )
        }
        pool = index_pool = None
        if ratio:
            for part in ("kv", "gate"):
                name = f"{b}attn_compressor_{part}.weight"
                into[f"pool_{part}"] = self._whole(name, c * s.head_dim, s.d_model)
            pool = self._pool(f"{b}attn_compressor", ratio * c * s.head_dim, s.head_dim)
        if ratio == 4:
            for part in ("kv", "gate"):
                name = f"{b}indexer_compressor_{part}.weight"
                into[f"index_{part}"] = self._whole(name, c * s.index_dim, s.d_model)
            into["index_weights"] = self._whole(
                f"{b}indexer.proj.weight", s.n_index_heads, s.d_model
            )
            width = s.n_index_heads * s.index_dim
            up["index_q"] = self._whole(f"{b}indexer.attn_q_b.weight", width, s.q_rank)
            index_pool = self._pool(f"{b}indexer_compressor", ratio * c * s.index_dim, s.index_dim)
        g0, g1 = self.groups
        low_bounds = shard_bounds(s.n_groups) * s.group_rank
        v0, v1 = self.own.attention
        uniform = _is_uniform(low_bounds, s.n_groups * s.group_rank)
        out_a, out_b = f"{b}attn_output_a.weight", f"{b}attn_output_b.weight"
        lanes = self._lane_bounds(i)
        packed = self._packs_experts(i, lanes)
        ffn_in = {} if packed else self._shared_into(i, lanes)
        ffn_in["router"] = self._whole(f"{b}ffn_gate_inp.weight", s.n_experts, s.d_model)
        bias = f"{b}exp_probs_b.bias"
        is_biased, is_hashed = self.source.kind(bias) is not None, i < s.n_hash_layers
        table = f"{b}ffn_gate_tid2eid.weight"
        group_pieces = [
            Piece(
                tensor=out_a,
                first=g0 * s.group_rank,
                count=(g1 - g0) * s.group_rank,
                columns=(0, s.group_width),
            )
        ]
        columns = (int(low_bounds[v0]), int(low_bounds[v1]))
        join_pieces = [Piece(tensor=out_b, first=0, count=s.d_model, columns=columns)]
        return DeviceLayer(
            hc_attn=hc[0],
            hc_ffn=hc[1],
            attn_norm=self._vector(f"{b}attn_norm.weight", s.d_model),
            into=self._stack(into),
            q_norm=self._vector(f"{b}attn_q_a_norm.weight", s.q_rank),
            kv_norm=self._vector(f"{b}attn_kv_a_norm.weight", s.head_dim),
            up=self._stack(up),
            sinks=self._vector(f"{b}attn_sinks.weight", s.n_heads),
            output_a=self._matrix(self._storage(out_a, (Q8_0,), s.group_width), group_pieces),
            output_b=self._matrix(
                self._storage(out_b, (Q8_0,) if uniform else (), s.group_rank), join_pieces
            ),
            low_bounds=self._integers(f"{b}low bounds", low_bounds[v0 : v1 + 1] - low_bounds[v0]),
            pool=pool,
            index_pool=index_pool,
            ffn_norm=self._vector(f"{b}ffn_norm.weight", s.d_model),
            ffn_in=self._stack(ffn_in),
            router_bias=self._vector(bias, s.n_experts if is_biased else 0),
            is_biased=is_biased,
            hash_table=self._array(
                table,
                s.n_vocab * s.n_used if is_hashed else 0,
                np.int32,
                lambda: self.source.hash_table(table),
            ),
            is_hashed=is_hashed,
            experts=self._experts(i, lanes, packed=packed),
        )

    def _pool(self, prefix: str, n_ape: int, width: int) -> Pool:
        return Pool(
            self._vector(f"{prefix}_ape.weight", n_ape),
            self._vector(f"{prefix}_norm.weight", width),
        )

    def _lane_bounds(self, i: int) -> NDArray[np.int64]:
        kind = self.source.kind(f"blk.{i}.ffn_down_shexp.weight")
        block = kind.block_elements if kind is not None else 1
        return shard_bounds(self.shape.d_expert // block) * block

    def _shared_into(self, i: int, lanes: NDArray[np.int64]) -> dict[str, Piece]:
        """This rank's lanes of the shared expert's gate and up."""
        v0, v1 = self.own.experts
        first, count = int(lanes[v0]), int(lanes[v1] - lanes[v0])
        return {
            f"shared_{part}": Piece(
                tensor=f"blk.{i}.ffn_{part}_shexp.weight",
                first=first,
                count=count,
                columns=(0, self.shape.d_model),
            )
            for part in ("gate", "up")
        }

    def _packs_experts(self, i: int, lanes: NDArray[np.int64]) -> bool:
        """Whether the packed expert kernels take this layer.

        Raises:
          ConfigError: gate and up experts differ in type.
        """
        s = self.shape
        v0, v1 = self.own.experts
        kinds = {
            part: self.source.kind(f"blk.{i}.ffn_{part}.weight")
            for part in (
                "gate_exps",
                "up_exps",
                "down_exps",
                "gate_shexp",
                "up_shexp",
                "down_shexp",
            )
        }
        if kinds["gate_exps"] is not kinds["up_exps"]:
            raise ConfigError(
                f"layer {i}: gate experts are {kinds['gate_exps']}, up experts "
                f"{kinds['up_exps']}; both must be of one type"
            )
        return (
            kinds["gate_exps"] is QuantType.IQ2_XXS
            and kinds["down_exps"] is QuantType.Q2_K
            and all(kinds[f"{part}_shexp"] is Q8_0 for part in ("gate", "up", "down"))
            and s.d_model % 256 == 0
            and s.d_expert % 256 == 0
            and _is_uniform(lanes, s.d_expert)
            and int(lanes[v1] - lanes[v0]) % (32 * (v1 - v0)) == 0
        )

    def _experts(self, i: int, lanes: NDArray[np.int64], *, packed: bool) -> Experts:
        s, b = self.shape, f"blk.{i}."
        v0, v1 = self.own.experts
        shard_of = self.own.shard_of[i]
        owned = np.flatnonzero((shard_of >= v0) & (shard_of < v1))
        local = np.full(s.n_experts, -1, np.int32)
        local[owned] = np.arange(owned.size)
        columns = (int(lanes[v0]), int(lanes[v1]))

        def routed(part: str, rows: int, k: int) -> DeviceMatrix:
            name = f"{b}ffn_{part}_exps.weight"
            pieces = [
                Piece(tensor=name, first=first * rows, count=n * rows, columns=(0, k))
                for first, n in _runs(owned)
            ] or [Piece(tensor=name, first=0, count=0, columns=(0, k))]
            kind = self.source.kind(name)
            return self._matrix(kind if packed and kind is not None else F32, pieces)

        shared = {
            name: self._matrix(Q8_0, [piece])
            for name, piece in (self._shared_into(i, lanes) if packed else {}).items()
        }
        shared_down = Piece(
            tensor=f"{b}ffn_down_shexp.weight", first=0, count=s.d_model, columns=columns
        )
        return Experts(
            gate=routed("gate", s.d_expert, s.d_model),
            up=routed("up", s.d_expert, s.d_model),
            down=routed("down", s.d_model, s.d_expert),
            local=self._integers(f"{b}local experts", local),
            shard_of=self._integers(f"{b}shards of experts", shard_of),
            shared_down=self._matrix(Q8_0 if packed else F32, [shared_down]),
            lane_bounds=self._integers(f"{b}lane bounds", lanes[v0 : v1 + 1] - lanes[v0]),
            total_lanes=s.d_expert,
            is_packed=packed,
            shared_gate=shared.get("shared_gate"),
            shared_up=shared.get("shared_up"),
        )


def _is_uniform(bounds: NDArray[np.int64], total: int) -> bool:
    """Whether shard bounds are those of equal cuts of 32-element blocks."""
    return total % 32 == 0 and bool((bounds == shard_bounds(total // 32) * 32).all())


def _runs(ids: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(first, count) of every run of consecutive ids."""
    if not ids.size:
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    return [(int(run[0]), int(run.size)) for run in np.split(ids, breaks)]


def _check_shape(s: DeepSeek4Shape) -> None:
    """Refuse sizes that the CUDA kernels do not take."""
    limits = (
        ("hyper_connection.count", s.n_streams, s.n_streams == 4, "4"),
        ("embedding_length", s.d_model, s.d_model % 8 == 0, "a multiple of 8"),
        ("attention.key_length", s.head_dim, s.head_dim % 4 == 0, "a multiple of 4"),
        ("rope.dimension_count", s.rope_dim, s.rope_dim % 4 == 0, "a multiple of 4"),
        ("attention.indexer.key_length", s.index_dim, s.index_dim % 4 == 0, "a multiple of 4"),
        ("expert_used_count", s.n_used, s.n_used <= 32, "at most 32"),
    )
    for key, value, fits, wanted in limits:
        if not fits:
            raise ConfigError(
                f"backend cuda: deepseek4.{key} must be {wanted}, the model has {value}"
            )
