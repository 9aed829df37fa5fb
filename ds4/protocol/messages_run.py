"""Messages of a running world: sessions, steps, snapshots, failure and the end.

Rules for all messages: `ds4.protocol.messages`.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from ds4.errors import LocalProtocolError
from ds4.ids import StepId
from ds4.protocol.fields import (
    BOOL,
    DIGEST,
    FLOAT,
    HASH,
    U32,
    U64,
    Choice,
    Int,
    ListOf,
    Octets,
    Pair,
    Text,
)
from ds4.protocol.messages_base import Message, StepMode, StopMode, Subject
from ds4.protocol.messages_setup import MAX_BUCKETS
from ds4.protocol.steps_wire import PLAN, ROWS
from ds4.steps import RowResult, StepPlan, StepResult

__all__ = [
    "Ack",
    "Bye",
    "Checkpoint",
    "Fail",
    "Invalidate",
    "Ping",
    "Pong",
    "RestoreBegin",
    "RestoreChunk",
    "RestoreEnd",
    "Rewind",
    "SessionClose",
    "SessionOpen",
    "SnapshotBegin",
    "SnapshotChunk",
    "SnapshotEnd",
    "Step",
    "Stop",
]

_NAME = Text(128)
_TEXT = Text(4096)
_DATA = Octets(1, 2**32 - 1)
_TOKENS = Octets(0, 2**32 - 1)


@attrs.frozen(kw_only=True)
class SessionOpen(Message):
    """Create an empty timeline. Sampling is keyed by (seed, position), so no sampler state travels.

    Attributes:
      op: operation id.
      session: new id.
      n_ctx: capacity in tokens.
    """

    TAG: ClassVar[int] = 30
    NAME: ClassVar[str] = "session_open"

    op: int = attrs.field(validator=U64)
    session: int = attrs.field(validator=U64)
    n_ctx: int = attrs.field(validator=Int(1, 2**53))


@attrs.frozen(kw_only=True)
class SessionClose(Message):
    """Drop a timeline."""

    TAG: ClassVar[int] = 31
    NAME: ClassVar[str] = "session_close"

    op: int = attrs.field(validator=U64)
    session: int = attrs.field(validator=U64)


@attrs.frozen(kw_only=True)
class Step(Message):
    """One batched forward pass, with everything that decides which collectives run.

    Attributes:
      plan: rows to compute; its step id is the frame's step id.
      bucket: shape bucket, an index into `Config.buckets`.
      mode: a `StepMode`; NOOP exactly when the plan has no rows.
      chk: digest of every touched session's length and tokens before the step.
    """

    TAG: ClassVar[int] = 32
    NAME: ClassVar[str] = "step"

    plan: StepPlan = attrs.field(validator=PLAN)
    bucket: int = attrs.field(default=0, validator=Int(0, MAX_BUCKETS - 1))
    mode: int = attrs.field(default=int(StepMode.EAGER), validator=Choice(0, 1, 2))
    chk: bytes = attrs.field(default=b"", validator=DIGEST)

    def __attrs_post_init__(self) -> None:
        empty = not self.plan.prefill and not self.plan.decode
        if empty != (self.mode == StepMode.NOOP):
            raise LocalProtocolError(
                f"step {self.plan.step} has {self.plan.n_rows} rows in mode {self.mode}; a step "
                "without rows must be an explicit no-op, and only that",
                reason="noop",
            )


@attrs.frozen(kw_only=True)
class Rewind(Message):
    """Cut a session to its first `length` tokens, or to fewer.

    A rank keeps the longest exact prefix it still has state for and says in its ack how long that
    is; the leader checks that all ranks kept the same.

    Attributes:
      op: operation id.
      session: an open session.
      length: most tokens to keep.
    """

    TAG: ClassVar[int] = 33
    NAME: ClassVar[str] = "rewind"

    op: int = attrs.field(validator=U64)
    session: int = attrs.field(validator=U64)
    length: int = attrs.field(validator=U64)


@attrs.frozen(kw_only=True)
class Invalidate(Message):
    """Empty a session but keep it open. Confirmed by the next ack, not by its own."""

    TAG: ClassVar[int] = 34
    NAME: ClassVar[str] = "invalidate"

    session: int = attrs.field(validator=U64)


@attrs.frozen(kw_only=True)
class Checkpoint(Message):
    """Agree to go on or stop at a boundary inside a step: the worker asks, the leader decides.

    Attributes:
      step: the step that is running.
      boundary: counts from 0 within the step.
      stop: the worker's wish; in the leader's answer, the decision.
    """

    TAG: ClassVar[int] = 35
    NAME: ClassVar[str] = "checkpoint"

    step: int = attrs.field(validator=U64)
    boundary: int = attrs.field(validator=U32)
    stop: bool = attrs.field(validator=BOOL)


def _row_key(rows: tuple[RowResult, ...]) -> tuple[object, ...]:
    return tuple(
        (
            row.session,
            row.token,
            None if row.logits is None else (row.logits.shape, row.logits.tobytes()),
        )
        for row in rows
    )


@attrs.frozen(kw_only=True)
class Ack(Message):
    """A step or operation has finished on this rank's device; not merely "received".

    Attributes:
      about: `Subject.STEP` or `Subject.OP`.
      id: the step or operation id.
      status: 0, or a failure that ends the epoch.
      digest: over (session, length, token hash) of every session touched, after it.
      device_s: seconds the device spent.
      wait_s: seconds between the frame's arrival and the launch.
      rows: rank 0 only: sampled tokens and logits, one per entry that wanted something.
      length: tokens the session holds after a rewind or a restore; else 0.
      tokens: rank 0 only, after a restore: the session's ids as little-endian int32.
    """

    TAG: ClassVar[int] = 36
    NAME: ClassVar[str] = "ack"

    about: int = attrs.field(validator=Choice(1, 2))
    id: int = attrs.field(validator=U64)
    status: int = attrs.field(default=0, validator=U32)
    digest: bytes = attrs.field(default=b"", validator=DIGEST)
    device_s: float = attrs.field(default=0.0, validator=FLOAT)
    wait_s: float = attrs.field(default=0.0, validator=FLOAT)
    rows: tuple[RowResult, ...] = attrs.field(default=(), validator=ROWS, eq=_row_key)
    length: int = attrs.field(default=0, validator=U64)
    tokens: bytes = attrs.field(
        default=b"", validator=_TOKENS, repr=lambda data: f"<{len(data)} bytes>"
    )

    @classmethod
    def of_step(cls, result: StepResult, *, wait_s: float = 0.0) -> Ack:
        """The acknowledgement that carries a step's result."""
        return cls(
            about=int(Subject.STEP),
            id=result.step,
            digest=result.digest,
            device_s=result.device_s,
            wait_s=wait_s,
            rows=result.rows,
        )

    def result(self) -> StepResult:
        """The step's result that this acknowledgement carries.

        Raises:
          LocalProtocolError: it answers an operation, or a step that failed.
        """
        if self.about != Subject.STEP or self.status:
            raise LocalProtocolError(f"{self} carries no step result", reason="field")
        return StepResult(
            step=StepId(self.id), rows=self.rows, digest=self.digest, device_s=self.device_s
        )


