"""`World`: sessions and steps on all ranks at once.

Invariants: every rank executes the same operations in the same order; a result is returned only
when every rank has answered with the same digest; and what a caller can do wrong is found here,
before anything is sent, so that a refusal by a rank is agreed by all ranks or ends the world.

One operation runs at a time (window 1), and to its end even if its caller is cancelled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable

import attrs
import trio

from ds4.errors import (
    ConfigError,
    Desync,
    DeviceError,
    Ds4Error,
    InvalidRequest,
    OutOfDeviceMemory,
    Overloaded,
    RankLost,
    SnapshotError,
)
from ds4.ids import Position, SessionId, StepId
from ds4.protocol.fields import unpack_i32
from ds4.protocol.messages import (
    Ack,
    Fail,
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
)
from ds4.protocol.transfer import Assembler, pieces, snapshot_hash
from ds4.steps import StepPlan, StepResult
from ds4.world.head import Head
from ds4.world.peer import Failure, Peer
from ds4.world.timeline import Timeline, check_digest, entry_tokens
from ds4.world.verdict import Verdict, verdict

__all__ = ["World", "WorldStatistics"]

_MAX_SNAPSHOT_BYTES = 1 << 40
_TIMES_KEPT = 100
_P99 = 0.99

_ERRORS: dict[str, type[Ds4Error]] = {
    cls.code: cls
    for cls in (ConfigError, InvalidRequest, SnapshotError, DeviceError, OutOfDeviceMemory)
}


def _error_of(fail: Fail) -> Ds4Error:
    return _ERRORS.get(fail.code, Ds4Error)(fail.text)


@attrs.frozen(kw_only=True)
class WorldStatistics:
    """What a world has done.

    Attributes:
      steps: completed.
      sessions: open now.
      device_s: the slowest rank's seconds, summed over steps.
      wall_s: seconds from the first frame of a step to the last answer, summed.
    """

    steps: int
    sessions: int
    device_s: float
    wall_s: float


class _Times:
    """Durations of one bucket's steps, and the bound that follows from them."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_TIMES_KEPT)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    def p99(self) -> float | None:
        if not self._last:
            return None
        ordered = sorted(self._last)
        return ordered[min(len(ordered) - 1, math.ceil(_P99 * len(ordered)) - 1)]


