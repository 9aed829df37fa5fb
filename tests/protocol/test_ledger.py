"""The numbers: every rule is broken once, by the sender and by the receiver's peer."""

from __future__ import annotations

import attrs
import pytest

from ds4.errors import LocalProtocolError, RemoteProtocolError
from ds4.protocol.codec import CODEC, Envelope
from ds4.protocol.frame import frame
from ds4.protocol.limits import Limits
from ds4.protocol.messages import (
    Ack,
    Bye,
    Checkpoint,
    Fail,
    NcclId,
    Ping,
    Pong,
    RestoreBegin,
    RestoreChunk,
    RestoreEnd,
    Role,
    SessionOpen,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    StepMode,
    Stop,
)
from fuzz.conversation import CONFIG, SETUP, Pair, hello, step

L, W = Role.LEADER, Role.WORKER
HASH = bytes(32)
LIMITS = Limits(max_window=2, max_ops=2, max_pings=2)


def ack(i, about=1, **rest):
    return Ack(about=about, id=i, **rest)


def ask(boundary=0, i=1):
    return Checkpoint(step=i, boundary=boundary, stop=False)


def opening(op):
    return SessionOpen(op=op, session=op, n_ctx=1)


BEGIN = ((L, SnapshotBegin(op=1, session=1)),)
RESTORE = ((L, RestoreBegin(op=1, session=1, n_bytes=3)),)

# name: (legal messages after READY, the illegal one, reason)
RULES = {
    "a step id that skips": ([(L, step(1))], (L, step(3)), "step_id"),
    "a step id that repeats": ([(L, step(1))], (L, step(1)), "step_id"),
    "a step beyond the window": (
        [(L, step(1)), (L, step(2))], (L, step(3)), "window"),
    "a graph replay of a bucket that does not exist": (
        [], (L, attrs.evolve(step(1), mode=int(StepMode.GRAPH), bucket=4)), "bucket"),
    "an ack for a step that was never sent": ([(L, step(1))], (W, ack(2)), "answer_unknown"),
    "a second ack for a step": (
        [(L, step(1)), (L, step(2)), (W, ack(1))], (W, ack(1)), "answer_unknown"),
    "a second ack with nothing outstanding": (
        [(L, step(1)), (W, ack(1))], (W, ack(1)), "answer_unknown"),
    "an ack out of order": ([(L, step(1)), (L, step(2))], (W, ack(2)), "answer_order"),
    "an ack of an operation before an older step": (
        [(L, step(1)), (L, opening(1))], (W, ack(1, about=2)), "answer_order"),
    "an ack for an operation under a step's id": (
        [(L, opening(1))], (W, ack(1)), "answer_unknown"),
    "a refusal of a step that was never sent": (
        [(L, step(1))], (W, Fail(code="x", rank=1, about=1, id=2, sticky=False)),
        "answer_unknown"),
    "a leader that fails a step": (
        [(L, step(1))], (L, Fail(code="x", rank=0, about=1, id=1, sticky=False)),
        "fail_subject"),
    "an operation id that skips": ([(L, opening(1))], (L, opening(3)), "op_id"),
    "too many operations": (
        [(L, opening(1)), (L, opening(2))], (L, opening(3)), "ops"),
    "too many pings": ([(W, Ping(time_ns=1)), (W, Ping(time_ns=2))], (W, Ping(time_ns=3)), "pings"),
    "a pong for no ping": ([], (W, Pong(time_ns=1)), "pong"),
    "a pong for a younger ping": (
        [(L, Ping(time_ns=1)), (L, Ping(time_ns=2))], (W, Pong(time_ns=2)), "pong"),
    "a second pong": ([(L, Ping(time_ns=1)), (W, Pong(time_ns=1))], (W, Pong(time_ns=1)), "pong"),
    "a checkpoint of another step": ([(L, step(1))], (W, ask(i=2)), "checkpoint"),
    "a checkpoint that skips a boundary": ([(L, step(1))], (W, ask(1)), "checkpoint"),
    "an answer to no checkpoint": ([(L, step(1))], (L, ask()), "checkpoint"),
    "a checkpoint asked twice": ([(L, step(1)), (W, ask())], (W, ask()), "checkpoint"),
    "a checkpoint answered for another boundary": (
        [(L, step(1)), (W, ask())], (L, ask(1)), "checkpoint"),
    "a boundary that repeats": (
        [(L, step(1)), (W, ask()), (L, ask())], (W, ask(0)), "checkpoint"),
    "a step that ends while a checkpoint is open": (
        [(L, step(1)), (W, ask())], (W, ack(1)), "checkpoint"),
    "a step that is refused while a checkpoint is open": (
        [(L, step(1)), (W, ask())],
        (W, Fail(code="x", rank=1, about=1, id=1, sticky=False)), "checkpoint"),
    "a failed ack out of order": (
        [(L, step(1)), (L, step(2))], (W, ack(2, status=1)), "answer_order"),
    "a snapshot piece out of order": (
        [*BEGIN], (W, SnapshotChunk(op=1, index=1, data=b"x")), "transfer"),
    "a snapshot piece nobody asked for": (
        [(L, opening(1))], (W, SnapshotChunk(op=1, index=0, data=b"x")), "transfer"),
    "a snapshot piece before an older step's answer": (
        [(L, step(1)), *BEGIN], (W, SnapshotChunk(op=1, index=0, data=b"x")), "transfer"),
    "a snapshot end with another size": (
        [*BEGIN, (W, SnapshotChunk(op=1, index=0, data=b"x"))],
        (W, SnapshotEnd(op=1, n_bytes=2, hash=HASH)), "transfer"),
    "a snapshot piece after the end": (
        [*BEGIN, (W, SnapshotEnd(op=1, n_bytes=0, hash=HASH))],
        (W, SnapshotChunk(op=1, index=0, data=b"x")), "transfer"),
    "a snapshot that ends twice": (
        [*BEGIN, (W, SnapshotEnd(op=1, n_bytes=0, hash=HASH))],
        (W, SnapshotEnd(op=1, n_bytes=0, hash=HASH)), "transfer"),
    "a snapshot acknowledged before its end": ([*BEGIN], (W, ack(1, about=2)), "transfer"),
    "a second restore while one is on its way": (
        [*RESTORE], (L, RestoreBegin(op=2, session=2, n_bytes=1)), "transfer"),
    "a restore piece out of order": (
        [*RESTORE], (L, RestoreChunk(op=1, index=1, data=b"x")), "transfer"),
    "a restore piece of another operation": (
        [*RESTORE], (L, RestoreChunk(op=2, index=0, data=b"x")), "transfer"),
    "a restore longer than declared": (
        [*RESTORE], (L, RestoreChunk(op=1, index=0, data=b"1234")), "transfer"),
    "a restore shorter than declared": (
        [*RESTORE, (L, RestoreChunk(op=1, index=0, data=b"12"))],
        (L, RestoreEnd(op=1, hash=HASH)), "transfer"),
    "a restore answered before its end": (
        [*RESTORE], (W, Fail(code="x", rank=1, about=2, id=1, sticky=False)), "transfer"),
    "a goodbye before everything is answered": (
        [(L, step(1)), (L, Stop())], (W, Bye()), "bye"),
}  # fmt: skip


