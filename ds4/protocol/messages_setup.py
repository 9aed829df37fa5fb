"""Messages from the first hello until a rank is ready. Rules for all: `ds4.protocol.messages`."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ds4.errors import LocalProtocolError
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
    Record,
    Text,
)
from ds4.protocol.identity import Geometry
from ds4.protocol.messages_base import Message, Role
from ds4.protocol.steps_wire import MAX_ROWS

__all__ = [
    "MAX_BUCKETS",
    "MAX_WORLD",
    "Challenge",
    "Config",
    "ConfigOk",
    "Hello",
    "HelloOk",
    "Load",
    "LoadProgress",
    "Loaded",
    "NcclId",
    "NcclOk",
    "NcclVote",
    "Ready",
    "Refuse",
    "Response",
]

MAX_WORLD = 1024
MAX_BUCKETS = 256

_ROLE = Choice(0, 1)
_NAME = Text(128)
_TEXT = Text(4096)
_REPORT = ListOf(Pair(Text(64), Text(1024)), 64)
_BLOB = Octets(0, 64 * 1024)
_MS = Int(1, 2**53)
_COUNT = Int(1, 2**31 - 1)


@attrs.frozen(kw_only=True)
class Hello(Message):
    """Who a side is. The worker says it first.

    Attributes:
      role: `Role` of the sender.
      rank: of the worker; 0 from the leader.
      pid: process id, for logs.
      host: host name, for logs.
      geometry_hash: `geometry.geometry_hash()`; checked on receipt.
      geometry: what must be equal on all ranks.
      device: (key, value) pairs about the device, such as its UUID and memory.
    """

    TAG: ClassVar[int] = 1
    NAME: ClassVar[str] = "hello"

    role: int = attrs.field(validator=_ROLE)
    rank: int = attrs.field(validator=U32)
    pid: int = attrs.field(validator=U64)
    host: str = attrs.field(validator=Text(256))
    geometry_hash: bytes = attrs.field(validator=HASH)
    geometry: Geometry = attrs.field(validator=Record(Geometry))
    device: tuple[tuple[str, str], ...] = attrs.field(default=(), validator=_REPORT)

    def __attrs_post_init__(self) -> None:
        if self.geometry_hash != self.geometry.geometry_hash():
            raise LocalProtocolError(
                f"Hello.geometry_hash {self.geometry_hash.hex()} does not belong to its fields",
                reason="geometry_hash",
            )
        world = self.geometry.world
        if not 1 <= world <= MAX_WORLD or self.rank >= world:
            raise LocalProtocolError(
                f"Hello.rank {self.rank} does not exist in a world of {world}", reason="rank"
            )
        if self.role == Role.LEADER and self.rank:
            raise LocalProtocolError(
                f"Hello.rank of the leader must be 0, got {self.rank}", reason="rank"
            )

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        *,
        role: Role,
        rank: int,
        pid: int,
        host: str,
        device: tuple[tuple[str, str], ...] = (),
    ) -> Hello:
        """A hello with the hash that belongs to `geometry`."""
        return cls(
            role=int(role),
            rank=rank,
            pid=pid,
            host=host,
            geometry_hash=geometry.geometry_hash(),
            geometry=geometry,
            device=device,
        )


@attrs.frozen(kw_only=True)
class HelloOk(Message):
    """The peer's hello is accepted: same geometry, acceptable rank."""

    TAG: ClassVar[int] = 2
    NAME: ClassVar[str] = "hello_ok"


@attrs.frozen(kw_only=True)
class Refuse(Message):
    """No world with this peer. The connection closes after it; every rank exits with status 2.

    Attributes:
      reason: stable reason code.
      text: one line for people.
      rank: the rank that is at odds with the leader.
      field: the field that differs; empty where none does.
      leader_value: the leader's value of it, as text.
      peer_value: the rank's value of it, as text.
      flag: what sets it.
    """

    TAG: ClassVar[int] = 3
    NAME: ClassVar[str] = "refuse"

    reason: str = attrs.field(validator=_NAME)
    text: str = attrs.field(validator=_TEXT)
    rank: int = attrs.field(default=0, validator=U32)
    field: str = attrs.field(default="", validator=_NAME)
    leader_value: str = attrs.field(default="", validator=Text(1024))
    peer_value: str = attrs.field(default="", validator=Text(1024))
    flag: str = attrs.field(default="", validator=Text(256))


@attrs.frozen(kw_only=True)
class Challenge(Message):
    """Ask the peer to prove that it holds the cluster key.

    Attributes:
      role: of the sender.
      rank: of the sender; 0 from the leader.
      geometry_hash: of the sender; its hello must repeat it.
      nonce: 32 random bytes, never used before.
    """

    TAG: ClassVar[int] = 4
    NAME: ClassVar[str] = "challenge"

    role: int = attrs.field(validator=_ROLE)
    rank: int = attrs.field(validator=U32)
    geometry_hash: bytes = attrs.field(validator=HASH)
    nonce: bytes = attrs.field(validator=HASH)


@attrs.frozen(kw_only=True)
class Response(Message):
    """The proof. `mac` is defined in `ds4.protocol.membership`."""

    TAG: ClassVar[int] = 5
    NAME: ClassVar[str] = "response"

    mac: bytes = attrs.field(validator=HASH, repr=False)


