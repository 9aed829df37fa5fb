"""The collective operations an executor needs, and the world of one that needs none.

Every rank of a world calls the same operations with the same counts in the same order; what decides
the order is the step plan, never a rank.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Collective", "SoloCollective"]


class Collective(Protocol):
    """Synchronous collectives of one rank, called from its device thread."""

    @property
    def rank(self) -> int:
        """This rank, 0 to world - 1."""

    @property
    def world(self) -> int:
        """Number of ranks: 1, 2, 4 or 8."""

    def join(self, part: NDArray[np.float32]) -> NDArray[np.float32]:
        """Sum of all ranks' parts as the fixed binary tree over ranks.

        Args:
          part: f32[n], this rank's subtree over its canonical shards. May be overwritten.

        Returns:
          f32[n], the same bits on every rank and in every world.

        Raises:
          CollectiveError: a peer is gone, late, or sent another count.
        """

    def all_gather(self, part: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Every rank's part, in rank order; parts may differ in length."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def abort(self) -> None:
        """Make a blocked or later call of this rank fail. Callable from any thread."""

    def close(self) -> None:
        """Orderly end. Safe to call twice."""


class SoloCollective:
    """A world of one: every operation is the identity."""

    rank = 0
    world = 1

    def join(self, part: NDArray[np.float32]) -> NDArray[np.float32]:
        """The part itself."""
        return part

    def all_gather(self, part: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """The part alone."""
        return [part]

    def barrier(self) -> None:
        """Nothing to wait for."""

    def abort(self) -> None:
        """Nothing to abort."""

    def close(self) -> None:
        """Nothing to end."""
