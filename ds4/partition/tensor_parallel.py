"""Which bytes of a model file each rank maps and keeps.

The plan is computed from the tensor table alone, before any weight is read, and is the same on
every machine. Cuts fall on shard boundaries (`rules.py` says along what); a cut that would fall
inside a quant block is refused by name. The module computes ranges and reads no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

import attrs

from ds4.errors import ConfigError, WorldRefused
from ds4.gguf import TensorInfo
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import TensorClass, TensorSpec, expected_tensors
from ds4.partition.placement import Placement
from ds4.partition.rules import Cut, Mode, cut_of
from ds4.partition.shards import (
    N_SHARDS,
    WORLDS,
    check_rank,
    owned_blocks,
    owned_shards,
    shard_blocks,
)

__all__ = [
    "ByteRange",
    "RankPlan",
    "TensorSlice",
    "check_world",
    "plan_rank",
    "possible_worlds",
]


@attrs.frozen
class ByteRange:
    """`count` pieces of `n_bytes` each; piece i starts at `offset + i * stride`.

    One piece is a plain range. A block of columns is one piece per row.
    """

    offset: int
    n_bytes: int
    count: int = 1
    stride: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        return self.n_bytes * self.count

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(first byte, byte behind the last) of every piece, in order."""
        for i in range(self.count):
            start = self.offset + i * self.stride
            yield start, start + self.n_bytes


@attrs.frozen(kw_only=True)
class TensorSlice:
    """What one rank keeps of one tensor.

    Attributes:
      name: of the tensor.
      role: its class.
      cut: along what it may be cut; whether it is depends on the mode and the world.
      shape: of the local array, NumPy order (the contiguous axis last).
      start: first kept row, column or element along the cut axis; 0 when whole or by experts.
      experts: global ids of the local experts in local order; empty unless cut by experts.
      shards: for a tensor that takes part in a sharded sum, the local range along the cut axis of
        every shard the rank computes, in order: its own shards when the cut applies, all eight
        when the rank keeps the tensor whole. Empty for the others.
      ranges: bytes of the file in local order; read one after the other they form the local array.
      read_bytes: expected bytes read to decode one token alone, routing taken as uniform.
    """

    name: str
    role: TensorClass
    cut: Cut
    shape: tuple[int, ...]
    start: int
    experts: tuple[int, ...]
    shards: tuple[range, ...]
    ranges: tuple[ByteRange, ...]
    read_bytes: int

    @property
    def n_bytes(self) -> int:
        """Bytes kept."""
        return sum(r.total_bytes for r in self.ranges)


