"""The transition table: every legal move can happen, every other one is refused at both ends."""

from __future__ import annotations

import collections

import pytest

from ds4.errors import LocalProtocolError, RemoteProtocolError
from ds4.protocol.codec import CODEC, Envelope
from ds4.protocol.frame import frame
from ds4.protocol.messages import (
    Ack,
    Bye,
    Checkpoint,
    Fail,
    Invalidate,
    NcclVote,
    Ping,
    Pong,
    Refuse,
    RestoreBegin,
    RestoreChunk,
    RestoreEnd,
    Role,
    SessionClose,
    SessionOpen,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Step,
    Stop,
    StopMode,
    Subject,
)
from ds4.protocol.state import ROWS, TABLE, Row, Side, State, _expand, legal_now
from fuzz.conversation import CHALLENGES, EXAMPLES, KEY, RUN, SETUP, Pair, step

L, W = Role.LEADER, Role.WORKER
STICKY = Fail(code="device", rank=1, text="lost")
NO = NcclVote(usable=False, transport="tcp", reason="no library")
BAD_ACK = Ack(about=int(Subject.STEP), id=1, status=9)
UPTO = {
    State.CHALLENGE: (),
    State.CHALLENGED: CHALLENGES[:1],
    State.COUNTERED: CHALLENGES[:2],
    State.PROVEN: CHALLENGES[:3],
    State.HELLO: (),
    State.GREETED: SETUP[:1],
    State.COMPARING: SETUP[:2],
    State.APPROVED: SETUP[:3],
    State.AGREED: SETUP[:4],
    State.CONFIGURING: SETUP[:5],
    State.CONFIGURED: SETUP[:6],
    State.LOADING: SETUP[:7],
    State.LOADED: SETUP[:9],
    State.VOTING: SETUP[:10],
    State.VOTED: SETUP[:11],
    State.OUTVOTED: (*SETUP[:10], (W, NO)),
    State.BOOTSTRAP: SETUP[:12],
    State.WARMING: SETUP[:13],
    State.READY: SETUP,
    State.STEPPING: (*SETUP, (L, step(1))),
    State.DRAINING: (*SETUP, (L, Stop())),
    State.STOPPED: (*SETUP, (L, Stop()), (W, Bye())),
    State.REFUSED: (*SETUP[:2], (L, Refuse(reason="x", text="y"))),
    State.FAILED: (*SETUP, (W, STICKY)),
    State.DISMISSED: (*SETUP, (W, STICKY), (L, Stop())),
}


def at(state):
    """A pair in a state, reached by its own messages."""
    key = KEY if state.value.startswith(("chall", "count", "proven")) else None
    pair = Pair(key=key)
    pair.play(UPTO[state])
    assert (state, state) == (pair.leader.state, pair.worker.state)
    return pair


def forged(pair, sender, message):
    """The frame that `sender` would send if nothing stopped it, with the header expected next."""
    ledger = pair.ends[sender.peer]._ledger
    n, epoch = ledger.next_header(sender, message)
    return frame(CODEC.encode(Envelope(n, epoch, message), 0), 2**26)


def names(labels):
    base = {"vote.yes": "nccl_vote", "vote.no": "nccl_vote"}
    return {base.get(label, label.partition(".")[0]) for label in labels}


@pytest.mark.parametrize("state", list(State), ids=lambda s: s.value)
def test_every_state_can_be_reached(state):
    at(state)


@pytest.mark.parametrize("state", list(State), ids=lambda s: s.value)
@pytest.mark.parametrize("sender", list(Role), ids=lambda r: r.name.lower())
def test_a_message_that_no_row_names_is_refused_by_its_sender(state, sender):
    legal = names(label for label in legal_now(sender, state, sender))
    for message in EXAMPLES:
        if message.NAME in legal:
            continue
        pair = at(state)
        with pytest.raises(LocalProtocolError) as caught:
            pair.ends[sender].send(message)
        assert caught.value.reason in {"state", "answer_unknown"}
        assert message.NAME in str(caught.value)
        assert state.value in str(caught.value)


