"""A toy executor, a rank backend around it, and a device that runs in virtual time.

The toy model's next token depends on every token before it, so a rank that misses one disagrees.
What a fault does is said by the test; the fakes only offer the places.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import attrs
import numpy as np
import trio

from ds4.backend import LoadReport, Offer
from ds4.errors import (
    CollectiveError,
    ConfigError,
    DeviceError,
    InvalidRequest,
    SnapshotError,
)
from ds4.protocol.identity import Geometry
from ds4.steps import Chunk, RowResult, StepResult, Want

VOCAB = 97
N_CTX = 64
_MAGIC = b"toy snapshot"


class FakeExecutor:
    """Implements `StepExecutor`: deterministic, all state in lists of tokens."""

    def __init__(self, n_ctx_max: int = N_CTX, keeps: int = 4):
        self.sessions: dict[int, tuple[int, list[int]]] = {}
        self.n_ctx_max = n_ctx_max
        self.keeps = keeps
        self.steps: list[int] = []
        self.is_closed = False

    def open_session(self, session, n_ctx):
        if session in self.sessions:
            raise ConfigError(f"session {session} is open already")
        if not 1 <= n_ctx <= self.n_ctx_max:
            raise ConfigError(f"context must be from 1 to {self.n_ctx_max}, got {n_ctx}")
        self.sessions[session] = (n_ctx, [])

    def _tokens(self, session):
        if session not in self.sessions:
            raise InvalidRequest(f"session {session} is not open")
        return self.sessions[session][1]

    def close_session(self, session):
        self._tokens(session)
        del self.sessions[session]

    def session_length(self, session):
        return len(self._tokens(session))

    def session_tokens(self, session):
        return list(self._tokens(session))

    def check(self, plan):
        for entry in plan.entries():
            held = self._tokens(entry.session)
            start = entry.start if isinstance(entry, Chunk) else entry.position
            if start != len(held):
                raise InvalidRequest(f"session {entry.session} is at {len(held)}, not {start}")
            if start + entry.n_rows > self.sessions[entry.session][0]:
                raise InvalidRequest(f"session {entry.session} is full")
            ids = entry.tokens if isinstance(entry, Chunk) else np.array([entry.token])
            if ids.min() < 0 or ids.max() >= VOCAB:
                raise InvalidRequest(f"token ids must be 0 to {VOCAB - 1}")

    def step(self, plan):
        self.check(plan)
        rows = []
        total = hashlib.blake2b(digest_size=16)
        for entry in plan.entries():
            held = self._tokens(entry.session)
            new = entry.tokens.tolist() if isinstance(entry, Chunk) else [entry.token]
            logits = []
            for token in new:
                held.append(int(token))
                logits.append(self.logits(held))
            total.update(repr((int(entry.session), held)).encode())
            if entry.want != Want.NOTHING:
                rows.append(
                    RowResult(
                        session=entry.session,
                        token=int(np.argmax(logits[-1])),
                        logits={
                            Want.TOKEN: None,
                            Want.TOKEN_AND_LOGITS: np.array(logits[-1:]),
                            Want.ALL_LOGITS: np.array(logits),
                        }[entry.want],
                    )
                )
        self.steps.append(plan.step)
        return StepResult(step=plan.step, rows=tuple(rows), digest=total.digest(), device_s=0.001)

    @staticmethod
    def logits(tokens):
        """float32[VOCAB] that depend on all tokens."""
        seed = hashlib.blake2b(np.array(tokens, "<i4").tobytes(), digest_size=8).digest()
        return np.random.default_rng(struct.unpack("<Q", seed)[0]).random(VOCAB, np.float32)

    def snapshot(self, session):
        return _MAGIC + np.array(self._tokens(session), "<i4").tobytes()

    def restore(self, session, data):
        held = self._tokens(session)
        if not data.startswith(_MAGIC) or (len(data) - len(_MAGIC)) % 4:
            raise SnapshotError("not a toy snapshot")
        ids = np.frombuffer(data[len(_MAGIC) :], "<i4").tolist()
        if len(ids) > self.sessions[session][0]:
            raise SnapshotError("too long")
        held[:] = ids

    def rewind(self, session, length):
        held = self._tokens(session)
        if not 0 <= length <= len(held):
            raise InvalidRequest(f"cannot rewind {len(held)} to {length}")
        kept = length // self.keeps * self.keeps if length < len(held) else length
        del held[kept:]
        return kept

    def close(self):
        self.sessions.clear()
        self.is_closed = True


def geometry(world: int = 2, **changes) -> Geometry:
    """Geometry of a toy world."""
    base = Geometry(
        mode="expert-parallel" if world > 1 else "single",
        world=world,
        gguf_bytes=1,
        gguf_digest=b"g",
        layout_fingerprint=b"l",
        model_id="toy",
        n_layers=1,
        width=1,
        vocab=VOCAB,
        n_ctx=N_CTX,
        prefill_chunk=16,
        max_sessions=4,
        max_batch_rows=20,
        mixed_quantum=16,
        schedule_digest=b"s",
        placement_digest=b"p",
        reduce_mode="tree8",
        fast_aligned=False,
        activation_dtype="toy",
        transport="toy",
    )
    return attrs.evolve(base, **changes)


class Mesh:
    """Joins the steps of all ranks as a collective would: nobody passes before all have come.

    `breaks` says what an aborted or missing rank means to the others: a broken connection at once,
    as with TCP, or waiting for ever, as with NCCL.
    """

    def __init__(self, world: int, *, breaks: bool = True):
        self.world = world
        self.breaks = breaks
        self.waiting: set[int] = set()
        self.gate = trio.Event()
        self.is_broken = trio.Event()

    def leave(self):
        if self.breaks:
            self.is_broken.set()

    async def join(self, rank: int, is_aborted: trio.Event):
        self.waiting.add(rank)
        gate = self.gate
        if len(self.waiting) == self.world:
            self.waiting.clear()
            gate.set()
            self.gate = trio.Event()
        await wait_any(gate, is_aborted, self.is_broken)
        if not gate.is_set():
            raise CollectiveError("the collective was aborted or broken")


@attrs.define
class Faults:
    """What goes wrong on one rank; the default is nothing.

    Attributes:
      vote_no: reason to vote no.
      load_s: virtual seconds of loading.
      step_s: virtual seconds of a step.
      slow_step, slow_s: this step takes so long instead.
      hang_step: this step never returns, until it is aborted.
      deaf: an abort does not wake the step that hangs.
      crash_step: this step raises what no executor may raise.
      device_step: this step raises a DeviceError.
      digest_step: this step returns another digest.
      refuse_step: this step is refused before anything is launched.
      no_room: opening this session raises a DeviceError.
      keeps: granularity of rewinds.
      uuid: of the device.
    """

    vote_no: str = ""
    load_s: float = 0.0
    step_s: float = 0.001
    slow_step: int = 0
    slow_s: float = 0.0
    hang_step: int = 0
    deaf: bool = False
    crash_step: int = 0
    device_step: int = 0
    digest_step: int = 0
    refuse_step: int = 0
    no_room: int = -1
    keeps: int = 4
    uuid: str = ""


class FaultyExecutor(FakeExecutor):
    def __init__(self, faults: Faults):
        super().__init__(keeps=faults.keeps)
        self.faults = faults

    def open_session(self, session, n_ctx):
        if session == self.faults.no_room:
            raise DeviceError("no room for a session")
        super().open_session(session, n_ctx)

    def check(self, plan):
        if plan.step == self.faults.refuse_step:
            raise InvalidRequest("refused by the test")
        super().check(plan)

    def step(self, plan):
        if plan.step == self.faults.crash_step:
            raise ZeroDivisionError("crashed by the test")
        if plan.step == self.faults.device_step:
            raise DeviceError("broken by the test")
        result = super().step(plan)
        if plan.step == self.faults.digest_step:
            return attrs.evolve(result, digest=b"another")
        return result


class FakeBackend:
    """Implements `RankBackend` over a `FakeExecutor`."""

    def __init__(self, rank: int, mesh: Mesh, faults: Faults | None = None):
        self.rank = rank
        self.mesh = mesh
        self.faults = faults or Faults()
        self.calls: list[str] = []
        self.is_aborted = trio.Event()
        self.is_killed = trio.Event()
        self._executor: FaultyExecutor | None = None
        self.offers: tuple[bytes, ...] = ()

    def device(self):
        return (("kind", "fake"), ("uuid", self.faults.uuid))

    def load(self, progress):
        self.calls.append("load")
        progress("weights", 1, 2)
        return LoadReport(mapped_bytes=10, device_bytes=20, expert_rows=30)

    def offer(self, host):
        self.calls.append("offer")
        return Offer(
            transport="toy", data=f"{host} {self.rank}".encode(), reason=self.faults.vote_no
        )

    def connect(self, offers, secret, timeout_s):
        self.calls.append("connect")
        self.offers = tuple(offers)
        self._executor = FaultyExecutor(self.faults)

    def warm_up(self):
        self.calls.append("warm_up")
        return (("warm_up_s", "0"),)

    @property
    def executor(self):
        assert self._executor is not None, "the executor was used before connect"
        return self._executor

    def abort(self):
        self.calls.append("abort")
        self.is_aborted.set()
        self.mesh.leave()

    def close(self):
        self.calls.append("close")


class UntouchableBackend(FakeBackend):
    """Fails the test when a refused world reaches for weights or a device."""

    def load(self, progress):
        raise AssertionError("a refused world read weights")

    offer = connect = warm_up = load


class Killed(BaseException):
    """The simulated watchdog has ended the process."""


async def wait_any(*events: trio.Event):
    """Return when one of the events is set."""
    async with trio.open_nursery() as nursery:

        async def until(event):
            await event.wait()
            nursery.cancel_scope.cancel()

        for event in events:
            nursery.start_soon(until, event)


class SimDevice:
    """Runs jobs in the Trio loop, in virtual time. Implements `Device`."""

    def __init__(self, backend: FakeBackend):
        self.backend = backend
        self.lock = trio.Lock()

    async def run(self, function: Callable, *args):
        with trio.CancelScope(shield=True):
            async with self.lock:
                await self._wait(function, args)
                result = function(*args)
        await trio.lowlevel.checkpoint_if_cancelled()
        return result

    async def _wait(self, function, args):
        faults, backend = self.backend.faults, self.backend
        if function == backend.load:
            await self._compute(faults.load_s)
        if getattr(function, "__name__", "") != "_checked_step":
            return
        executor, plan = args
        executor.check(plan)
        if plan.step == faults.hang_step:
            if faults.deaf:
                await self._compute(float("inf"))
            await backend.is_aborted.wait()
            raise CollectiveError("aborted while it hung")
        await self._compute(faults.slow_s if plan.step == faults.slow_step else faults.step_s)
        if plan.step in (faults.crash_step, faults.device_step):
            backend.mesh.leave()
            return
        await backend.mesh.join(backend.rank, backend.is_aborted)

    async def _compute(self, seconds):
        """Nothing but the end of the process stops what a device computes."""
        with trio.move_on_after(seconds):
            await self.backend.is_killed.wait()
            raise Killed