@attrs.frozen(kw_only=True)
class SnapshotBegin(Message):
    """Ask for everything needed to continue a session; the worker streams it, then acks."""

    TAG: ClassVar[int] = 40
    NAME: ClassVar[str] = "snapshot_begin"

    op: int = attrs.field(validator=U64)
    session: int = attrs.field(validator=U64)


@attrs.frozen(kw_only=True)
class SnapshotChunk(Message):
    """A piece of a snapshot. `index` counts from 0."""

    TAG: ClassVar[int] = 41
    NAME: ClassVar[str] = "snapshot_chunk"

    op: int = attrs.field(validator=U64)
    index: int = attrs.field(validator=U32)
    data: bytes = attrs.field(validator=_DATA, repr=lambda data: f"<{len(data)} bytes>")


@attrs.frozen(kw_only=True)
class SnapshotEnd(Message):
    """The snapshot is complete.

    Attributes:
      op: operation id.
      n_bytes: sum of all chunks.
      hash: BLAKE2b-256 of all chunks in order.
    """

    TAG: ClassVar[int] = 42
    NAME: ClassVar[str] = "snapshot_end"

    op: int = attrs.field(validator=U64)
    n_bytes: int = attrs.field(validator=U64)
    hash: bytes = attrs.field(validator=HASH)