@pytest.mark.parametrize("state", list(State), ids=lambda s: s.value)
@pytest.mark.parametrize("sender", list(Role), ids=lambda r: r.name.lower())
def test_a_message_that_no_row_names_is_refused_by_its_receiver(state, sender):
    legal = names(legal_now(sender.peer, state, sender))
    for message in EXAMPLES:
        if message.NAME in legal:
            continue
        pair = at(state)
        with pytest.raises(RemoteProtocolError) as caught:
            pair.deliver(sender, forged(pair, sender, message))
        assert caught.value.reason in {"state", "answer_unknown"}
        assert message.NAME in str(caught.value)


@pytest.mark.parametrize("state", list(State), ids=lambda s: s.value)
@pytest.mark.parametrize("sender", list(Role), ids=lambda r: r.name.lower())
def test_what_may_still_be_in_flight_is_received_but_can_not_be_sent(state, sender):
    sendable = names(legal_now(sender, state, sender))
    receivable = names(legal_now(sender.peer, state, sender))
    assert sendable <= receivable
    assert (state in _INTERRUPTED) or sendable == receivable


_INTERRUPTED = {
    State.DRAINING,
    State.STOPPED,
    State.REFUSED,
    State.FAILED,
    State.DISMISSED,
}


def test_both_ends_agree_on_where_a_move_leads():
    for key, move in TABLE.items():
        other = TABLE.get(type(key)(key.role.peer, key.state, key.sender, key.label))
        if other is not None:
            assert move == other


def test_before_ready_only_one_side_may_take_the_next_step():
    """So a link never waits for both, or for neither."""
    for state in State:
        if state.value in {"ready", "stepping", "draining", "dismissed", "failed"}:
            continue
        movers = {
            key.sender
            for key, move in TABLE.items()
            if key.state is state
            and key.role is key.sender
            and key.label not in {"stop", "refuse", "fail.sticky"}
            and move.target is not state
        }
        assert len(movers) == (0 if state in {State.STOPPED, State.REFUSED, State.OUTVOTED} else 1)


def test_every_row_is_needed_and_none_repeats():
    with pytest.raises(ValueError, match="two rows"):
        _expand((*ROWS, Row((State.HELLO,), (W,), ("hello",), State.GREETED)))
    assert all(row.side is Side.BOTH or row.drop or State.DRAINING in row.states
               or State.FAILED in row.states for row in ROWS)  # fmt: skip


def test_every_legal_move_that_can_be_sent_happens_in_some_conversation():
    """Every (state, label) that an end may send is exercised, so no row is a dead letter."""
    seen = collections.Counter()

    def play(pair, script):
        for sender, message in script:
            end = pair.ends[sender]
            label = end._ledger.label(sender, message)
            seen[end.state, sender, label] += 1
            assert pair.send(sender, message) in ([message], [])

    for state in State:
        for sender in Role:
            for label in legal_now(sender, state, sender):
                for script in _scripts(state, sender, label):
                    pair = at(state)
                    play(pair, script)
    play(Pair(), SETUP + RUN)
    for script in DRAINS:
        play(at(State.READY), script)
    expected = {(key.state, key.sender, key.label) for key in TABLE if key.role is key.sender}
    assert expected - set(seen) == set()


def _scripts(state, sender, label):
    """Messages that end in `label` sent by `sender` in `state`."""
    first = 1 if state in {State.READY, State.DRAINING} else 2
    examples = {message.NAME: message for message in reversed(EXAMPLES)}
    op = {"session_open": SessionOpen(op=9, session=1, n_ctx=9),
          "session_close": SessionClose(op=9, session=1),
          "snapshot_begin": SnapshotBegin(op=9, session=1),
          "restore_begin": RestoreBegin(op=9, session=1, n_bytes=3)}  # fmt: skip
    match label:
        case "vote.yes":
            message = NcclVote(usable=True, transport="tcp")
        case "vote.no":
            message = NO
        case "fail":
            message = Fail(code="x", rank=0, sticky=False)
        case "fail.sticky":
            message = STICKY
        case "step":
            message = step(first)
        case "ping" | "pong":
            other = Ping(time_ns=3)
            return [[(sender, other)] if label == "ping" else
                    [(sender.peer, other), (sender, Pong(time_ns=3))]]  # fmt: skip
        case "hello" | "challenge" | "response":
            source = SETUP if label == "hello" else CHALLENGES
            message = next(msg for who, msg in source if who is sender and label == msg.NAME)
        case _ if label in op:
            message = op[label]
        case "restore_chunk" | "restore_end" if state is State.STEPPING:
            chunk = RestoreChunk(op=9, index=0, data=b"abc")
            script = [(L, op["restore_begin"]), (L, chunk)]
            return [[*script, (L, RestoreEnd(op=9, hash=bytes(32)))]]
        case "ack" | "ack.last" | "ack.bad" | "fail.last" | "checkpoint" | "snapshot_chunk" \
                | "snapshot_end" | "restore_chunk" | "restore_end":  # fmt: skip
            return [] if state is State.DRAINING else [_answers(label)]
        case _:
            message = examples[label]
    return [[(sender, message)]]


