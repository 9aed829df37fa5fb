"""Expert placements: which of the eight shards owns which routed expert, per layer.

A placement assigns experts to shards, never to ranks, so it does not depend on the world: a rank
owns whatever its shards own. It is part of the arithmetic (another placement adds in another
order), so its digest belongs to the identity that ranks compare. This module knows nothing of
weights, files of weights, or devices. The file format of explicit placements is in
`placement_file.py`.

Laws, all tested: the shards' lists are disjoint, their union is every expert, their sizes are those
of the contiguous rule `[vE//8, (v+1)E//8)`, and `experts_of_shard(shard_of[g])[local_of[g]] == g`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError
from ds4.partition.shards import N_SHARDS, owned_shards, shard_blocks

__all__ = ["LayerPlacement", "LocalTable", "Placement", "hash_layer_load", "imbalance"]

_MAX_EXPERTS = 65536


def _capacity(n_experts: int) -> list[int]:
    return [len(shard_blocks(n_experts, v)) for v in range(N_SHARDS)]


@attrs.frozen(kw_only=True)
class LocalTable:
    """Global to local expert ids of one rank, in the form a kernel reads.

    Attributes:
      experts: global ids in local order: shard after shard, ascending within a shard.
      local: i32[E]; local index of an owned expert, -1 for any other.
      owned: bool[E].
    """

    experts: tuple[int, ...]
    local: NDArray[np.int32] = attrs.field(eq=False)
    owned: NDArray[np.bool_] = attrs.field(eq=False)


@attrs.frozen(kw_only=True)
class LayerPlacement:
    """Experts of one layer by shard.

    Attributes:
      shards: eight ascending tuples of expert ids; tuple v is shard v's.

    Raises:
      ConfigError: an expert is missing, repeated or out of range, a shard's list is not ascending,
        or a shard's size is not the one of the contiguous rule.
    """

    shards: tuple[tuple[int, ...], ...]

    def __attrs_post_init__(self) -> None:
        if len(self.shards) != N_SHARDS:
            raise ConfigError(
                f"a placement needs {N_SHARDS} lists of experts, got {len(self.shards)}"
            )
        n = sum(map(len, self.shards))
        if not 1 <= n <= _MAX_EXPERTS:
            raise ConfigError(f"a placement needs 1 to {_MAX_EXPERTS} experts, got {n}")
        owner: dict[int, int] = {}
        for v, experts in enumerate(self.shards):
            for expert in experts:
                if not 0 <= expert < n:
                    raise ConfigError(
                        f"shard {v} names expert {expert}; with {n} experts in all the ids are"
                        f" 0 to {n - 1}"
                    )
                if expert in owner:
                    raise ConfigError(f"expert {expert} is in shard {owner[expert]} and shard {v}")
                owner[expert] = v
            if list(experts) != sorted(experts):
                raise ConfigError(f"experts of shard {v} must be in ascending order")
        for v, (experts, size) in enumerate(zip(self.shards, _capacity(n), strict=True)):
            if len(experts) != size:
                raise ConfigError(f"shard {v} must own {size} of {n} experts, got {len(experts)}")

    @classmethod
    def contiguous(cls, n_experts: int) -> LayerPlacement:
        """Shard v owns experts `[vE//8, (v+1)E//8)`."""
        if not 1 <= n_experts <= _MAX_EXPERTS:
            raise ConfigError(f"n_experts must be from 1 to {_MAX_EXPERTS}, got {n_experts}")
        return cls(shards=tuple(tuple(shard_blocks(n_experts, v)) for v in range(N_SHARDS)))

    @classmethod
    def from_owners(cls, owners: Sequence[int]) -> LayerPlacement:
        """Build from a table: `owners[g]` is the shard of expert g."""
        lists: list[list[int]] = [[] for _ in range(N_SHARDS)]
        for expert, shard in enumerate(owners):
            if not 0 <= shard < N_SHARDS:
                raise ConfigError(
                    f"expert {expert} is placed on shard {shard}; shards are 0 to {N_SHARDS - 1}"
                )
            lists[shard].append(expert)
        return cls(shards=tuple(map(tuple, lists)))

    @classmethod
    def balanced(cls, load: Sequence[float] | NDArray[np.float64]) -> LayerPlacement:
        """Longest-processing-time placement of a measured or closed-form load.

        Experts by load descending (ties: lower id first); each goes to the least-loaded shard that
        has room (ties: lower shard).

        Args:
          load: f64[E], finite and >= 0.
        """
        values = np.asarray(load, np.float64)
        if values.ndim != 1 or values.size == 0:
            raise ConfigError(f"load must be one number per expert, got shape {values.shape}")
        if not np.isfinite(values).all() or (values < 0).any():
            bad = int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])
            raise ConfigError(f"load of expert {bad} must be finite and >= 0, got {values[bad]}")
        room = _capacity(values.size)
        total = [0.0] * N_SHARDS
        owners = [0] * int(values.size)
        for expert in np.argsort(-values, kind="stable").tolist():
            shard = min((v for v in range(N_SHARDS) if room[v]), key=lambda v: (total[v], v))
            owners[expert] = shard
            room[shard] -= 1
            total[shard] += float(values[expert])
        return cls.from_owners(owners)

    @property
    def n_experts(self) -> int:
        """Experts of the layer."""
        return sum(map(len, self.shards))

    @property
    def is_contiguous(self) -> bool:
        """True when every shard, hence every rank, owns one run of ids: one slice to read."""
        return self.shards == LayerPlacement.contiguous(self.n_experts).shards

    def shard_of(self) -> NDArray[np.int32]:
        """Owner of each expert, i32[E]."""
        out = np.empty(self.n_experts, np.int32)
        for v, experts in enumerate(self.shards):
            out[list(experts)] = v
        return out

    def local_of(self) -> NDArray[np.int32]:
        """Position of each expert in its shard's list, i32[E]."""
        out = np.empty(self.n_experts, np.int32)
        for experts in self.shards:
            out[list(experts)] = np.arange(len(experts), dtype=np.int32)
        return out

    def experts_of_rank(self, world: int, rank: int) -> tuple[int, ...]:
        """Global ids in the rank's local order: shard after shard, ascending within a shard.

        So a shard's experts are adjacent in memory, and the local order of a shard does not depend
        on the world.
        """
        return tuple(e for v in owned_shards(world, rank) for e in self.shards[v])

    def local_table(self, world: int, rank: int) -> LocalTable:
        """Global to local ids of one rank."""
        experts = self.experts_of_rank(world, rank)
        local = np.full(self.n_experts, -1, np.int32)
        local[list(experts)] = np.arange(len(experts), dtype=np.int32)
        return LocalTable(experts=experts, local=local, owned=local >= 0)


