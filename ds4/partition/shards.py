"""The eight canonical shards and the fixed tree that joins them.

Every sum that a world may cut is *defined* over these shards, on one rank too: shard v adds its
terms in order from +0.0, and the eight partial sums are joined by
`((s0+s1)+(s2+s3))+((s4+s5)+(s6+s7))` in float32. A rank owns whole shards, so its part of the tree
is local and the worlds 1, 2, 4 and 8 give the same bits. Nothing here knows what is summed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError

__all__ = [
    "N_SHARDS",
    "WORLDS",
    "check_rank",
    "empty_partial",
    "join",
    "owned_blocks",
    "owned_shards",
    "shard_blocks",
    "shard_partial",
    "tree_sum",
]

N_SHARDS = 8
"""Leaves of the tree; also the largest world."""

WORLDS = (1, 2, 4, 8)
"""World sizes whose ranks own whole subtrees: the divisors of `N_SHARDS`."""


def check_rank(world: int, rank: int) -> None:
    """Raise `ConfigError` unless `world` can own whole shards and `rank` is one of it."""
    if world not in WORLDS:
        raise ConfigError(f"world must be one of {', '.join(map(str, WORLDS))}, got {world}")
    if not 0 <= rank < world:
        raise ConfigError(f"rank must be from 0 to {world - 1} in a world of {world}, got {rank}")


def shard_blocks(n_blocks: int, shard: int) -> range:
    """Blocks of shard `shard` when a dimension has `n_blocks` of them; may be empty.

    Args:
      n_blocks: quant blocks, experts, output groups or vocabulary rows; >= 0.
      shard: 0 to 7.

    Raises:
      ConfigError: an argument out of range.
    """
    if n_blocks < 0:
        raise ConfigError(f"n_blocks must be >= 0, got {n_blocks}")
    if not 0 <= shard < N_SHARDS:
        raise ConfigError(f"shard must be from 0 to {N_SHARDS - 1}, got {shard}")
    return range(shard * n_blocks // N_SHARDS, (shard + 1) * n_blocks // N_SHARDS)


def owned_shards(world: int, rank: int) -> range:
    """Shards of one rank: `[8r/N, 8(r+1)/N)`. Raises ConfigError as `check_rank`."""
    check_rank(world, rank)
    per_rank = N_SHARDS // world
    return range(rank * per_rank, (rank + 1) * per_rank)


def owned_blocks(n_blocks: int, world: int, rank: int) -> range:
    """Blocks of all shards of one rank; they are always adjacent. May be empty."""
    shards = owned_shards(world, rank)
    return range(
        shard_blocks(n_blocks, shards.start).start, shard_blocks(n_blocks, shards.stop - 1).stop
    )


def empty_partial(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """What a shard without terms contributes: +0.0 everywhere.

    It has to be +0.0, because adding -0.0 instead would keep the sign of a zero that +0.0 clears.
    """
    return np.zeros(shape, np.float32)


def shard_partial(
    terms: Iterable[NDArray[np.float32]], shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Sum one shard's terms in the given order, starting from +0.0.

    Args:
      terms: f32 arrays of `shape`, in the shard's fixed order.
      shape: shape of the result, needed when there are no terms.

    Numerics: because the sum starts from +0.0, no element of a partial is ever -0.0, however many
      terms there are; so neither is any element of the joined tree.
    """
    total = empty_partial(shape)
    for term in terms:
        if term.dtype != np.float32 or term.shape != shape:
            raise ConfigError(f"a term must be float32 {shape}, got {term.dtype} {term.shape}")
        total = total + term
    return total


def tree_sum(partials: NDArray[np.float32]) -> NDArray[np.float32]:
    """Add 1, 2, 4 or 8 partial sums as a balanced binary tree of neighbours.

    Args:
      partials: f32[n, ...]. With n = 8 this is the canonical tree over all shards; with n = 8 / N
        the local subtree of a rank that owns these shards; with n = N the join of the ranks'
        subtree sums.

    Returns:
      f32[...].

    Raises:
      ConfigError: another dtype or leading size.
    """
    if partials.dtype != np.float32:
        raise ConfigError(f"partials must be float32, got {partials.dtype}")
    if partials.ndim == 0 or partials.shape[0] not in WORLDS:
        raise ConfigError(f"partials must have 1, 2, 4 or 8 leading entries, got {partials.shape}")
    level = partials
    while level.shape[0] > 1:
        level = level[0::2] + level[1::2]
    return np.array(level[0], dtype=np.float32)


def join(subtree_sums: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Join the subtree sums of ranks 0..N-1, in rank order. See `tree_sum`."""
    return tree_sum(np.stack(list(subtree_sums)))
