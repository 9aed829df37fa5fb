"""The one table that says who may send what, and when.

Two rules govern this file. All legality that depends on the order of messages is in `ROWS`; what
depends on numbers (frame, epoch, step, window) is in `ds4.protocol.ledger`. And the table speaks of
the leader and the worker, never of "us": both ends run the same rows, one as the sender, the other
as the receiver.

Theory of operation
  A link has one conversation state, and each end keeps its own copy. Setting up is strict question
  and answer: in every state before READY exactly one side may take the next step, so the two
  copies can differ only while a frame is in flight. From READY on the leader may have several
  things outstanding; READY means nothing is, STEPPING means something is. The ledger counts, and
  reports the last answer under a label of its own (`ack.last`), which is how counting enters the
  table without the table counting.

  Labels refine message names where the content decides: a vote is `vote.yes` or `vote.no`, an ack
  is `ack`, `ack.last` or `ack.bad` (status not 0), a fail is `fail`, `fail.last` (it answers the
  last thing outstanding) or `fail.sticky`.

  Some messages interrupt: `refuse`, `fail.sticky`, `ack.bad`, `stop`, `bye`. Whoever sends one may
  still receive what the peer sent before it knew. Those rows have `side=RECEIVER_ONLY`: legal to
  receive, not to send. In REFUSED, FAILED, DISMISSED and STOPPED such frames are checked and
  dropped, so no result of a failed epoch is ever delivered.

  A vote may be called again from READY, when nothing is outstanding: that rebuilds the data plane
  and opens the next epoch, with no sessions.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType

import attrs

from ds4.protocol.messages import Role

__all__ = ["ROWS", "TABLE", "Key", "Move", "Row", "Side", "State", "legal_now"]


class State(Enum):
    """Where a conversation stands. Values are the names used in documents."""

    CHALLENGE = "challenge"
    """Both sides hold a cluster key; nothing is proven. The worker opens."""
    CHALLENGED = "challenged"
    COUNTERED = "countered"
    PROVEN = "proven"
    """The worker has proven itself; the leader has not."""
    HELLO = "hello"
    GREETED = "greeted"
    COMPARING = "comparing"
    """Both hellos are known."""
    APPROVED = "approved"
    AGREED = "agreed"
    CONFIGURING = "configuring"
    CONFIGURED = "configured"
    LOADING = "loading"
    LOADED = "loaded"
    VOTING = "voting"
    VOTED = "voted"
    OUTVOTED = "outvoted"
    """Someone voted no. Only a refusal can follow."""
    BOOTSTRAP = "bootstrap"
    WARMING = "warming"
    READY = "ready"
    STEPPING = "stepping"
    DRAINING = "draining"
    STOPPED = "stopped"
    REFUSED = "refused"
    FAILED = "failed"
    DISMISSED = "dismissed"
    """Failed, and told to stop; only the goodbye is left."""


class Side(Enum):
    """Which ends a row is for."""

    BOTH = "both"
    RECEIVER_ONLY = "receiver only"


@attrs.frozen
class Row:
    """Legal moves that share a sender and a target.

    Attributes:
      states: from where.
      sender: who may send.
      labels: message labels.
      target: the state after; None keeps the state.
      side: RECEIVER_ONLY for what may still be in flight.
      drop: the receiver checks the frame but delivers no event.
    """

    states: tuple[State, ...]
    sender: tuple[Role, ...]
    labels: tuple[str, ...]
    target: State | None
    side: Side = Side.BOTH
    drop: bool = False


_L = (Role.LEADER,)
_W = (Role.WORKER,)
_LW = (Role.LEADER, Role.WORKER)

_S = State
_MEMBERSHIP = (_S.CHALLENGE, _S.CHALLENGED, _S.COUNTERED, _S.PROVEN)
_GREETING = (_S.HELLO, _S.GREETED, _S.COMPARING, _S.APPROVED)
_SETUP = (
    _S.AGREED,
    _S.CONFIGURING,
    _S.CONFIGURED,
    _S.LOADING,
    _S.LOADED,
    _S.VOTING,
    _S.VOTED,
    _S.OUTVOTED,
)
_STARTING = (_S.BOOTSTRAP, _S.WARMING)
_RUNNING = (_S.READY, _S.STEPPING)
_OVER = (_S.FAILED, _S.DISMISSED)
_ALIVE = (*_SETUP, *_STARTING, *_RUNNING, _S.DRAINING)

_FROM_LEADER = (
    "challenge", "response", "hello", "hello_ok", "config", "load", "vote.yes", "vote.no",
    "nccl_id", "session_open", "session_close", "step", "rewind", "invalidate", "checkpoint",
    "snapshot_begin", "restore_begin", "restore_chunk", "restore_end", "ping", "pong",
)  # fmt: skip
_FROM_WORKER_SETUP = (
    "config_ok", "load_progress", "loaded", "vote.yes", "vote.no", "nccl_ok", "ready",
)  # fmt: skip
_FROM_WORKER = (
    "challenge", "response", "hello", "hello_ok", *_FROM_WORKER_SETUP, "checkpoint",
    "ack", "ack.last", "fail.last", "snapshot_chunk", "snapshot_end", "ping", "pong",
)  # fmt: skip

ROWS: tuple[Row, ...] = (
    # Membership, only with a cluster key.
    Row((_S.CHALLENGE,), _W, ("challenge",), _S.CHALLENGED),
    Row((_S.CHALLENGED,), _L, ("challenge",), _S.COUNTERED),
    Row((_S.COUNTERED,), _W, ("response",), _S.PROVEN),
    Row((_S.PROVEN,), _L, ("response",), _S.HELLO),
    # Identity.
    Row((_S.HELLO,), _W, ("hello",), _S.GREETED),
    Row((_S.GREETED,), _L, ("hello",), _S.COMPARING),
    Row((_S.COMPARING,), _L, ("hello_ok",), _S.APPROVED),
    Row((_S.APPROVED,), _W, ("hello_ok",), _S.AGREED),
    # Configuration and weights.
    Row((_S.AGREED,), _L, ("config",), _S.CONFIGURING),
    Row((_S.CONFIGURING,), _W, ("config_ok",), _S.CONFIGURED),
    Row((_S.CONFIGURED,), _L, ("load",), _S.LOADING),
    Row((_S.LOADING,), _W, ("load_progress",), None),
    Row((_S.LOADING,), _W, ("loaded",), _S.LOADED),
    # Data plane.
    Row((_S.LOADED, _S.READY), _L, ("vote.yes",), _S.VOTING),
    Row((_S.LOADED, _S.READY), _L, ("vote.no",), _S.OUTVOTED),
    Row((_S.VOTING,), _W, ("vote.yes",), _S.VOTED),
    Row((_S.VOTING,), _W, ("vote.no",), _S.OUTVOTED),
    Row((_S.VOTED,), _L, ("nccl_id",), _S.BOOTSTRAP),
    Row((_S.BOOTSTRAP,), _W, ("nccl_ok",), _S.WARMING),
    Row((_S.WARMING,), _W, ("load_progress",), None),
    Row((_S.WARMING,), _W, ("ready",), _S.READY),
    # Work. An invalidation has no answer, so it leaves READY as it is.
    Row(
        _RUNNING,
        _L,
        ("session_open", "session_close", "step", "rewind", "snapshot_begin", "restore_begin"),
        _S.STEPPING,
    ),
    Row(_RUNNING, _L, ("invalidate",), None),
    Row((_S.STEPPING,), _L, ("checkpoint", "restore_chunk", "restore_end"), None),
    Row((_S.STEPPING,), _W, ("ack", "checkpoint", "snapshot_chunk", "snapshot_end"), None),
    Row((_S.STEPPING,), _W, ("ack.last", "fail.last"), _S.READY),
    # Liveness, and failures that end one request and not the world.
    Row(_ALIVE, _LW, ("ping", "pong", "fail"), None),
    # Refusal, until the data plane is being built.
    # A rank that voted yes may find the leader building already, so it fails instead.
    Row((*_MEMBERSHIP, *_GREETING, *_SETUP), _L, ("refuse",), _S.REFUSED),
    Row((*_MEMBERSHIP, *_GREETING, *(s for s in _SETUP if s is not _S.VOTED)), _W, ("refuse",),
        _S.REFUSED),
    Row((_S.REFUSED,), _LW, ("refuse",), None, Side.RECEIVER_ONLY, drop=True),
    Row((_S.REFUSED,), _L, (*_FROM_LEADER, "fail", "fail.sticky", "stop"), None,
        Side.RECEIVER_ONLY, drop=True),
    Row((_S.REFUSED,), _W, (*_FROM_WORKER, "fail", "fail.sticky"), None,
        Side.RECEIVER_ONLY, drop=True),
    # Failure. What the peer had in flight is checked and dropped.
    Row((*_ALIVE, _S.FAILED), _LW, ("fail.sticky",), _S.FAILED),
    Row((_S.DISMISSED,), _LW, ("fail.sticky",), None),
    Row((_S.STEPPING, _S.DRAINING), _W, ("ack.bad",), _S.FAILED),
    Row(_OVER, _L, (*_FROM_LEADER, "refuse", "fail"), None, Side.RECEIVER_ONLY, drop=True),
    Row(_OVER, _W, (*_FROM_WORKER, "refuse", "fail", "ack.bad"), None,
        Side.RECEIVER_ONLY, drop=True),
    # The end. The worker finishes what is outstanding, or after a failure just leaves.
    Row(_ALIVE, _L, ("stop",), _S.DRAINING),
    Row(_OVER, _L, ("stop",), _S.DISMISSED),
    Row((_S.DRAINING,), _L, ("checkpoint", "restore_chunk", "restore_end"), None),
    Row((_S.DRAINING,), _W, ("ack", "ack.last", "fail.last", "checkpoint", "snapshot_chunk",
                             "snapshot_end"), None),
    Row((_S.DRAINING,), _W, _FROM_WORKER_SETUP, None, Side.RECEIVER_ONLY),
    Row((_S.DRAINING,), _W, ("refuse",), _S.REFUSED, Side.RECEIVER_ONLY),
    Row((_S.DRAINING, _S.DISMISSED), _W, ("bye",), _S.STOPPED),
    Row((_S.FAILED,), _W, ("bye",), _S.STOPPED, Side.RECEIVER_ONLY),
    Row((_S.STOPPED,), _L, ("ping", "pong", "fail", "fail.sticky", "stop", "checkpoint",
                            "restore_chunk", "restore_end"), None,
        Side.RECEIVER_ONLY, drop=True),
)  # fmt: skip


@attrs.frozen
class Key:
    """A move seen from one end: `role` is ours, `sender` may be us or the peer."""

    role: Role
    state: State
    sender: Role
    label: str


@attrs.frozen
class Move:
    """Where a legal move leads, and whether the receiver delivers its message."""

    target: State
    drop: bool = False


def _expand(rows: tuple[Row, ...]) -> dict[Key, Move]:
    table: dict[Key, Move] = {}
    for row in rows:
        for state in row.states:
            for sender in row.sender:
                roles = _LW if row.side is Side.BOTH else (sender.peer,)
                for role in roles:
                    for label in row.labels:
                        key = Key(role, state, sender, label)
                        if key in table:
                            raise ValueError(f"{key} stands in two rows")
                        table[key] = Move(row.target or state, row.drop)
    return table


TABLE = MappingProxyType(_expand(ROWS))


def _by_end() -> dict[tuple[Role, State, Role], tuple[str, ...]]:
    found: dict[tuple[Role, State, Role], list[str]] = {}
    for key in TABLE:
        found.setdefault((key.role, key.state, key.sender), []).append(key.label)
    return {end: tuple(sorted(labels)) for end, labels in found.items()}


_LEGAL = _by_end()


def legal_now(role: Role, state: State, sender: Role) -> tuple[str, ...]:
    """Labels that `sender` may send in a state as `role` sees it, sorted; for texts and docs."""
    return _LEGAL.get((role, state, sender), ())