def check_both(pair, sender, message, reason):
    """The receiver refuses the forged frame, and the sender would not make it."""
    ledger = pair.ends[sender.peer]._ledger
    n, epoch = ledger.next_header(sender, message)
    forged = frame(CODEC.encode(Envelope(n, epoch, message), 0), 2**26)
    before = pair.ends[sender.peer].outstanding
    with pytest.raises(RemoteProtocolError) as remote:
        pair.deliver(sender, forged)
    with pytest.raises(LocalProtocolError) as local:
        pair.ends[sender].send(message)
    assert (reason, reason) == (remote.value.reason, local.value.reason)
    assert before == pair.ends[sender.peer].outstanding
    assert message.NAME in str(remote.value)


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_refused_at_both_ends(name):
    before, (sender, message), reason = RULES[name]
    pair = Pair(LIMITS).play(SETUP).play(tuple(before))
    check_both(pair, sender, message, reason)


def test_a_window_over_the_limit_is_refused():
    pair = Pair(Limits(max_window=1)).play(SETUP[:4])
    check_both(pair, L, CONFIG, "window")


def test_a_bootstrap_without_an_offer_of_every_rank_is_refused():
    pair = Pair().play(SETUP[:11])
    check_both(pair, L, NcclId(transport="tcp", offers=(b"only one",)), "offers")


def test_a_hello_of_the_other_role_is_refused():
    check_both(Pair(), W, hello(L), "two_leaders")
    check_both(Pair().play(SETUP[:1]), L, hello(W), "two_workers")


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_frame_of_another_epoch_is_refused(shift):
    pair = Pair().play(SETUP)
    n, epoch = pair.worker._ledger.next_header(L, step(1))
    with pytest.raises(RemoteProtocolError, match=f"epoch {epoch + shift}, expected 1") as caught:
        pair.deliver(L, frame(CODEC.encode(Envelope(n, epoch + shift, step(1)), 0), 10**6))
    assert caught.value.reason == "epoch"


def test_the_window_opens_again_with_each_answer():
    pair = Pair(LIMITS).play(SETUP).play(((L, step(1)), (L, step(2))))
    for i in range(1, 20):
        pair.play(((W, ack(i)), (L, step(i + 2))))


def test_a_refused_step_frees_its_place_in_the_window():
    pair = Pair(LIMITS).play(SETUP).play(((L, step(1)), (L, step(2))))
    pair.play((
        (W, Fail(code="invalid_request", rank=1, about=1, id=1, sticky=False)),
        (L, step(3)),
        (W, ack(2)),
        (W, ack(3)),
    ))  # fmt: skip


def test_a_failed_snapshot_may_end_early():
    pair = Pair().play(SETUP).play(BEGIN)
    pair.play((
        (W, SnapshotChunk(op=1, index=0, data=b"x")),
        (W, Fail(code="snapshot", rank=1, about=2, id=1, sticky=False)),
        (L, opening(2)),
    ))  # fmt: skip


def test_boundaries_count_anew_in_the_next_step():
    pair = Pair().play(SETUP)
    for i in (1, 2):
        pair.play((
            (L, step(i)),
            (W, ask(0, i)), (L, ask(0, i)),
            (W, ask(1, i)), (L, ask(1, i)),
            (W, ack(i)),
        ))  # fmt: skip


def test_a_stop_now_leaves_what_is_outstanding():
    Pair().play(SETUP).play(((L, step(1)), (L, Stop(mode=1)), (W, Bye())))


def test_a_failed_ack_may_cross_the_answer_to_a_checkpoint():
    """Found by the interleaving test: the answer in flight was held against the leader."""
    pair = Pair().play(SETUP).play(((L, step(1)), (W, ask())))
    answer = pair.leader.send(ask())
    pair.send(W, ack(1, status=3))
    assert pair.deliver(L, answer) == []
