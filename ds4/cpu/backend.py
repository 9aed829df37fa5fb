"""`CpuBackend`: what a CPU rank is made of. Implements `ds4.backend.RankBackend`.

The weights stay in the file's mapping, so loading costs nothing here but the arithmetic of which
bytes belong to this rank; the system reads pages when a step touches them, and all ranks of a host
share them.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence

import attrs

from ds4.backend import LoadReport, Offer, Pairs
from ds4.collectives import Collective, CollectiveListener, SoloCollective, TcpCollective
from ds4.cpu.executor import CpuExecutor
from ds4.errors import CollectiveError
from ds4.gguf import GGUFFile
from ds4.ids import Position, SessionId, StepId, Token
from ds4.model.deepseek4.rounding import Rounding
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import TensorClass
from ds4.partition.ownership import Ownership
from ds4.partition.placement import Placement
from ds4.partition.rules import Mode
from ds4.partition.tensor_parallel import plan_rank
from ds4.steps import Chunk, Decode, StepPlan

__all__ = ["Addresses", "CpuBackend"]

_WARM_UP_SESSION = SessionId(2**63)
_OPERATION_TIMEOUT_S = 300.0
"""Bound on one collective. The head ends a world long before; this is for a rank without one."""


@attrs.frozen
class Addresses:
    """How a collective address becomes an offer and back; the wire form is not known here.

    Attributes:
      pack: (host, port) to bytes.
      unpack: the inverse.
    """

    pack: Callable[[str, int], bytes]
    unpack: Callable[[bytes], tuple[str, int]]


class CpuBackend:
    """One CPU rank.

    Args:
      file: opened model; closed by `close`.
      shape: of the model.
      mode: what is divided.
      world: ranks.
      rank: this one.
      placement: experts to shards.
      rounding: activation rounding switch.
      threads: CPU threads; None takes every core this process may use.
      addresses: form of offers.
    """

    def __init__(
        self,
        file: GGUFFile,
        shape: DeepSeek4Shape,
        *,
        mode: Mode,
        world: int,
        rank: int,
        placement: Placement,
        rounding: Rounding,
        threads: int | None,
        addresses: Addresses,
    ) -> None:
        self._file = file
        self._shape = shape
        self._mode = mode
        self._world = world
        self._rank = rank
        self._placement = placement
        self._rounding = rounding
        self._threads = threads
        self._addresses = addresses
        self._listener: CollectiveListener | None = None
        self._collective: Collective | None = None
        self._executor: CpuExecutor | None = None
        self._lock = threading.Lock()
        self._is_aborted = False

    def device(self) -> Pairs:
        """See `RankBackend.device`."""
        return (("kind", "cpu"), ("machine", platform.machine()))

    def load(self, progress: Callable[[str, int, int], None]) -> LoadReport:
        """See `RankBackend.load`."""
        plan = plan_rank(
            self._file.tensors,
            self._shape,
            mode=self._mode,
            world=self._world,
            rank=self._rank,
            placement=self._placement,
        )
        progress("weights", plan.total_bytes, plan.total_bytes)
        experts = sum(
            len(s.experts) for s in plan.slices.values() if s.role is TensorClass.ROUTED_DOWN
        )
        return LoadReport(mapped_bytes=plan.total_bytes, device_bytes=0, expert_rows=experts)

    def offer(self, host: str) -> Offer:
        """See `RankBackend.offer`."""
        if self._world == 1:
            return Offer(transport="none")
        try:
            self._listener = CollectiveListener(host)
        except CollectiveError as error:
            return Offer(transport="tcp", reason=str(error))
        return Offer(transport="tcp", data=self._addresses.pack(*self._listener.address))

    def connect(self, offers: Sequence[bytes], secret: bytes, timeout_s: float) -> None:
        """See `RankBackend.connect`."""
        collective: Collective = SoloCollective()
        if self._world > 1:
            if self._listener is None:
                raise CollectiveError("connect without an offer")
            collective = self._listener.connect(
                self._rank,
                [self._addresses.unpack(offer) for offer in offers],
                secret,
                connect_timeout_s=timeout_s,
                operation_timeout_s=_OPERATION_TIMEOUT_S,
            )
        with self._lock:
            self._collective = collective
            if self._is_aborted:
                collective.abort()
        self._executor = CpuExecutor(
            self._file,
            rounding=self._rounding,
            threads=self._threads,
            own=Ownership.of(
                self._shape,
                mode=self._mode,
                world=self._world,
                rank=self._rank,
                placement=self._placement,
            ),
            collective=collective,
        )

    def warm_up(self) -> Pairs:
        """See `RankBackend.warm_up`."""
        executor = self.executor
        session = _WARM_UP_SESSION
        n_ctx = min(8, self._shape.n_ctx_train)
        executor.open_session(session, n_ctx)
        step = StepId(0)
        chunk = Chunk(session=session, start=Position(0), tokens=[0, 0])
        result = executor.step(StepPlan(step=step, prefill=(chunk,)))
        seconds = result.device_s
        row = Decode(session=session, position=Position(2), token=Token(0))
        result = executor.step(StepPlan(step=step, decode=(row,)))
        executor.close_session(session)
        facts = [
            ("warm_up_prefill_s", f"{seconds:.6f}"),
            ("warm_up_decode_s", f"{result.device_s:.6f}"),
        ]
        if isinstance(self._collective, TcpCollective):
            counts = self._collective.statistics()
            facts += [
                ("collective_operations", str(counts.joins + counts.gathers + counts.barriers)),
                ("collective_bytes_sent", str(counts.payload_bytes_sent)),
                ("collective_s", f"{counts.seconds:.6f}"),
            ]
        return tuple(facts)

    @property
    def executor(self) -> CpuExecutor:
        """See `RankBackend.executor`."""
        if self._executor is None:
            raise CollectiveError("the executor was used before the data plane was built")
        return self._executor

    def abort(self) -> None:
        """See `RankBackend.abort`."""
        with self._lock:
            self._is_aborted = True
            if self._collective is not None:
                self._collective.abort()
            elif self._listener is not None:
                self._listener.abort()

    def close(self) -> None:
        """See `RankBackend.close`."""
        if self._executor is not None:
            self._executor.close()
        elif self._collective is not None:
            self._collective.close()
        if self._listener is not None:
            self._listener.close()
        self._file.close()
