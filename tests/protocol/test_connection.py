"""`Connection`: errors are sticky, cuts do not matter, memory is bounded, an end has a meaning."""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import ConfigError, LocalProtocolError, ProtocolError, RemoteProtocolError
from ds4.protocol.connection import Closed, Connection, PeerVersion
from ds4.protocol.limits import Limits
from ds4.protocol.messages import (
    Ack,
    Bye,
    Fail,
    HelloOk,
    Load,
    Ping,
    Refuse,
    Role,
    SnapshotBegin,
    SnapshotChunk,
    Stop,
    Subject,
)
from ds4.protocol.state import State
from ds4.protocol.version import CURRENT, PREFACE_BYTES
from fuzz.conversation import CHALLENGES, CONFIG, GEOMETRY, KEY, RUN, SETUP, Pair, hello, step

L, W = Role.LEADER, Role.WORKER


def transcript(script, key=None):
    """The bytes of each direction of a conversation, and the messages in them."""
    pair = Pair(key=key)
    data = {role: CURRENT.preface() for role in Role}
    said = {role: [] for role in Role}
    for sender, message in script:
        frame = pair.ends[sender].send(message)
        data[sender] += frame
        said[sender].append(message)
        assert pair.deliver(sender, frame) == [message]
    return data, said


def replay(role, script, data, cuts, key=None):
    """Play our own part at one end while the peer's bytes arrive in pieces; return its events."""
    end = Connection(role, key=key)
    end.start()
    edges = [0, *sorted(cuts), len(data)]
    ours = [message for sender, message in script if sender is role]
    order = [sender for sender, _ in script]
    events, at, heard = [], 0, 0

    def speak():
        nonlocal at
        while at < len(order):
            if order[at] is role:
                if not any(isinstance(event, PeerVersion) for event in events):
                    return
                end.send(ours.pop(0))
            elif order[: at + 1].count(role.peer) > heard:
                return
            at += 1

    for start, stop in itertools.pairwise(edges):
        end.receive_data(data[start:stop])
        while (event := end.next_event()) is not None:
            events.append(event)
            heard += not isinstance(event, PeerVersion)
            speak()
    return events


SCRIPT = CHALLENGES + SETUP + RUN


@pytest.fixture(scope="module")
def conversation():
    return transcript(SCRIPT, KEY)


@pytest.mark.parametrize("role", list(Role))
@settings(max_examples=50)
@given(data=st.data())
def test_any_cut_of_a_conversation_gives_the_same_events(conversation, role, data):
    heard, said = conversation
    stream = heard[role.peer]
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
    assert replay(role, SCRIPT, stream, cuts, KEY)[1:] == said[role.peer]


@pytest.mark.parametrize("role", list(Role))
def test_a_conversation_byte_by_byte_gives_the_same_events(conversation, role):
    heard, said = conversation
    stream = heard[role.peer]
    events = replay(role, SCRIPT, stream, range(len(stream)), KEY)
    assert [type(events[0]), *events[1:]] == [PeerVersion, *said[role.peer]]


def test_a_frame_with_a_wrong_number_is_refused():
    """A frame that is lost, repeated or moved shows at the next one."""
    pair = Pair().play(SETUP)
    pair.leader.send(Ping(time_ns=1))
    with pytest.raises(RemoteProtocolError, match="number 7, expected 6") as caught:
        pair.deliver(L, pair.leader.send(Ping(time_ns=2)))
    assert caught.value.reason == "frame_number"


def test_a_repeated_frame_is_refused():
    pair = Pair().play(SETUP)
    data = pair.leader.send(Ping(time_ns=1))
    pair.deliver(L, data)
    with pytest.raises(RemoteProtocolError, match="frame number"):
        pair.deliver(L, data)


def test_an_error_is_sticky_and_frees_the_buffer():
    pair = Pair().play(SETUP)
    pair.worker.receive_data(b"\0\0\0\0" + b"x" * 1000)
    with pytest.raises(RemoteProtocolError) as first:
        pair.worker.next_event()
    pair.worker.receive_data(pair.leader.send(Ping(time_ns=1)))
    with pytest.raises(RemoteProtocolError) as second:
        pair.worker.next_event()
    assert first.value is second.value is pair.worker.error
    assert pair.worker.buffered_bytes == 0
    with pytest.raises(LocalProtocolError, match="frame length 0"):
        pair.worker.send(Ping(time_ns=1))


def test_after_an_error_one_farewell_may_be_sent():
    pair = Pair().play(SETUP)
    pair.worker.receive_data(b"\0\0\0\0")
    with pytest.raises(RemoteProtocolError):
        pair.worker.next_event()
    farewell = Fail(code="protocol_remote", rank=1, text="frame length 0")
    assert pair.send(W, farewell) == [farewell]
    with pytest.raises(LocalProtocolError):
        pair.worker.send(farewell)
    assert pair.leader.state is State.FAILED


def test_an_illegal_send_ends_the_conversation_and_emits_nothing():
    pair = Pair().play(SETUP[:4])
    with pytest.raises(LocalProtocolError, match="legal: config, fail") as caught:
        pair.leader.send(Load())
    assert caught.value.reason == "state"
    with pytest.raises(LocalProtocolError):
        pair.leader.next_event()
    goodbye = Refuse(reason="bug", text="illegal load")
    assert pair.send(L, goodbye) == [goodbye]


def test_a_message_over_the_frame_limit_changes_nothing():
    pair = Pair(Limits(max_frame_bytes=4096)).play(SETUP)
    pair.play(((L, SnapshotBegin(op=1, session=1)),))
    with pytest.raises(LocalProtocolError, match="4096") as caught:
        pair.worker.send(SnapshotChunk(op=1, index=0, data=bytes(4096)))
    assert caught.value.reason == "frame_length"
    pair.play(((W, SnapshotChunk(op=1, index=0, data=bytes(4000))),))


