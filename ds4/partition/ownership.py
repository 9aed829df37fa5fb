"""Which canonical shards a rank computes: the executor's view of a partition."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.partition.placement import Placement
from ds4.partition.rules import Mode
from ds4.partition.shards import N_SHARDS, owned_shards
from ds4.partition.tensor_parallel import check_world

__all__ = ["Ownership"]


@attrs.frozen(kw_only=True, eq=False)
class Ownership:
    """Half-open ranges of shards, one for each kind of sum or slice.

    Attributes:
      attention: shards of output groups; (0, 8) where attention is replicated.
      experts: shards of routed experts and shared-expert lanes.
      vocabulary: shards of output rows; (0, 8) where the head is replicated.
      shard_of: i32[L, E], the shard every expert belongs to.
    """

    attention: tuple[int, int]
    experts: tuple[int, int]
    vocabulary: tuple[int, int]
    shard_of: NDArray[np.int32]

    @classmethod
    def of(
        cls,
        shape: DeepSeek4Shape,
        *,
        mode: Mode = Mode.EXPERT_PARALLEL,
        world: int = 1,
        rank: int = 0,
        placement: Placement | None = None,
    ) -> Ownership:
        """Ownership of one rank.

        Args:
          shape: the model.
          mode: what is divided; irrelevant in a world of one.
          world: ranks.
          rank: this one.
          placement: experts to shards; None is contiguous.

        Raises:
          WorldRefused: the model cannot be divided so.
        """
        check_world(shape, mode, world)
        if placement is None:
            placement = Placement.contiguous(shape.n_layers, shape.n_experts)
        shards = owned_shards(world, rank)
        mine = (shards.start, shards.stop)
        dense = mine if mode is Mode.TENSOR_PARALLEL else (0, N_SHARDS)
        return cls(
            attention=dense,
            experts=mine,
            vocabulary=dense,
            shard_of=np.ascontiguousarray(
                np.stack([layer.shard_of() for layer in placement.layers]), np.int32
            ),
        )