@attrs.frozen(kw_only=True)
class RankPlan:
    """Everything one rank maps.

    Attributes:
      mode: expert or tensor parallel.
      world: ranks.
      rank: this one.
      slices: tensor name to slice, in file order.
      skipped: tensors that the model does not use, such as draft blocks; no rank maps them.
    """

    mode: Mode
    world: int
    rank: int
    slices: Mapping[str, TensorSlice]
    skipped: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Model bytes this rank keeps."""
        return sum(s.n_bytes for s in self.slices.values())

    @property
    def bytes_read_per_token(self) -> int:
        """Expected weight bytes this rank reads to decode one token alone."""
        return sum(s.read_bytes for s in self.slices.values())

    def bytes_by_class(self) -> dict[TensorClass, int]:
        """Bytes kept, by class; every class is present."""
        out = dict.fromkeys(TensorClass, 0)
        for s in self.slices.values():
            out[s.role] += s.n_bytes
        return out

    def read_bytes_by_class(self) -> dict[TensorClass, int]:
        """`bytes_read_per_token`, by class."""
        out = dict.fromkeys(TensorClass, 0)
        for s in self.slices.values():
            out[s.role] += s.read_bytes
        return out


def _first_idle_rank(n_units: int, world: int) -> int | None:
    for rank in range(world):
        if not owned_blocks(n_units, world, rank):
            return rank
    return None


def _obstacle(shape: DeepSeek4Shape, mode: Mode, world: int) -> tuple[str, str] | None:
    """Reason code and text why a world does not fit a shape, or None."""
    needs = [("experts", "expert_count", shape.n_experts)]
    if mode is Mode.TENSOR_PARALLEL:
        needs.append(("output_groups", "attention.output_group_count", shape.n_groups))
        needs.append(("vocabulary", "vocab_size", shape.n_vocab))
    for reason, key, count in needs:
        idle = _first_idle_rank(count, world)
        if idle is not None:
            return reason, f"deepseek4.{key} is {count}, so rank {idle} of {world} would own none"
    return None


def possible_worlds(shape: DeepSeek4Shape, mode: Mode) -> tuple[int, ...]:
    """World sizes in which every rank owns something of every cut. Always contains 1."""
    return tuple(world for world in WORLDS if _obstacle(shape, mode, world) is None)


def check_world(shape: DeepSeek4Shape, mode: Mode, world: int) -> None:
    """Refuse a world that cannot divide a model.

    Raises:
      WorldRefused: `world_size` when no model can be divided so; `experts`, `output_groups` or
        `vocabulary` when this one cannot. The text names the field, its value and what fits.
    """
    flag = "expert" if mode is Mode.EXPERT_PARALLEL else "tensor"
    fits = ", ".join(map(str, possible_worlds(shape, mode)))
    asked = f"--{flag}-parallel with --tensor-parallel-world {world}"
    if world not in WORLDS:
        raise WorldRefused("world_size", f"{asked}: the world must be one of {fits}")
    obstacle = _obstacle(shape, mode, world)
    if obstacle is not None:
        reason, text = obstacle
        raise WorldRefused(reason, f"{asked}: {text}; worlds that fit: {fits}")


@attrs.frozen
class _Units:
    """A cut axis seen as `count` units of `size` rows, columns or elements each."""

    count: int
    size: int

    def shard(self, v: int) -> range:
        units = shard_blocks(self.count, v)
        return range(units.start * self.size, units.stop * self.size)


@attrs.frozen(kw_only=True)
class _Planner:
    infos: Mapping[str, TensorInfo]
    shape: DeepSeek4Shape
    mode: Mode
    world: int
    rank: int
    placement: Placement

    def slice(self, info: TensorInfo, spec: TensorSpec) -> TensorSlice:
        if info.shape != spec.shape:
            # Cutting by the wrong axis would put every expert on every rank: it looks healthy and
            # saves nothing.
            raise ConfigError(
                f"tensor {info.name}: shape {spec.shape} expected from the model's sizes,"
                f" found {info.shape}"
            )
        cut = cut_of(info.name)
        if cut is Cut.EXPERTS:
            return self._experts(info, spec)
        if cut is Cut.NONE:
            return self._whole(info, spec, ())
        units = self._units(cut, spec)
        divided = cut.applies(self.mode) and self.world > 1
        mine = owned_shards(self.world, self.rank) if divided else range(N_SHARDS)
        start, stop = units.shard(mine.start).start, units.shard(mine.stop - 1).stop
        shards = tuple(
            range(units.shard(v).start - start, units.shard(v).stop - start) for v in mine
        )
        if not divided:
            return self._whole(info, spec, shards)
        if cut.is_columns:
            shape = (*info.shape[:-1], stop - start)
            piece = self._columns(info, start, stop)
        else:
            # A vector is cut along its only axis, so there an element plays the part of a row.
            shape = (stop - start, *info.shape[1:])
            row_bytes = info.n_bytes // info.shape[0]
            piece = ByteRange(info.offset + start * row_bytes, (stop - start) * row_bytes)
        return TensorSlice(
            name=info.name,
            role=spec.role,
            cut=cut,
            shape=shape,
            start=start,
            experts=(),
            shards=shards,
            ranges=(piece,) if piece.total_bytes else (),
            read_bytes=piece.total_bytes,
        )

    def _units(self, cut: Cut, spec: TensorSpec) -> _Units:
        match cut:
            case Cut.VOCABULARY:
                return _Units(self.shape.n_vocab, 1)
            case Cut.GROUP_COLUMNS:
                return _Units(self.shape.n_groups, spec.shape[-1] // self.shape.n_groups)
            case Cut.GROUP_ROWS:
                return _Units(self.shape.n_groups, spec.shape[0] // self.shape.n_groups)
            case _:
                # The lanes of gate and up follow the quant blocks of down's columns, since it is
                # down's inner sum that the shards divide.
                down = f"blk.{spec.layer}.ffn_down_shexp.weight"
                if down not in self.infos:
                    raise ConfigError(f"tensor {spec.name}: cannot be cut without tensor {down}")
                block = self.infos[down].type.block_elements
                return _Units(self.shape.d_expert // block, block)

    def _whole(self, info: TensorInfo, spec: TensorSpec, shards: tuple[range, ...]) -> TensorSlice:
        one_row = spec.role in (TensorClass.EMBEDDING, TensorClass.HASH)
        return TensorSlice(
            name=info.name,
            role=spec.role,
            cut=cut_of(info.name),
            shape=info.shape,
            start=0,
            experts=(),
            shards=shards,
            ranges=(ByteRange(info.offset, info.n_bytes),),
            read_bytes=info.row_bytes if one_row else info.n_bytes,
        )

    def _columns(self, info: TensorInfo, start: int, stop: int) -> ByteRange:
        block, block_bytes = info.type.block_elements, info.type.block_bytes
        for edge in (start, stop):
            if edge % block:
                raise WorldRefused(
                    "quant_block",
                    f"tensor {info.name} ({info.type.name}): a world of {self.world} would cut it"
                    f" at column {edge}, inside a quant block of {block}"
                    " (--tensor-parallel-world)",
                )
        return ByteRange(
            info.offset + start // block * block_bytes,
            (stop - start) // block * block_bytes,
            info.n_rows,
            info.row_bytes,
        )

    def _experts(self, info: TensorInfo, spec: TensorSpec) -> TensorSlice:
        n = self.shape.n_experts
        layer = self.placement.layers[spec.layer]
        experts = layer.experts_of_rank(self.world, self.rank)
        expert_bytes = info.n_bytes // n
        shards: list[range] = []
        for v in owned_shards(self.world, self.rank):
            first = shards[-1].stop if shards else 0
            shards.append(range(first, first + len(layer.shards[v])))
        ranges = [
            ByteRange(info.offset + run.start * expert_bytes, len(run) * expert_bytes)
            for run in _runs(experts)
        ]
        kept = len(experts) * expert_bytes
        return TensorSlice(
            name=info.name,
            role=spec.role,
            cut=Cut.EXPERTS,
            shape=(len(experts), *info.shape[1:]),
            start=0,
            experts=experts,
            shards=tuple(shards),
            ranges=tuple(ranges),
            read_bytes=round(Fraction(kept * self.shape.n_used, n)),
        )


def _runs(ids: Iterable[int]) -> Iterator[range]:
    """Group ids into runs of consecutive numbers, in the given order."""
    start = stop = -1
    for i in ids:
        if i != stop:
            if stop > start:
                yield range(start, stop)
            start = i
        stop = i + 1
    if stop > start:
        yield range(start, stop)


def plan_rank(
    infos: Mapping[str, TensorInfo],
    shape: DeepSeek4Shape,
    *,
    mode: Mode,
    world: int,
    rank: int,
    placement: Placement,
) -> RankPlan:
    """Say what one rank maps and keeps of every tensor in a file.

    Args:
      infos: tensor name to place, in file order.
      shape: of the model.
      mode: expert or tensor parallel; of no consequence in a world of one.
      world: 1, 2, 4 or 8.
      rank: 0 to world - 1.
      placement: which shard owns which expert.

    Raises:
      WorldRefused: the world does not divide the model, or would cut inside a quant block.
      ConfigError: a tensor of another size than the shape says, a rank out of range, or a placement
        of another model.
    """
    check_world(shape, mode, world)
    check_rank(world, rank)
    if (len(placement.layers), placement.n_experts) != (shape.n_layers, shape.n_experts):
        raise ConfigError(
            f"placement is for {len(placement.layers)} layers of {placement.n_experts} experts, the"
            f" model has {shape.n_layers} of {shape.n_experts}"
        )
    planner = _Planner(
        infos=infos, shape=shape, mode=mode, world=world, rank=rank, placement=placement
    )
    specs = expected_tensors(shape)
    slices: dict[str, TensorSlice] = {}
    skipped: list[str] = []
    for name, info in infos.items():
        if name in specs:
            slices[name] = planner.slice(info, specs[name])
        else:
            skipped.append(name)
    return RankPlan(mode=mode, world=world, rank=rank, slices=slices, skipped=tuple(skipped))