@attrs.frozen(kw_only=True)
class Placement:
    """Placements of all layers of one model.

    Attributes:
      layers: one entry per layer, all with the same number of experts.
    """

    layers: tuple[LayerPlacement, ...]

    def __attrs_post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a placement needs at least one layer")
        for i, layer in enumerate(self.layers):
            if layer.n_experts != self.n_experts:
                raise ConfigError(
                    f"layer {i} places {layer.n_experts} experts, layer 0 places {self.n_experts}"
                )

    @classmethod
    def contiguous(cls, n_layers: int, n_experts: int) -> Placement:
        """The default: every layer contiguous."""
        return cls(layers=(LayerPlacement.contiguous(n_experts),) * n_layers)

    @classmethod
    def balanced(
        cls,
        n_layers: int,
        n_experts: int,
        loads: Mapping[int, Sequence[float] | NDArray[np.float64]],
    ) -> Placement:
        """Balance the layers with a known load; the others stay contiguous.

        Args:
          n_layers: layers of the model.
          n_experts: routed experts per layer.
          loads: layer to f64[E]. For hash layers from `hash_layer_load`; for scored layers only a
            measured histogram makes sense.

        Raises:
          ConfigError: a layer that does not exist, or a load of another length.
        """
        layers = [LayerPlacement.contiguous(n_experts)] * n_layers
        for layer, load in loads.items():
            if not 0 <= layer < n_layers:
                raise ConfigError(f"load given for layer {layer} of {n_layers}")
            if len(load) != n_experts:
                raise ConfigError(
                    f"load of layer {layer} has {len(load)} entries for {n_experts} experts"
                )
            layers[layer] = LayerPlacement.balanced(load)
        return cls(layers=tuple(layers))

    @property
    def n_experts(self) -> int:
        """Routed experts per layer."""
        return self.layers[0].n_experts

    def digest(self) -> bytes:
        """16 bytes that all ranks must agree on: BLAKE2b over (E, L, owner of each expert)."""
        state = hashlib.blake2b(digest_size=16, person=b"ds4-placement")
        state.update(np.array([self.n_experts, len(self.layers)], "<u4").tobytes())
        for layer in self.layers:
            state.update(layer.shard_of().astype(np.uint8).tobytes())
        return state.digest()


def hash_layer_load(
    token_to_experts: NDArray[np.integer],
    n_experts: int,
    frequency: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Expected load of each expert of a hash-routed layer: `sum_t f(t) * [g in table[t]]`.

    Args:
      token_to_experts: int[V, K], expert ids of each token.
      n_experts: E.
      frequency: f64[V] token frequencies; None means uniform, one each.

    Returns:
      f64[E].

    Raises:
      ConfigError: the table is not two-dimensional, an id is out of range, or the frequencies do
        not fit the table.
    """
    table = np.asarray(token_to_experts)
    if table.ndim != 2 or table.size == 0:
        raise ConfigError(
            f"token-to-expert table must be [tokens, experts per token], got {table.shape}"
        )
    bad = (table < 0) | (table >= n_experts)
    if bad.any():
        token, slot = map(int, np.argwhere(bad)[0])
        raise ConfigError(
            f"token-to-expert table: token {token} slot {slot} names expert"
            f" {int(table[token, slot])}; ids are 0 to {n_experts - 1}"
        )
    if frequency is None:
        weights = np.ones(table.shape[0], np.float64)
    else:
        weights = np.asarray(frequency, np.float64)
        if weights.shape != (table.shape[0],):
            raise ConfigError(
                f"frequency must have one entry per token ({table.shape[0]}), got {weights.shape}"
            )
        if not np.isfinite(weights).all() or (weights < 0).any():
            raise ConfigError("token frequencies must be finite and >= 0")
    load: NDArray[np.float64] = np.zeros(n_experts, np.float64)
    np.add.at(load, table.reshape(-1).astype(np.int64), np.repeat(weights, table.shape[1]))
    return load


def imbalance(
    placement: LayerPlacement, load: Sequence[float] | NDArray[np.float64], world: int
) -> float:
    """Load of the busiest rank over the mean; 1.0 is perfect, also for no load at all.

    Args:
      placement: of the layer.
      load: f64[E].
      world: ranks.
    """
    values = np.asarray(load, np.float64)
    if values.shape != (placement.n_experts,):
        raise ConfigError(f"load must have {placement.n_experts} entries, got shape {values.shape}")
    per_rank = [
        float(values[list(placement.experts_of_rank(world, rank))].sum()) for rank in range(world)
    ]
    mean = sum(per_rank) / world
    return max(per_rank) / mean if mean > 0 else 1.0
