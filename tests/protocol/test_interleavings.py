"""Two honest ends never accuse each other, however long their frames stay in flight.

Each end sends whatever its own table and ledger allow; frames wait in two queues and arrive when
the test says so. Crossing messages (a stop against an ack, a failure against a step, pings both
ways) are where a protocol of two state copies goes wrong.
"""

from __future__ import annotations

import collections
import copy

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import LocalProtocolError
from ds4.protocol.frame import FrameBuffer
from ds4.protocol.messages import (
    Ack,
    Bye,
    Checkpoint,
    Fail,
    Invalidate,
    LoadProgress,
    NcclVote,
    Ping,
    Pong,
    Refuse,
    RestoreBegin,
    RestoreChunk,
    RestoreEnd,
    Rewind,
    Role,
    SessionOpen,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Stop,
    Subject,
)
from ds4.protocol.state import State
from fuzz.conversation import SETUP, Pair, step

L, W = Role.LEADER, Role.WORKER


def candidates(end):
    """Messages that might be legal now, with the numbers that would be right."""
    ledger = end._ledger
    yield from (message for sender, message in SETUP if sender is end.role)
    yield Refuse(reason="x", text="y")
    yield Fail(code="x", rank=0)
    yield Fail(code="x", rank=0, sticky=False)
    yield Ping(time_ns=len(ledger._from[end.role].pings))
    for time_ns in list(ledger._from[end.role.peer].pings)[:1]:
        yield Pong(time_ns=time_ns)
    yield NcclVote(usable=False, transport="tcp", reason="no")
    boundary = (ledger._boundary or (0, 0))[1]
    running = [i for about, i in ledger.outstanding if about is Subject.STEP][:1]
    yield from (Checkpoint(step=i, boundary=boundary, stop=False) for i in running)
    if end.role is L:
        op = 1 if ledger._last_op is None else ledger._last_op + 1
        yield step(1 if ledger._last_step is None else ledger._last_step + 1)
        yield SessionOpen(op=op, session=op, n_ctx=10)
        yield SnapshotBegin(op=op, session=1)
        yield RestoreBegin(op=op, session=1, n_bytes=2)
        if ledger._restore is not None:
            transfer = ledger._restore
            yield RestoreChunk(op=transfer.op, index=transfer.next_index, data=b"x")
            yield RestoreEnd(op=transfer.op, hash=bytes(32))
        yield Rewind(op=op, session=1, length=0)
        yield Invalidate(session=1)
        yield Stop(mode=0)
        yield Stop(mode=1)
        return
    yield Bye()
    yield LoadProgress(stage="x", done=0, total=0)
    for about, ident in ledger.outstanding[:1]:
        yield Ack(about=int(about), id=ident)
        yield Ack(about=int(about), id=ident, status=1)
        yield Fail(code="x", rank=1, about=int(about), id=ident, sticky=False)
        for transfer in [ledger._snapshots[ident]] if ident in ledger._snapshots else []:
            yield SnapshotChunk(op=ident, index=transfer.next_index, data=b"x")
            yield SnapshotEnd(op=ident, n_bytes=transfer.n_bytes, hash=bytes(32))


def clone(ledger):
    """A copy that can be changed; messages are frozen and may be shared."""
    copied = copy.copy(ledger)
    copied._from = {
        role: attrs.evolve(side, pings=collections.deque(side.pings))
        for role, side in ledger._from.items()
    }
    copied._outstanding = collections.deque(ledger._outstanding)
    copied._snapshots = {op: attrs.evolve(t) for op, t in ledger._snapshots.items()}
    copied._restore = ledger._restore and attrs.evolve(ledger._restore)
    return copied


def allowed(end, message):
    """Whether this end may really send it."""
    trial = copy.copy(end)
    trial._ledger = clone(end._ledger)
    trial._buffer = FrameBuffer(64)
    try:
        trial.send(message)
    except LocalProtocolError:
        return False
    return True


class Wire:
    """Two ends with frames in flight."""

    def __init__(self, start):
        self.pair = Pair()
        self.pair.play(SETUP[:start])
        self.flying = {L: collections.deque(), W: collections.deque()}

    def send(self, sender, message):
        self.flying[sender].append(self.pair.ends[sender].send(message))

    def arrive(self, sender):
        self.pair.deliver(sender, self.flying[sender].popleft())


ENDS = (Refuse, Stop, Fail)


def choose(end, data):
    """The first allowed candidate after a drawn one, or None."""
    # Interruptions end the story; take them rarely enough that something happens before.
    dramatic = data.draw(st.integers(0, 9)) == 0
    found = [m for m in candidates(end) if dramatic or not isinstance(m, ENDS)]
    start = data.draw(st.integers(0, len(found) - 1))
    return next((m for m in found[start:] + found[:start] if allowed(end, m)), None)


@settings(max_examples=60)
@given(st.sampled_from([0, 4, 9, 15]), st.data())
def test_honest_ends_never_accuse_each_other(start, data):
    wire = Wire(start)
    for _ in range(data.draw(st.integers(1, 30))):
        role = data.draw(st.sampled_from(list(Role)))
        if wire.flying[role] and data.draw(st.booleans()):
            wire.arrive(role)
        elif message := choose(wire.pair.ends[role], data):
            wire.send(role, message)
    for role in Role:
        while wire.flying[role]:
            wire.arrive(role)
    check_rest(wire.pair)


def check_rest(pair):
    """With nothing in flight both ends hold the same numbers, and tell the same story."""
    ends = (pair.leader, pair.worker)
    over = {State.STOPPED, State.REFUSED, State.FAILED, State.DISMISSED}
    states = {end.state for end in ends}
    assert len(states) == 1 or states <= over | {State.DRAINING}
    assert pair.leader.outstanding == pair.worker.outstanding or states & over
    for role in Role:
        counts = {end._ledger._from[role].n for end in ends}
        assert len(counts) == 1


CROSSINGS = {
    "a stop against an ack": ([(L, step(1))], (L, Stop()), (W, Ack(about=1, id=1))),
    "a failure against a step": ([], (W, Fail(code="x", rank=1)), (L, step(1))),
    "a bad ack against a step": (
        [(L, step(1))],
        (W, Ack(about=1, id=1, status=2)),
        (L, step(2)),
    ),
    "a failure against a failure": ([], (W, Fail(code="x", rank=1)), (L, Fail(code="y", rank=0))),
    "a stop against a failure": ([], (L, Stop()), (W, Fail(code="x", rank=1))),
    "a vote against a ping": (
        [],
        (L, NcclVote(usable=True, transport="tcp")),
        (W, Ping(time_ns=1)),
    ),
    "a refusal against a ping": (
        [(L, NcclVote(usable=True, transport="tcp"))],
        (L, Refuse(reason="x", text="y")),
        (W, Ping(time_ns=1)),
    ),
}


@pytest.mark.parametrize("name", CROSSINGS)
def test_crossing_messages_are_both_accepted(name):
    before, first, second = CROSSINGS[name]
    wire = Wire(len(SETUP))
    wire.pair.play(tuple(before))
    wire.send(*first)
    wire.send(*second)
    wire.arrive(L)
    wire.arrive(W)
    check_rest(wire.pair)


def test_a_goodbye_that_crosses_a_failure_still_ends_the_link():
    wire = Wire(len(SETUP))
    wire.pair.play(((L, Stop()),))
    wire.send(W, Bye())
    wire.send(L, Fail(code="x", rank=0))
    wire.arrive(W)
    wire.arrive(L)
    assert (wire.pair.leader.state, wire.pair.worker.state) == (State.STOPPED, State.STOPPED)