class World:
    """An async handle on a world whose head is running.

    Args:
      head: ready.
    """

    def __init__(self, head: Head) -> None:
        self.head = head
        self._timelines: dict[SessionId, Timeline] = {}
        self._steps = 0
        self._times: dict[int, _Times] = {}
        self._device_s = self._wall_s = 0.0
        # Checks and the exchange they allow belong together.
        self._lock = trio.Lock()

    def statistics(self) -> WorldStatistics:
        """Counters so far."""
        return WorldStatistics(
            steps=self._steps,
            sessions=len(self._timelines),
            device_s=self._device_s,
            wall_s=self._wall_s,
        )

    def timeline(self, session: SessionId) -> Timeline:
        """What a session holds.

        Raises:
          InvalidRequest: it is not open.
        """
        found = self._timelines.get(session)
        if found is None:
            raise InvalidRequest(f"session {session} is not open")
        return found

    # -- sessions ----------------------------------------------------------------------------

    async def open_session(self, session: SessionId, n_ctx: int) -> None:
        """Create an empty timeline on every rank.

        Raises:
          ConfigError: the id is open already, or a context the model does not have.
          Overloaded: as many sessions as the world was configured for are open.
          DeviceError: a rank has no room; the others have dropped it again.
          RankLost, CollectiveError: the world ended.
        """
        async with self._lock:
            self.head.check_alive()
            if session in self._timelines:
                raise ConfigError(f"session {session} is open already")
            most = self.head.geometry.max_sessions
            if len(self._timelines) >= most:
                raise Overloaded(f"{most} sessions are open, as many as --batched-session allows")
            if not 1 <= n_ctx <= self.head.geometry.n_ctx:
                raise ConfigError(
                    f"context must be from 1 to {self.head.geometry.n_ctx} in this world, "
                    f"got {n_ctx}"
                )
            answers = await self._ask(
                lambda op: SessionOpen(op=op, session=session, n_ctx=n_ctx), "session_open"
            )
            fails = {r: a for r, a in answers.items() if isinstance(a, Fail)}
            if fails:
                # A device may be full on one rank only. Nothing was computed, so it can be undone.
                done = [rank for rank in answers if rank not in fails]
                if done:
                    await self._close(session, done)
                rank = min(fails)
                error = _error_of(fails[rank])
                raise type(error)(f"rank {rank}: {error}")
            self._timelines[session] = Timeline(n_ctx)

    async def close_session(self, session: SessionId) -> None:
        """Drop a timeline on every rank. Raises `InvalidRequest` when it is not open."""
        async with self._lock:
            self.head.check_alive()
            self.timeline(session)
            await self._close(session, None)
            del self._timelines[session]

    async def _close(self, session: SessionId, ranks: list[int] | None) -> None:
        answers = await self._ask(
            lambda op: SessionClose(op=op, session=session), "session_close", ranks=ranks
        )
        await self._agreed(answers, "session_close")

    async def rewind(self, session: SessionId, length: Position) -> Position:
        """Cut a timeline to at most `length` tokens; returns what every rank kept.

        Raises:
          InvalidRequest: longer than the timeline is.
          Desync: ranks kept different lengths; the world has ended.
        """
        async with self._lock:
            self.head.check_alive()
            timeline = self.timeline(session)
            if not 0 <= length <= len(timeline):
                raise InvalidRequest(
                    f"cannot rewind session {session} of {len(timeline)} to {length}"
                )
            answers = await self._ask(
                lambda op: Rewind(op=op, session=session, length=length), "rewind"
            )
            outcome = await self._agreed(answers, "rewind")
            kept = next(iter(outcome.acks.values())).length
            if kept > length:
                await self._desync(Desync(0, f"kept {kept} tokens of a rewind to {length}"))
            timeline.cut(kept)
            await self._compare_own(outcome, session, "rewind")
            return Position(kept)

    async def snapshot(self, session: SessionId) -> bytes:
        """Everything needed to continue a session exactly. All ranks hold the same; 0 sends it."""
        async with self._lock:
            self.head.check_alive()
            self.timeline(session)
            parts = Assembler(_MAX_SNAPSHOT_BYTES)
            end: list[SnapshotEnd] = []

            def is_answer(rank: int, message: Message) -> bool:
                if isinstance(message, SnapshotChunk):
                    parts.add(message.index, message.data)
                    return False
                if isinstance(message, SnapshotEnd):
                    end.append(message)
                    return False
                return True

            answers = await self._ask(
                lambda op: SnapshotBegin(op=op, session=session),
                "snapshot",
                ranks=[0],
                is_answer=is_answer,
            )
            await self._agreed(answers, "snapshot")
            return parts.finish(end[0].hash)

    async def restore(self, session: SessionId, data: bytes) -> None:
        """Replace a timeline by a snapshot, on every rank.

        Raises:
          SnapshotError: of another model, or damaged; the timeline is unchanged.
        """
        async with self._lock:
            self.head.check_alive()
            timeline = self.timeline(session)

            async def send(peer: Peer) -> None:
                op = peer.next_op()
                await peer.send(RestoreBegin(op=op, session=session, n_bytes=len(data)))
                for index, piece in pieces(data):
                    await peer.send(RestoreChunk(op=op, index=index, data=piece))
                await peer.send(RestoreEnd(op=op, hash=snapshot_hash(data)))

            answers = await self._exchange(send, "restore")
            outcome = await self._agreed(answers, "restore")
            timeline.replace(unpack_i32(outcome.acks[0].tokens))
            await self._compare_own(outcome, session, "restore")

    # -- steps -------------------------------------------------------------------------------

    def check(self, plan: StepPlan) -> None:
        """Raise `InvalidRequest` for a plan that does not fit the sessions. Sends nothing."""
        geometry = self.head.geometry
        if plan.n_rows > geometry.max_batch_rows:
            raise InvalidRequest(
                f"step {plan.step} has {plan.n_rows} rows, this world takes at most "
                f"{geometry.max_batch_rows}"
            )
        for session, start, tokens in entry_tokens(plan):
            timeline = self.timeline(session)
            if start != len(timeline):
                raise InvalidRequest(
                    f"step {plan.step}: session {session} is at {len(timeline)}, the plan "
                    f"continues it at {start}"
                )
            if start + tokens.size > timeline.n_ctx:
                raise InvalidRequest(
                    f"step {plan.step}: session {session} holds {timeline.n_ctx} tokens, the plan "
                    f"needs {start + tokens.size}"
                )
            if int(tokens.min()) < 0 or int(tokens.max()) >= geometry.vocab:
                raise InvalidRequest(
                    f"step {plan.step}: session {session}: token ids must be 0 to "
                    f"{geometry.vocab - 1}"
                )

    async def step(self, plan: StepPlan) -> StepResult:
        """Run one batched forward pass on every rank; rank 0's rows are the result.

        Step ids on the links are the world's own, without gaps whatever the caller's are.

        Raises:
          InvalidRequest: as `check`; nothing has been changed on any rank.
          RankLost, Desync, CollectiveError: the world ended.
        """
        async with self._lock:
            self.head.check_alive()
            self.check(plan)
            number = self._steps + 1
            sessions = [entry.session for entry in plan.entries()]
            message = Step(
                plan=attrs.evolve(plan, step=StepId(number)),
                mode=int(StepMode.EAGER if sessions else StepMode.NOOP),
                chk=check_digest(self._timelines, sessions),
            )
            times = self._times.setdefault(max(1, plan.n_rows - 1).bit_length(), _Times())
            begin = trio.current_time()
            answers = await self._exchange(
                lambda peer: peer.send(message),
                f"step {number}",
                seconds=self._bound(times),
                skew_s=self.head.timeouts.ack_skew_s,
            )
            self._steps = number
            wall_s = trio.current_time() - begin
            outcome = await self._agreed(answers, f"step {number}")
            for session, _, tokens in entry_tokens(plan):
                self._timelines[session].extend(tokens)
            times.add(wall_s)
            self._wall_s += wall_s
            device_s = max(ack.device_s for ack in outcome.acks.values())
            self._device_s += device_s
            result = outcome.acks[0].result()
            return attrs.evolve(result, step=plan.step, device_s=device_s)

    def _bound(self, times: _Times) -> float:
        timeouts = self.head.timeouts
        p99 = times.p99()
        if p99 is None:
            return max(timeouts.step_first_s, timeouts.step_floor_s)
        return max(timeouts.step_floor_s, timeouts.step_p99_factor * p99)

    # -- exchanges ---------------------------------------------------------------------------

    async def _ask(
        self,
        make: Callable[[int], Message],
        what: str,
        *,
        ranks: list[int] | None = None,
        is_answer: Callable[[int, Message], bool] | None = None,
    ) -> dict[int, Message]:
        return await self._exchange(
            lambda peer: peer.send(make(peer.next_op())), what, ranks=ranks, is_answer=is_answer
        )

    async def _exchange(
        self,
        send: Callable[[Peer], Awaitable[None]],
        what: str,
        *,
        seconds: float | None = None,
        skew_s: float | None = None,
        ranks: list[int] | None = None,
        is_answer: Callable[[int, Message], bool] | None = None,
    ) -> dict[int, Message]:
        return await self.head.exchange(
            send,
            is_answer or (lambda _, message: isinstance(message, (Ack, Fail))),
            what=what,
            seconds=self.head.timeouts.operation_s if seconds is None else seconds,
            skew_s=skew_s,
            ranks=ranks,
            # Only steps wait for other ranks; a rank that is silent otherwise is lost.
            is_work=seconds is not None,
        )

    async def _agreed(self, answers: dict[int, Message], what: str) -> Verdict:
        """The common verdict.

        Raises:
          Ds4Error: all ranks refused, or the world ended because they disagree.
        """
        bad = {r: a for r, a in answers.items() if isinstance(a, Ack) and a.status}
        if bad:
            rank = min(bad)
            await self._end(
                Failure(error=RankLost(rank, f"{what} failed, status {bad[rank].status}"))
            )
        try:
            outcome = verdict(answers, what)
        except Desync as error:
            await self._desync(error)
            raise
        if outcome.refusal is not None:
            raise _error_of(outcome.refusal)
        return outcome

    async def _compare_own(self, outcome: Verdict, session: SessionId, what: str) -> None:
        own = check_digest(self._timelines, [session])
        if any(ack.digest != own for ack in outcome.acks.values()):
            await self._desync(Desync(0, f"digest after {what} differs from the head's"))

    async def _desync(self, error: Desync) -> None:
        await self._end(Failure(error=error, rank=error.rank))

    async def _end(self, failure: Failure) -> None:
        self.head.fail(failure)
        with trio.CancelScope(shield=True):
            await self.head.wait_decided()
        self.head.check_alive()