@attrs.frozen(kw_only=True)
class Config(Message):
    """What the leader resolved and every rank has to use.

    Attributes:
      window: most steps without an answer.
      prefill_chunk: most prompt tokens in one chunk.
      max_batch_rows: most rows of one step.
      max_sessions: most open sessions.
      placement_digest: of the expert table in use; a rank compares it with its own.
      buckets: rows of each shape bucket, ascending; `Step.bucket` is an index into it.
      rank_timeout_ms: silence after which a peer is lost.
      step_timeout_ms: longest step in a bucket that has been used before.
      bootstrap_timeout_ms: longest data plane start.
      drain_timeout_ms: longest orderly stop.
      ping_interval_ms: time between pings while no step runs.
    """

    TAG: ClassVar[int] = 10
    NAME: ClassVar[str] = "config"

    window: int = attrs.field(validator=Int(1, 64))
    prefill_chunk: int = attrs.field(validator=_COUNT)
    max_batch_rows: int = attrs.field(validator=_COUNT)
    max_sessions: int = attrs.field(validator=Int(1, MAX_ROWS))
    placement_digest: bytes = attrs.field(validator=DIGEST)
    buckets: tuple[int, ...] = attrs.field(validator=ListOf(_COUNT, MAX_BUCKETS))
    rank_timeout_ms: int = attrs.field(validator=_MS)
    step_timeout_ms: int = attrs.field(validator=_MS)
    bootstrap_timeout_ms: int = attrs.field(validator=_MS)
    drain_timeout_ms: int = attrs.field(validator=_MS)
    ping_interval_ms: int = attrs.field(validator=_MS)

    def __attrs_post_init__(self) -> None:
        if list(self.buckets) != sorted(set(self.buckets)):
            raise LocalProtocolError(
                f"Config.buckets must ascend, got {self.buckets}", reason="field"
            )


@attrs.frozen(kw_only=True)
class ConfigOk(Message):
    """The rank can run this configuration."""

    TAG: ClassVar[int] = 11
    NAME: ClassVar[str] = "config_ok"


@attrs.frozen(kw_only=True)
class Load(Message):
    """All ranks agree; read the weights."""

    TAG: ClassVar[int] = 12
    NAME: ClassVar[str] = "load"


@attrs.frozen(kw_only=True)
class LoadProgress(Message):
    """Still loading or warming up. Sent often enough that silence means trouble.

    Attributes:
      stage: what is being done, such as `weights` or `warm-up`.
      done: units finished.
      total: units in all; 0 when unknown.
    """

    TAG: ClassVar[int] = 13
    NAME: ClassVar[str] = "load_progress"

    stage: str = attrs.field(validator=_NAME)
    done: int = attrs.field(validator=U64)
    total: int = attrs.field(validator=U64)


@attrs.frozen(kw_only=True)
class Loaded(Message):
    """The rank's slice is resident.

    Attributes:
      mapped_bytes: bytes of the file that are mapped.
      device_bytes: bytes on the device.
      seconds: time it took.
      expert_rows: resident (layer, expert) pairs.
    """

    TAG: ClassVar[int] = 14
    NAME: ClassVar[str] = "loaded"

    mapped_bytes: int = attrs.field(validator=U64)
    device_bytes: int = attrs.field(validator=U64)
    seconds: float = attrs.field(validator=FLOAT)
    expert_rows: int = attrs.field(validator=U64)


@attrs.frozen(kw_only=True)
class NcclVote(Message):
    """Whether the sender's data plane is usable. One no, and the world is refused.

    Attributes:
      usable: the vote.
      transport: `nccl`, or `tcp` between CPU ranks.
      version: of the library behind it.
      reason: why not, when `usable` is false.
      offer: the rank's contribution to the bootstrap, opaque here: the NCCL id from rank 0, or the
        address a `tcp` rank listens on.
    """

    TAG: ClassVar[int] = 20
    NAME: ClassVar[str] = "nccl_vote"

    usable: bool = attrs.field(validator=BOOL)
    transport: str = attrs.field(validator=_NAME)
    version: str = attrs.field(default="", validator=_NAME)
    reason: str = attrs.field(default="", validator=_TEXT)
    offer: bytes = attrs.field(default=b"", validator=_BLOB)

    def __attrs_post_init__(self) -> None:
        if self.usable == bool(self.reason):
            raise LocalProtocolError(
                "NcclVote.reason must be given exactly when the vote is no", reason="field"
            )


@attrs.frozen(kw_only=True)
class NcclId(Message):
    """Build the data plane. Opens the next epoch: its header carries the new number.

    Attributes:
      transport: as voted.
      offers: one per rank, in rank order, as collected from the votes.
    """

    TAG: ClassVar[int] = 21
    NAME: ClassVar[str] = "nccl_id"

    transport: str = attrs.field(validator=_NAME)
    offers: tuple[bytes, ...] = attrs.field(validator=ListOf(_BLOB, MAX_WORLD))


@attrs.frozen(kw_only=True)
class NcclOk(Message):
    """The data plane is up and its self-test gave the known sum. First frame of the new epoch."""

    TAG: ClassVar[int] = 22
    NAME: ClassVar[str] = "nccl_ok"


@attrs.frozen(kw_only=True)
class Ready(Message):
    """Warm: every shape bucket has run once.

    Attributes:
      report: (key, value) pairs for the world report.
    """

    TAG: ClassVar[int] = 23
    NAME: ClassVar[str] = "ready"

    report: tuple[tuple[str, str], ...] = attrs.field(default=(), validator=_REPORT)
