"""Which bytes of a model file each rank maps and keeps.

The plan is computed from the tensor table alone, before any weight is read, and is the same on
every machine. Cuts fall on shard boundaries (`rules.py` says along what); a cut that would fall
inside a quant block is refused by name. The module computes ranges and reads no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Protocol

import attrs

from ds4.errors import ConfigError, WorldRefused
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.partition.placement import Placement
from ds4.partition.rules import Cut, Mode, Rule, TensorClass, rule_for
from ds4.partition.shards import N_SHARDS, WORLDS, check_rank, owned_blocks, owned_shards
from ds4.partition.shards import shard_blocks as _shard_blocks

__all__ = [
    "ByteRange",
    "RankPlan",
    "TensorLike",
    "TensorSlice",
    "check_world",
    "plan_rank",
    "possible_worlds",
]


class BlockType(Protocol):
    """A tensor type: how many weights one block holds. `ds4.gguf.QuantType` fits."""

    @property
    def name(self) -> str:
        """For error texts."""

    @property
    def block_elements(self) -> int:
        """Weights of one block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""


class TensorLike(Protocol):
    """What a plan needs to know of a tensor. `ds4.gguf.TensorInfo` fits."""

    @property
    def name(self) -> str:
        """Name in the file."""

    @property
    def ne(self) -> tuple[int, ...]:
        """Sizes as in the file, the contiguous one first."""

    @property
    def type(self) -> BlockType:
        """How the weights are stored."""

    @property
    def offset(self) -> int:
        """First byte, from the start of the file."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""


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
      rule: its class, cut and layer.
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
    rule: Rule
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
      skipped: tensors of a draft block, which no rank maps.
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
            out[s.rule.tensor_class] += s.n_bytes
        return out

    def read_bytes_by_class(self) -> dict[TensorClass, int]:
        """`bytes_read_per_token`, by class."""
        out = dict.fromkeys(TensorClass, 0)
        for s in self.slices.values():
            out[s.rule.tensor_class] += s.read_bytes
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


class _Planner:
    def __init__(
        self,
        infos: Mapping[str, TensorLike],
        shape: DeepSeek4Shape,
        mode: Mode,
        world: int,
        rank: int,
        placement: Placement,
    ) -> None:
        self.infos = infos
        self.shape = shape
        self.mode = mode
        self.world = world
        self.rank = rank
        self.placement = placement

    def slice(self, info: TensorLike, rule: Rule) -> TensorSlice:
        if rule.cut is Cut.EXPERTS:
            return self._experts(info, rule)
        if rule.cut is Cut.NONE:
            return self._whole(info, rule, ())
        units = self._units(info, rule)
        columns = rule.cut in (Cut.LANE_COLUMNS, Cut.GROUP_COLUMNS)
        axis = "columns" if columns else "rows"
        length = info.ne[0] if columns or len(info.ne) == 1 else info.ne[-1]
        if length != units.count * units.size:
            raise ConfigError(
                f"tensor {info.name}: {units.count * units.size} {axis} expected from the model's"
                f" shape, found {length}"
            )
        cut = rule.cut.applies(self.mode) and self.world > 1
        mine = owned_shards(self.world, self.rank) if cut else range(N_SHARDS)
        start = _shard_blocks(units.count, mine.start).start * units.size
        stop = _shard_blocks(units.count, mine.stop - 1).stop * units.size
        shards = tuple(
            range(b.start * units.size - start, b.stop * units.size - start)
            for b in (_shard_blocks(units.count, v) for v in mine)
        )
        if not cut:
            return self._whole(info, rule, shards)
        if columns:
            return self._columns(info, rule, start, stop, shards)
        # A vector is cut along its only axis, so an element plays the part of a row.
        row_bytes = info.n_bytes // length
        n_bytes = (stop - start) * row_bytes
        return TensorSlice(
            name=info.name,
            rule=rule,
            shape=(stop - start, *tuple(reversed(info.ne))[1:]),
            start=start,
            experts=(),
            shards=shards,
            ranges=_some(ByteRange(info.offset + start * row_bytes, n_bytes)),
            read_bytes=n_bytes,
        )

    def _units(self, info: TensorLike, rule: Rule) -> _Units:
        shape = self.shape
        heads = shape.n_heads // shape.n_groups
        match rule.cut:
            case Cut.VOCABULARY:
                return _Units(shape.n_vocab, 1)
            case Cut.GROUP_COLUMNS:
                return _Units(shape.n_groups, shape.group_rank)
            case Cut.GROUP_ROWS if info.name.endswith("attn_output_a.weight"):
                return _Units(shape.n_groups, shape.group_rank)
            case Cut.GROUP_ROWS if info.name.endswith("attn_sinks.weight"):
                return _Units(shape.n_groups, heads)
            case Cut.GROUP_ROWS:
                return _Units(shape.n_groups, heads * shape.head_dim)
            case _:
                # The lanes of gate and up follow the quant blocks of down's columns, since it is
                # down's inner sum that the shards divide.
                name = f"blk.{rule.layer}.ffn_down_shexp.weight"
                down = self.infos.get(name)
                if down is None:
                    raise ConfigError(f"tensor {info.name}: cannot be cut without tensor {name}")
                block = down.type.block_elements
                return _Units(shape.d_expert // block, block)

    def _whole(self, info: TensorLike, rule: Rule, shards: tuple[range, ...]) -> TensorSlice:
        one_row = rule.tensor_class in (TensorClass.EMBEDDING, TensorClass.HASH_TABLE)
        return TensorSlice(
            name=info.name,
            rule=rule,
            shape=tuple(reversed(info.ne)),
            start=0,
            experts=(),
            shards=shards,
            ranges=(ByteRange(info.offset, info.n_bytes),),
            read_bytes=info.n_bytes // info.ne[-1] if one_row else info.n_bytes,
        )

    def _columns(
        self, info: TensorLike, rule: Rule, start: int, stop: int, shards: tuple[range, ...]
    ) -> TensorSlice:
        block, block_bytes = info.type.block_elements, info.type.block_bytes
        for edge in (start, stop):
            if edge % block:
                raise WorldRefused(
                    "quant_block",
                    f"tensor {info.name} ({info.type.name}): a world of {self.world} would cut it"
                    f" at column {edge}, inside a quant block of {block}"
                    " (--tensor-parallel-world)",
                )
        n_rows = math.prod(info.ne[1:])
        row_bytes = info.n_bytes // n_rows
        piece = ByteRange(
            info.offset + start // block * block_bytes,
            (stop - start) // block * block_bytes,
            n_rows,
            row_bytes,
        )
        return TensorSlice(
            name=info.name,
            rule=rule,
            shape=(*tuple(reversed(info.ne))[:-1], stop - start),
            start=start,
            experts=(),
            shards=shards,
            ranges=_some(piece),
            read_bytes=piece.total_bytes,
        )

    def _experts(self, info: TensorLike, rule: Rule) -> TensorSlice:
        assert rule.layer is not None  # `rules.py` has no model-wide expert tensor
        n = self.shape.n_experts
        if len(info.ne) != 3 or info.ne[2] != n:
            # Slicing another axis would put every expert on every rank: it looks healthy and
            # saves nothing.
            raise ConfigError(
                f"tensor {info.name}: the last of three sizes must be the {n} experts,"
                f" found {info.ne}"
            )
        layer = self.placement.layers[rule.layer]
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
            rule=rule,
            shape=(len(experts), *tuple(reversed(info.ne))[1:]),
            start=0,
            experts=experts,
            shards=tuple(shards),
            ranges=tuple(ranges),
            read_bytes=round(Fraction(kept * self.shape.n_used, n)),
        )


def _some(piece: ByteRange) -> tuple[ByteRange, ...]:
    return (piece,) if piece.total_bytes else ()


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
    infos: Mapping[str, TensorLike],
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
      ConfigError: a tensor that has no rule or another size than the shape says, a rank out of
        range, or a placement of another model.
    """
    check_world(shape, mode, world)
    check_rank(world, rank)
    if (len(placement.layers), placement.n_experts) != (shape.n_layers, shape.n_experts):
        raise ConfigError(
            f"placement is for {len(placement.layers)} layers of {placement.n_experts} experts, the"
            f" model has {shape.n_layers} of {shape.n_experts}"
        )
    planner = _Planner(infos, shape, mode, world, rank, placement)
    slices: dict[str, TensorSlice] = {}
    skipped: list[str] = []
    for name, info in infos.items():
        rule = rule_for(name, shape.n_layers)
        if rule is None:
            skipped.append(name)
        else:
            slices[name] = planner.slice(info, rule)
    return RankPlan(mode=mode, world=world, rank=rank, slices=slices, skipped=tuple(skipped))