def _answers(label):
    """In STEPPING with step 1 outstanding."""
    ok = Ack(about=1, id=1)
    snapshot = [(L, SnapshotBegin(op=1, session=1)), (W, ok),
                (W, SnapshotChunk(op=1, index=0, data=b"x"))]  # fmt: skip
    question = Checkpoint(step=1, boundary=0, stop=True)
    return {
        "ack": [(L, step(2)), (W, ok)],
        "ack.last": [(W, ok)],
        "ack.bad": [(W, BAD_ACK)],
        "fail.last": [(W, Fail(code="x", rank=1, about=1, id=1, sticky=False))],
        "checkpoint": [(W, question), (L, question)],
        "snapshot_chunk": snapshot,
        "snapshot_end": [*snapshot, (W, SnapshotEnd(op=1, n_bytes=1, hash=bytes(32)))],
    }[label]


def _drain(mode):
    question = Checkpoint(step=1, boundary=0, stop=True)
    return (
        (L, step(1)),
        (L, SnapshotBegin(op=1, session=1)),
        (L, RestoreBegin(op=2, session=1, n_bytes=2)),
        (L, Stop(mode=int(mode))),
        (L, Stop(mode=int(mode))),
        (W, question),
        (L, question),
        (W, Ack(about=1, id=1)),
        (W, SnapshotChunk(op=1, index=0, data=b"x")),
        (W, SnapshotEnd(op=1, n_bytes=1, hash=bytes(32))),
        (W, Ack(about=2, id=1)),
        (L, RestoreChunk(op=2, index=0, data=b"xy")),
        (L, RestoreEnd(op=2, hash=bytes(32))),
        (W, Fail(code="x", rank=1, about=2, id=2, sticky=False)),
        (W, Bye()),
    )


DRAINS = (
    _drain(StopMode.DRAIN),
    ((L, step(1)), (L, Stop()), (W, Ack(about=1, id=1)), (W, Bye())),
    ((L, step(1)), (L, Stop()), (W, BAD_ACK), (L, Stop()), (W, Bye())),
    ((L, step(1)), (L, Stop()), (W, STICKY), (L, Stop()), (W, Bye())),
    ((L, step(1)), (L, Stop(mode=1)), (W, Bye())),
)
"""From READY to STOPPED by way of DRAINING."""


@pytest.mark.parametrize("script", [*DRAINS, _drain(StopMode.NOW)])
def test_a_stop_lets_everything_outstanding_finish_or_go(script):
    pair = at(State.READY).play(script)
    assert (pair.leader.state, pair.worker.state) == (State.STOPPED, State.STOPPED)


def test_no_step_is_legal_anywhere_before_ready():
    """Invariant I1, read off the table."""
    states = {key.state for key in TABLE if key.label == "step" and key.role is key.sender}
    assert states == {State.READY, State.STEPPING}


def test_after_a_failure_no_result_is_delivered_and_no_step_can_be_sent():
    """Invariant I5: what was in flight when the leader failed the epoch is dropped."""
    pair = at(State.STEPPING)
    late = pair.worker.send(Ack(about=1, id=1))
    assert pair.deliver(L, pair.leader.send(STICKY)) == [STICKY]
    assert pair.deliver(W, late) == []
    with pytest.raises(LocalProtocolError, match="failed"):
        pair.leader.send(step(2))


def test_the_table_speaks_of_no_message_that_does_not_exist():
    known = {message.NAME for message in EXAMPLES}
    for key in TABLE:
        assert names([key.label]) <= known
    assert Step.NAME in known
    assert Invalidate.NAME in known
