"""What a rank does for sessions: steps and operations, each with its answer.

Invariant: an operation that is refused has changed nothing, and says so with a `fail` about itself;
anything else that goes wrong is raised, because the state is unknown then. The rank keeps the
timeline of each session beside the executor's state, so that the head's view can be compared before
a step is launched.
"""

from __future__ import annotations

import time

import numpy as np

from ds4.backend import RankBackend
from ds4.errors import ConfigError, Desync, DeviceError, Ds4Error, InvalidRequest, SnapshotError
from ds4.executor import StepExecutor
from ds4.ids import Position, SessionId
from ds4.protocol.fields import pack_i32
from ds4.protocol.messages import (
    Ack,
    Fail,
    Invalidate,
    Message,
    RestoreBegin,
    RestoreChunk,
    RestoreEnd,
    Rewind,
    SessionClose,
    SessionOpen,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Step,
    StepMode,
    Subject,
)
from ds4.protocol.transfer import Assembler, pieces, snapshot_hash
from ds4.steps import StepPlan, StepResult
from ds4.world.device_thread import Device
from ds4.world.timeline import Timeline, check_digest, entry_tokens

__all__ = ["SessionWork", "is_operation"]

_KINDS = (
    Step,
    SessionOpen,
    SessionClose,
    Rewind,
    Invalidate,
    SnapshotBegin,
    RestoreBegin,
    RestoreChunk,
    RestoreEnd,
)


def is_operation(message: Message) -> bool:
    """Whether `SessionWork.do` handles it."""
    return isinstance(message, _KINDS)


class SessionWork:
    """Sessions of one rank.

    Args:
      backend: its executor runs the steps.
      device: where.
      rank: only rank 0 returns rows.

    Attributes:
      begun: last step begun, 0 before the first.
      ended: last step ended, 0 before the first.
    """

    def __init__(self, backend: RankBackend, device: Device, rank: int) -> None:
        self.begun = 0
        self.ended = 0
        self._backend = backend
        self._device = device
        self._rank = rank
        self._timelines: dict[SessionId, Timeline] = {}
        self._restore: tuple[SessionId, Assembler] | None = None
        self._steps = self._rows = 0

    def counters(self) -> tuple[tuple[str, int], ...]:
        """For the goodbye."""
        return (("steps", self._steps), ("rows", self._rows))

    async def do(self, message: Message) -> list[Message]:
        """Do what is asked; returns the answers to send, in order.

        Raises:
          Ds4Error: a failure that leaves the state unknown.
        """
        if isinstance(message, Step):
            return [await self._step(message)]
        if isinstance(message, Invalidate):
            await self._device.run(self._executor().rewind, _sid(message), Position(0))
            self._timelines[_sid(message)].cut(0)
            return []
        if isinstance(message, RestoreBegin):
            self._restore = (_sid(message), Assembler(message.n_bytes))
            return []
        if isinstance(message, RestoreChunk):
            if self._restore is not None:
                self._restore[1].add(message.index, message.data)
            return []
        try:
            return await self._operation(message)
        except (InvalidRequest, ConfigError, SnapshotError) as error:
            return [self._refusal(Subject.OP, _op(message), error)]
        except DeviceError as error:
            if isinstance(message, SessionOpen):  # no room: nothing has happened
                return [self._refusal(Subject.OP, _op(message), error)]
            raise

    def _executor(self) -> StepExecutor:
        return self._backend.executor

    def _refusal(self, about: Subject, ident: int, error: Ds4Error) -> Fail:
        return Fail(
            code=error.code,
            rank=self._rank,
            about=int(about),
            id=ident,
            text=str(error)[:1000],
            sticky=False,
        )

    async def _step(self, message: Step) -> Message:
        plan = message.plan
        begin = time.monotonic()
        sessions = [entry.session for entry in plan.entries()]
        missing = [session for session in sessions if session not in self._timelines]
        if missing:
            raise Desync(self._rank, f"session {missing[0]} is not open here", step=plan.step)
        if check_digest(self._timelines, sessions) != message.chk:
            held = {session: len(self._timelines[session]) for session in sessions}
            raise Desync(
                self._rank,
                f"sessions differ from the head's before the step; lengths here: {held}",
                step=plan.step,
            )
        self.begun = plan.step
        if message.mode == StepMode.NOOP:
            self.ended = plan.step
            return Ack(about=int(Subject.STEP), id=plan.step)
        try:
            wait_s = time.monotonic() - begin
            result = await self._device.run(_checked_step, self._executor(), plan)
        except InvalidRequest as error:
            return self._refusal(Subject.STEP, plan.step, error)
        for session, _, tokens in entry_tokens(plan):
            self._timelines[session].extend(tokens)
        self.ended = plan.step
        self._steps += 1
        self._rows += plan.n_rows
        if self._rank:
            result = StepResult(step=result.step, digest=result.digest, device_s=result.device_s)
        return Ack.of_step(result, wait_s=wait_s)

    async def _operation(self, message: Message) -> list[Message]:
        executor, device = self._executor(), self._device
        session = _sid(message) if not isinstance(message, RestoreEnd) else SessionId(0)
        op = _op(message)
        match message:
            case SessionOpen():
                await device.run(executor.open_session, session, message.n_ctx)
                self._timelines[session] = Timeline(message.n_ctx)
                return [self._ack(op, session)]
            case SessionClose():
                await device.run(executor.close_session, session)
                self._timelines.pop(session, None)
                return [Ack(about=int(Subject.OP), id=op)]
            case Rewind():
                kept = await device.run(executor.rewind, session, Position(message.length))
                self._timelines[session].cut(kept)
                return [self._ack(op, session, length=int(kept))]
            case SnapshotBegin():
                data = await device.run(executor.snapshot, session)
                chunks = [
                    SnapshotChunk(op=op, index=index, data=piece) for index, piece in pieces(data)
                ]
                end = SnapshotEnd(op=op, n_bytes=len(data), hash=snapshot_hash(data))
                return [*chunks, end, self._ack(op, session)]
            case RestoreEnd():
                return [await self._restored(message)]
        raise InvalidRequest(f"{message.NAME} is no operation")

    async def _restored(self, message: RestoreEnd) -> Message:
        if self._restore is None:
            raise InvalidRequest("a restore that never began")
        session, parts = self._restore
        self._restore = None
        data = parts.finish(message.hash)
        await self._device.run(self._executor().restore, session, data)
        tokens = await self._device.run(self._executor().session_tokens, session)
        self._timelines[session].replace(tokens)
        packed = b"" if self._rank else pack_i32(np.array(tokens, np.int32))
        return self._ack(message.op, session, length=len(tokens), tokens=packed)

    def _ack(self, op: int, session: SessionId, *, length: int = 0, tokens: bytes = b"") -> Ack:
        return Ack(
            about=int(Subject.OP),
            id=op,
            digest=check_digest(self._timelines, [session]),
            length=length,
            tokens=tokens,
        )


def _checked_step(executor: StepExecutor, plan: StepPlan) -> StepResult:
    """Everything that can be refused is refused before the first collective."""
    executor.check(plan)
    return executor.step(plan)


def _sid(message: Message) -> SessionId:
    session: int = getattr(message, "session")  # noqa: B009  # operations share no base class
    return SessionId(session)


def _op(message: Message) -> int:
    op: int = getattr(message, "op")  # noqa: B009  # operations share no base class
    return op
