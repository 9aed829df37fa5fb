"""Legal conversations as data, and two connections joined in memory to play them.

Shared by the protocol's tests and fuzz targets, which start from any point of a conversation that
works and then do something wrong.
"""

from __future__ import annotations

import hashlib

import numpy as np

from ds4.ids import Position, SessionId, StepId, Token
from ds4.protocol.connection import Connection, Event
from ds4.protocol.identity import Geometry
from ds4.protocol.limits import DEFAULT_LIMITS, Limits
from ds4.protocol.membership import ClusterKey
from ds4.protocol.messages import (
    Ack,
    Bye,
    Challenge,
    Checkpoint,
    Config,
    ConfigOk,
    Fail,
    Hello,
    HelloOk,
    Invalidate,
    Load,
    Loaded,
    LoadProgress,
    Message,
    NcclId,
    NcclOk,
    NcclVote,
    Ping,
    Pong,
    Ready,
    Refuse,
    RestoreBegin,
    RestoreChunk,
    RestoreEnd,
    Rewind,
    Role,
    SessionClose,
    SessionOpen,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Step,
    StepMode,
    Stop,
    Subject,
)
from ds4.protocol.transfer import snapshot_hash
from ds4.protocol.version import CURRENT, Version
from ds4.sampling import SamplingParams
from ds4.steps import Chunk, Decode, RowResult, StepPlan, Want

__all__ = [
    "CHALLENGES",
    "CONFIG",
    "EXAMPLES",
    "GEOMETRY",
    "KEY",
    "RUN",
    "SETUP",
    "Pair",
    "Script",
    "hello",
    "step",
]

Script = tuple[tuple[Role, Message], ...]

L, W = Role.LEADER, Role.WORKER
KEY = ClusterKey(b"an example key of 32 bytes, fine")


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=32).digest()


GEOMETRY = Geometry(
    mode="expert-parallel",
    world=2,
    gguf_bytes=86_720_111_488,
    gguf_digest=_digest("gguf"),
    layout_fingerprint=_digest("layout"),
    model_id="deepseek4",
    n_layers=43,
    width=4096,
    vocab=129_280,
    n_ctx=32_768,
    prefill_chunk=2048,
    max_sessions=8,
    max_batch_rows=2056,
    mixed_quantum=128,
    schedule_digest=_digest("schedule"),
    placement_digest=_digest("placement"),
    reduce_mode="tree8",
    fast_aligned=False,
    activation_dtype="f32",
    transport="tcp",
)

CONFIG = Config(
    window=2,
    prefill_chunk=2048,
    max_batch_rows=2056,
    max_sessions=8,
    placement_digest=_digest("placement"),
    buckets=(1, 2, 4, 8),
    rank_timeout_ms=300_000,
    step_timeout_ms=10_000,
    bootstrap_timeout_ms=60_000,
    drain_timeout_ms=30_000,
    ping_interval_ms=1000,
)


def hello(role: Role, *, rank: int | None = None, geometry: Geometry = GEOMETRY) -> Hello:
    """A hello of one side; rank 1 unless said otherwise."""
    if rank is None:
        rank = 0 if role is L else 1
    return Hello.of(geometry, role=role, rank=rank, pid=4000 + rank, host="node-a")


def step(number: int, *, rows: int = 1) -> Step:
    """A decode step of `rows` sessions, eager; a no-op for none."""
    decode = tuple(
        Decode(
            session=SessionId(7 + row),
            position=Position(100 + number),
            token=Token(1000 + row),
            sampling=SamplingParams(temperature=0.7, top_k=40, top_p=0.95, min_p=0.05, seed=row),
        )
        for row in range(rows)
    )
    mode = StepMode.EAGER if rows else StepMode.NOOP
    return Step(plan=StepPlan(step=StepId(number), decode=decode), mode=int(mode))


def _challenge(role: Role) -> Challenge:
    return Challenge(
        role=int(role),
        rank=0 if role is L else 1,
        geometry_hash=GEOMETRY.geometry_hash(),
        nonce=_digest(role.name),
    )


_CHALLENGE = {role: _challenge(role) for role in Role}
CHALLENGES: Script = (
    (W, _CHALLENGE[W]),
    (L, _CHALLENGE[L]),
    (W, KEY.respond(_CHALLENGE[W], _CHALLENGE[L])),
    (L, KEY.respond(_CHALLENGE[L], _CHALLENGE[W])),
)
"""Membership, for connections that were given `KEY`."""

SETUP: Script = (
    (W, hello(W)),
    (L, hello(L)),
    (L, HelloOk()),
    (W, HelloOk()),
    (L, CONFIG),
    (W, ConfigOk()),
    (L, Load()),
    (W, LoadProgress(stage="weights", done=1, total=43)),
    (W, Loaded(mapped_bytes=10**9, device_bytes=10**9, seconds=1.5, expert_rows=5504)),
    (L, NcclVote(usable=True, transport="tcp")),
    (W, NcclVote(usable=True, transport="tcp", version="1", offer=b"127.0.0.1:4000")),
    (L, NcclId(transport="tcp", offers=(b"127.0.0.1:4001", b"127.0.0.1:4000"))),
    (W, NcclOk()),
    (W, LoadProgress(stage="warm-up", done=1, total=4)),
    (W, Ready(report=(("graphs", "4"),))),
)
"""From the first hello to READY."""

