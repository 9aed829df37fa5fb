"""How the ranks of a world add their partial sums on the device."""

from __future__ import annotations

from typing import Any, Protocol

from ds4.cuda.device import Launch

__all__ = ["DeviceJoin", "SoloJoin"]


class DeviceJoin(Protocol):
    """Binds joins to launches, so that they are captured with the kernels around them."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    def bind(self, name: str, part: Any) -> list[Launch]:
        """Launches that replace part f32[B, n], this rank's subtree, by the sum over all ranks.

        The sum is the fixed binary tree over ranks; every rank gets the same bits.
        """


class SoloJoin:
    """A world of one: every subtree is the whole sum."""

    world = 1

    def bind(self, name: str, part: Any) -> list[Launch]:
        """Nothing to add."""
        return []