def test_a_poisoned_connection_says_nothing_more():
    pair = Pair().play(SETUP)
    pair.leader.poison("the write of a step was cancelled half way")
    for act in (
        lambda: pair.leader.send(Ping(time_ns=1)),
        lambda: pair.leader.send(Fail(code="x", rank=0)),
        pair.leader.next_event,
    ):
        with pytest.raises(LocalProtocolError, match="half way"):
            act()


def test_poison_keeps_the_first_error():
    pair = Pair()
    pair.worker.receive_data(b"\0\0\0\0")
    with pytest.raises(RemoteProtocolError):
        pair.worker.next_event()
    pair.worker.poison("later")
    with pytest.raises(RemoteProtocolError):
        pair.worker.next_event()


@pytest.mark.parametrize("size", [0, 3, 7, PREFACE_BYTES])
def test_an_end_during_the_preface_is_an_error(size):
    end = Connection(L)
    end.start()
    end.receive_data(CURRENT.preface()[:size])
    end.receive_eof()
    if size == PREFACE_BYTES:
        assert isinstance(end.next_event(), PeerVersion)
    with pytest.raises(RemoteProtocolError, match="closed the connection") as caught:
        end.next_event()
    assert caught.value.reason == "eof"


@pytest.mark.parametrize("n", range(len(SETUP + RUN) - 1))
def test_an_end_before_the_goodbye_is_an_error_at_both_ends(n):
    pair = Pair().play((SETUP + RUN)[: n + 1])
    for end in pair.ends.values():
        end.receive_eof()
        if end.state is State.STOPPED:
            continue
        with pytest.raises(RemoteProtocolError, match=end.state.value) as caught:
            end.next_event()
        assert caught.value.reason == "eof"


def test_an_end_inside_a_frame_says_so():
    pair = Pair().play(SETUP)
    pair.worker.receive_data(pair.leader.send(Ping(time_ns=1))[:6])
    assert pair.worker.next_event() is None
    pair.worker.receive_eof()
    with pytest.raises(RemoteProtocolError, match="6 bytes into a frame"):
        pair.worker.next_event()


ENDINGS = {
    "goodbye": ((L, Stop()), (W, Bye())),
    "refusal": None,
    "failure": ((W, Fail(code="device", rank=1)),),
    "dismissal": ((W, Fail(code="device", rank=1)), (L, Stop())),
}


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("role", list(Role))
def test_an_end_is_an_event_once_the_conversation_is_over(name, role):
    pair = Pair()
    if name == "refusal":
        pair.play((*SETUP[:1], (L, Refuse(reason="geometry", text="differs"))))
    else:
        pair.play(SETUP + ENDINGS[name])
    end = pair.ends[role]
    end.receive_eof()
    assert end.next_event() == Closed()
    assert end.next_event() is None
    with pytest.raises(LocalProtocolError):
        end.receive_data(b"x")


def test_memory_stays_below_the_frame_limit_whatever_the_peer_sends():
    limits = Limits(max_frame_bytes=1000)
    end = Connection(W, limits)
    end.start()
    end.receive_data(CURRENT.preface() + (1000).to_bytes(4))
    assert isinstance(end.next_event(), PeerVersion)
    for _ in range(999):
        end.receive_data(b"\x90")
        assert end.next_event() is None
        assert end.buffered_bytes <= limits.max_frame_bytes + 4
    end.receive_data(b"\x90")
    with pytest.raises(RemoteProtocolError):
        end.next_event()
    assert end.buffered_bytes == 0


def test_the_epoch_begins_with_the_data_plane_and_steps_belong_to_it():
    pair = Pair().play(SETUP)
    assert (pair.leader.epoch, pair.worker.epoch) == (1, 1)
    pair.play(((L, step(5)), (W, Ack(about=int(Subject.STEP), id=5))))
    rebuild = tuple(entry for entry in SETUP if entry[1].NAME in {
        "nccl_vote", "nccl_id", "nccl_ok", "ready"})  # fmt: skip
    pair.play(rebuild)
    assert (pair.leader.epoch, pair.worker.epoch) == (2, 2)
    pair.play(((L, step(1)),))


def test_properties_tell_where_a_connection_stands():
    pair = Pair().play(SETUP)
    assert pair.leader.role is L
    assert pair.leader.window == CONFIG.window
    assert pair.leader.peer_hello == hello(W)
    pair.play(((L, step(1)), (L, step(2))))
    assert pair.leader.steps_outstanding == 2
    assert pair.leader.outstanding == ((Subject.STEP, 1), (Subject.STEP, 2))
    assert pair.leader.error is None


def test_a_peer_that_plays_our_own_role_is_refused_by_name():
    """A socket connected to itself, or two leaders: the hello says it."""
    pair = Pair()
    with pytest.raises(LocalProtocolError, match="both ends of this link are leaders") as caught:
        pair.worker.send(hello(L))
    assert caught.value.reason == "two_leaders"


def test_no_one_may_approve_a_different_geometry():
    other = attrs.evolve(GEOMETRY, n_ctx=1)
    pair = Pair().play(((W, hello(W, geometry=other)), (L, hello(L))))
    with pytest.raises(LocalProtocolError, match="different geometries") as caught:
        pair.leader.send(HelloOk())
    assert caught.value.reason == "geometry"


def test_errors_of_the_protocol_are_one_of_two_kinds():
    with pytest.raises(TypeError):
        ProtocolError("x")
    assert RemoteProtocolError("x").reason == "protocol"


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_frame_bytes", 63), ("max_frame_bytes", 2**32), ("max_window", 0), ("max_pings", True)],
)
def test_limits_are_checked_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: value})
