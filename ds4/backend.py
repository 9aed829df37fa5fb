"""`RankBackend`: what a rank needs from a device besides running steps.

Ordinary synchronous code. Everything but `abort` is called from the rank's device thread, in the
order in which it stands here; nothing is loaded before `load`. Implemented by `ds4.cpu.backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from ds4.errors import Ds4Error
from ds4.executor import StepExecutor

__all__ = ["LoadReport", "Offer", "Pairs", "RankBackend", "RefusedBackend"]

Pairs = tuple[tuple[str, str], ...]
"""(key, value) pairs for reports."""


@attrs.frozen(kw_only=True)
class LoadReport:
    """What a rank holds after loading.

    Attributes:
      mapped_bytes: bytes of the file that this rank reads.
      device_bytes: bytes copied to the device; 0 where the mapping is used in place.
      expert_rows: (layer, expert) pairs of this rank.
    """

    mapped_bytes: int
    device_bytes: int
    expert_rows: int


@attrs.frozen(kw_only=True)
class Offer:
    """A rank's vote on its data plane, and what it brings to build it.

    Attributes:
      transport: `tcp`, `nccl`, or `none` in a world of one.
      data: what the other ranks need: an address, or the NCCL id from rank 0.
      version: of the library behind it.
      reason: why it is not usable; empty when it is.
    """

    transport: str
    data: bytes = b""
    version: str = ""
    reason: str = ""


class RankBackend(Protocol):
    """One rank's device."""

    def device(self) -> Pairs:
        """Facts about the device, such as its UUID: read without touching its memory."""

    def load(self, progress: Callable[[str, int, int], None]) -> LoadReport:
        """Make this rank's slice of the weights resident.

        Args:
          progress: called with (stage, units done, units in all).
        """

    def offer(self, host: str) -> Offer:
        """Whether the data plane is usable. `host` is the address that peers reach this rank by."""

    def connect(self, offers: Sequence[bytes], secret: bytes, timeout_s: float) -> None:
        """Build the data plane from all ranks' offers and prove it by a known sum.

        Raises:
          CollectiveError: it does not work within `timeout_s`.
        """

    def warm_up(self) -> Pairs:
        """Run every kernel once, in step with all other ranks. Returns facts for the report."""

    @property
    def executor(self) -> StepExecutor:
        """The executor; there is one after `connect`."""

    def abort(self) -> None:
        """Make a job that waits for a peer fail. Called from any thread, at any time."""

    def close(self) -> None:
        """Free everything. Safe to call twice, and at any point."""


class RefusedBackend:
    """Backend of a rank that can only refuse: whatever it is asked to compute is a defect.

    Args:
      release: frees what was opened to find that out.
    """

    def __init__(self, release: Callable[[], None] | None = None) -> None:
        self._release = release

    def device(self) -> Pairs:
        """Nothing is known."""
        return ()

    def load(self, progress: Callable[[str, int, int], None]) -> LoadReport:
        """A defect."""
        raise Ds4Error("a refused rank was asked to load")

    def offer(self, host: str) -> Offer:
        """A defect."""
        raise Ds4Error("a refused rank was asked for its data plane")

    def connect(self, offers: Sequence[bytes], secret: bytes, timeout_s: float) -> None:
        """A defect."""
        raise Ds4Error("a refused rank was asked to connect")

    def warm_up(self) -> Pairs:
        """A defect."""
        raise Ds4Error("a refused rank was asked to warm up")

    @property
    def executor(self) -> StepExecutor:
        """A defect."""
        raise Ds4Error("a refused rank was asked to compute")

    def abort(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Free what was opened."""
        if self._release is not None:
            self._release()