_PREFILL = Step(
    plan=StepPlan(
        step=StepId(1),
        prefill=(
            Chunk(
                session=SessionId(7),
                start=Position(0),
                tokens=np.arange(5, dtype=np.int32),
                want=Want.TOKEN_AND_LOGITS,
            ),
        ),
    ),
    bucket=3,
    mode=int(StepMode.GRAPH),
    chk=_digest("before"),
)
_PREFILL_ACK = Ack(
    about=int(Subject.STEP),
    id=1,
    digest=_digest("after"),
    device_s=0.0065,
    wait_s=0.0001,
    rows=(
        RowResult(
            session=SessionId(7),
            token=Token(42),
            logits=np.linspace(-1, 1, 8, dtype=np.float32).reshape(1, 8),
        ),
    ),
)
_SNAPSHOT = b"a snapshot in two pieces"

RUN: Script = (
    (L, SessionOpen(op=1, session=7, n_ctx=4096)),
    (W, Ack(about=int(Subject.OP), id=1)),
    (L, _PREFILL),
    (W, Checkpoint(step=1, boundary=0, stop=False)),
    (L, Checkpoint(step=1, boundary=0, stop=False)),
    (W, _PREFILL_ACK),
    (L, Ping(time_ns=5, begun=1, ended=1)),
    (W, Pong(time_ns=5, begun=1, ended=1)),
    (L, step(2, rows=0)),
    (L, step(3)),
    (W, Ack(about=int(Subject.STEP), id=2)),
    (W, Ack(about=int(Subject.STEP), id=3, digest=_digest("x"))),
    (L, Rewind(op=2, session=7, length=3)),
    (W, Ack(about=int(Subject.OP), id=2, digest=_digest("y"), length=2)),
    (L, SnapshotBegin(op=3, session=7)),
    (W, SnapshotChunk(op=3, index=0, data=_SNAPSHOT[:10])),
    (W, SnapshotChunk(op=3, index=1, data=_SNAPSHOT[10:])),
    (W, SnapshotEnd(op=3, n_bytes=len(_SNAPSHOT), hash=snapshot_hash(_SNAPSHOT))),
    (W, Ack(about=int(Subject.OP), id=3)),
    (L, RestoreBegin(op=4, session=7, n_bytes=len(_SNAPSHOT))),
    (L, RestoreChunk(op=4, index=0, data=_SNAPSHOT)),
    (L, RestoreEnd(op=4, hash=snapshot_hash(_SNAPSHOT))),
    (W, Fail(code="snapshot", rank=1, about=int(Subject.OP), id=4, text="other", sticky=False)),
    (L, Invalidate(session=7)),
    (L, RestoreBegin(op=5, session=7, n_bytes=0)),
    (L, RestoreEnd(op=5, hash=snapshot_hash(b""))),
    (W, Ack(about=int(Subject.OP), id=5, length=2, tokens=bytes((1, 0, 0, 0, 2, 0, 0, 0)))),
    (L, SessionClose(op=6, session=7)),
    (W, Ack(about=int(Subject.OP), id=6)),
    (L, Stop()),
    (W, Bye(counters=(("steps", 3),))),
)
"""From READY to the goodbye."""

EXAMPLES: tuple[Message, ...] = (
    *(message for _, message in CHALLENGES),
    *(message for _, message in SETUP),
    *(message for _, message in RUN),
    Refuse(reason="geometry", text="rank 1 differs", rank=1, field="n_ctx", leader_value="1"),
    Fail(code="device", rank=1, text="lost"),
    NcclVote(usable=False, transport="nccl", reason="no library"),
)
"""At least one of every message."""


class Pair:
    """A leader and a worker, each other's bytes delivered at once.

    Args:
      limits: of both.
      key: of both.
      versions: of the leader and of the worker.
    """

    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        *,
        key: ClusterKey | None = None,
        versions: tuple[Version, Version] = (CURRENT, CURRENT),
    ) -> None:
        self.ends = {
            role: Connection(role, limits, key=key, version=version)
            for role, version in zip((L, W), versions, strict=True)
        }
        for role in Role:
            self.ends[role.peer].receive_data(self.ends[role].start())
        for role in Role:
            self.ends[role].next_event()

    @property
    def leader(self) -> Connection:
        """The leader's end."""
        return self.ends[L]

    @property
    def worker(self) -> Connection:
        """The worker's end."""
        return self.ends[W]

    def deliver(self, sender: Role, data: bytes) -> list[Event]:
        """Give bytes to the other end; return its events."""
        end = self.ends[sender.peer]
        end.receive_data(data)
        events: list[Event] = []
        while (event := end.next_event()) is not None:
            events.append(event)
        return events

    def send(self, sender: Role, message: Message) -> list[Event]:
        """Send a message; return the events at the other end."""
        return self.deliver(sender, self.ends[sender].send(message))

    def play(self, script: Script) -> Pair:
        """Play a script and check that each message arrives, alone and equal.

        Raises:
          AssertionError: a message did not arrive as it was sent.
        """
        for sender, message in script:
            events = self.send(sender, message)
            if events != [message]:
                raise AssertionError(f"{message!r} arrived as {events!r}")
        return self