@attrs.frozen(kw_only=True)
class RestoreBegin(Message):
    """Replace a session's timeline by the snapshot that follows.

    Attributes:
      op: operation id.
      session: an open session.
      n_bytes: size of the whole snapshot.
    """

    TAG: ClassVar[int] = 43
    NAME: ClassVar[str] = "restore_begin"

    op: int = attrs.field(validator=U64)
    session: int = attrs.field(validator=U64)
    n_bytes: int = attrs.field(validator=U64)


@attrs.frozen(kw_only=True)
class RestoreChunk(Message):
    """A piece of the snapshot. `index` counts from 0."""

    TAG: ClassVar[int] = 44
    NAME: ClassVar[str] = "restore_chunk"

    op: int = attrs.field(validator=U64)
    index: int = attrs.field(validator=U32)
    data: bytes = attrs.field(validator=_DATA, repr=lambda data: f"<{len(data)} bytes>")


@attrs.frozen(kw_only=True)
class RestoreEnd(Message):
    """The snapshot is complete; `hash` is BLAKE2b-256 of all chunks in order."""

    TAG: ClassVar[int] = 45
    NAME: ClassVar[str] = "restore_end"

    op: int = attrs.field(validator=U64)
    hash: bytes = attrs.field(validator=HASH)


@attrs.frozen(kw_only=True)
class Fail(Message):
    """Something failed. From a worker, a failure about a step or operation is its answer.

    Attributes:
      code: stable code, as in `ds4.errors`.
      rank: where it failed.
      about: `Subject`; NOTHING unless the worker answers a step or operation that it refused
        before launching anything.
      id: of that step or operation, else 0.
      text: one line for people.
      sticky: the epoch is over; nothing but `stop` and `bye` follows.
    """

    TAG: ClassVar[int] = 50
    NAME: ClassVar[str] = "fail"

    code: str = attrs.field(validator=_NAME)
    rank: int = attrs.field(validator=U32)
    about: int = attrs.field(default=int(Subject.NOTHING), validator=Choice(0, 1, 2))
    id: int = attrs.field(default=0, validator=U64)
    text: str = attrs.field(default="", validator=_TEXT)
    sticky: bool = attrs.field(default=True, validator=BOOL)


@attrs.frozen(kw_only=True)
class Ping(Message):
    """Are you there? All fields are for the peer's log and for round-trip times.

    Attributes:
      time_ns: the sender's monotonic clock; the pong returns it.
      begun: last step begun, 0 before the first.
      ended: last step ended, 0 before the first.
    """

    TAG: ClassVar[int] = 51
    NAME: ClassVar[str] = "ping"

    time_ns: int = attrs.field(validator=U64)
    begun: int = attrs.field(default=0, validator=U64)
    ended: int = attrs.field(default=0, validator=U64)


@attrs.frozen(kw_only=True)
class Pong(Message):
    """Answers the oldest ping; `time_ns` is the ping's."""

    TAG: ClassVar[int] = 52
    NAME: ClassVar[str] = "pong"

    time_ns: int = attrs.field(validator=U64)
    begun: int = attrs.field(default=0, validator=U64)
    ended: int = attrs.field(default=0, validator=U64)


@attrs.frozen(kw_only=True)
class Stop(Message):
    """End the world in order. `mode` is a `StopMode`."""

    TAG: ClassVar[int] = 53
    NAME: ClassVar[str] = "stop"

    mode: int = attrs.field(default=int(StopMode.DRAIN), validator=Choice(0, 1))


@attrs.frozen(kw_only=True)
class Bye(Message):
    """The rank has freed everything and closes.

    Attributes:
      counters: (name, count) pairs for the log.
    """

    TAG: ClassVar[int] = 54
    NAME: ClassVar[str] = "bye"

    counters: tuple[tuple[str, int], ...] = attrs.field(
        default=(), validator=ListOf(Pair(Text(64), U64), 64)
    )
