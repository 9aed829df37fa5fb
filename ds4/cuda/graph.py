"""Buckets of rows: programs, their captured graphs, and one way to run either.

A bucket is warmed up with idle rows only (slot -1), which compiles every kernel and touches no
session; then its launches are captured. Replays are the same launches, so their bits are those of
the eager run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ds4.cuda.device import Device, Launch, Replay
from ds4.errors import ConfigError

if TYPE_CHECKING:
    from ds4.cuda.step import Program

__all__ = ["BUCKETS", "Buckets", "bucket_of"]

BUCKETS = (1, 2, 4, 8)


def bucket_of(n_rows: int, buckets: Sequence[int] = BUCKETS) -> int:
    """Smallest bucket that holds n_rows.

    Raises:
      ConfigError: there is none.
    """
    for bucket in buckets:
        if n_rows <= bucket:
            return bucket
    raise ConfigError(f"{n_rows} rows do not fit the largest bucket of {buckets[-1]}")


class Buckets:
    """Programs and graphs of every bucket, made on first use.

    Args:
      device: where they run.
      make: builds the program of a bucket.
      idle: enqueues a meta array in which every row is idle.
      use_graphs: replay captured graphs; else enqueue the launches one by one.
      overlap: let neighbouring kernels of a graph overlap.
    """

    def __init__(
        self,
        device: Device,
        make: Callable[[int], Program],
        idle: Callable[[], None],
        *,
        use_graphs: bool,
        overlap: bool = False,
    ) -> None:
        self.device = device
        self.overlap = overlap
        self.use_graphs = use_graphs
        self._make = make
        self._idle = idle
        self._programs: dict[int, Program] = {}
        self._graphs: dict[tuple[int, str], Replay] = {}

    def program(self, bucket: int) -> Program:
        """The program of a bucket."""
        if bucket not in self._programs:
            self._programs[bucket] = self._make(bucket)
        return self._programs[bucket]

    def prepare(self, bucket: int) -> None:
        """Build, compile and, with graphs, capture a bucket. Must not run between a step's rows."""
        program = self.program(bucket)
        if not self.use_graphs or (bucket, "head") in self._graphs:
            return
        self._idle()
        for name, launches in (("forward", program.forward), ("head", program.head)):
            self.device.run(launches)
            self._graphs[bucket, name] = self.device.capture(launches, overlap=self.overlap)

    def run_forward(self, bucket: int) -> None:
        """Enqueue the forward pass of a bucket that `prepare` has seen."""
        self._run(bucket, "forward", self.program(bucket).forward)

    def run_head(self, bucket: int) -> None:
        """Enqueue the output head of a bucket that `prepare` has seen."""
        self._run(bucket, "head", self.program(bucket).head)

    def _run(self, bucket: int, name: str, launches: Sequence[Launch]) -> None:
        if self.use_graphs:
            self._graphs[bucket, name].launch()
        else:
            self.device.run(launches)

    def close(self) -> None:
        """Free the graphs. Safe to call twice."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
