"""Versions: eight bytes decide, whatever the peer is."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import LocalProtocolError, RemoteProtocolError
from ds4.protocol.codec import Codec, Envelope
from ds4.protocol.connection import Connection, PeerVersion
from ds4.protocol.fields import U32, Text
from ds4.protocol.messages import Message, Role
from ds4.protocol.version import CURRENT, MAGIC, PREFACE_BYTES, Version, negotiate
from fuzz.conversation import RUN, SETUP, Pair

versions = st.builds(Version, st.integers(0, 65535), st.integers(0, 65535))


@given(versions)
def test_a_preface_round_trips(version):
    data = version.preface()
    assert len(data) == PREFACE_BYTES
    assert version == Version.from_preface(data)


@given(versions, versions)
def test_both_sides_reach_the_same_verdict(ours, theirs):
    if ours.major == theirs.major:
        assert negotiate(ours, theirs) == negotiate(theirs, ours) == min(ours.minor, theirs.minor)
    else:
        for a, b in ((ours, theirs), (theirs, ours)):
            with pytest.raises(RemoteProtocolError, match=f"{b}.*{a}"):
                negotiate(a, b)


STRANGERS = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "magic", "HTTP"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "magic", "TLS"),
    "zeros": (bytes(64), "magic", "0x00"),
    "length-prefixed": (b"\x00\x00\x00\x10\x90", "magic", "byte 0"),
    "almost": (MAGIC[:3] + b"5\0\1\0\0", "magic", "byte 3"),
    "older major": (Version(CURRENT.major - 1, 9).preface(), "version", "older"),
    "newer major": (Version(CURRENT.major + 1, 0).preface(), "version", "newer"),
}


def feed(connection, pieces):
    for piece in pieces:
        connection.receive_data(piece)
        connection.next_event()


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("piecewise", [False, True])
def test_a_stranger_is_refused_by_name(name, role, piecewise):
    data, reason, word = STRANGERS[name]
    connection = Connection(role)
    connection.start()
    with pytest.raises(RemoteProtocolError, match=word) as caught:
        feed(connection, [bytes([b]) for b in data] if piecewise else [data])
    assert caught.value.reason == reason


@pytest.mark.parametrize("piece", [1, 8])
def test_a_shorter_hello_of_an_older_peer_is_refused_without_waiting_for_more(piece):
    """Eight bytes of another major are enough, though a frame header would still be open."""
    connection = Connection(Role.LEADER)
    connection.start()
    data = Version(CURRENT.major + 7, 3).preface()
    for start in range(0, 8 - piece, piece):
        connection.receive_data(data[start : start + piece])
        assert connection.next_event() is None
    connection.receive_data(data[-piece:])
    with pytest.raises(RemoteProtocolError, match=rf"{CURRENT.major + 7}\.3"):
        connection.next_event()


@pytest.mark.parametrize("minors", [(0, 3), (3, 0), (2, 2)])
def test_peers_of_different_minors_speak_the_lower_one(minors):
    pair = Pair(versions=(Version(CURRENT.major, minors[0]), Version(CURRENT.major, minors[1])))
    pair.play(SETUP + RUN)


def test_the_peer_version_is_the_first_event():
    connection = Connection(Role.WORKER)
    connection.start()
    connection.receive_data(Version(CURRENT.major, 5).preface())
    expected = PeerVersion(Version(CURRENT.major, 5), min(5, CURRENT.minor))
    assert expected == connection.next_event()
    assert connection.next_event() is None


@attrs.frozen(kw_only=True)
class _Old(Message):
    TAG = 1
    NAME = "thing"
    a: int = attrs.field(validator=U32)


@attrs.frozen(kw_only=True)
class _New(Message):
    """The same message two minors later."""

    TAG = 1
    NAME = "thing"
    a: int = attrs.field(validator=U32)
    b: str = attrs.field(default="then", validator=Text(9), metadata={"since": 1})
    c: int = attrs.field(default=4, validator=U32, metadata={"since": 2})


@pytest.mark.parametrize(("minor", "expected"), [(0, ("then", 4)), (1, ("b", 4)), (2, ("b", 7))])
def test_a_message_has_exactly_the_fields_of_the_negotiated_minor(minor, expected):
    new = Codec([_New])
    body = new.encode(Envelope(0, 0, _New(a=1, b="b", c=7)), minor)
    found = new.decode(body, minor).message
    assert expected == (found.b, found.c)
    for other in {0, 1, 2} - {minor}:
        with pytest.raises(RemoteProtocolError) as caught:
            new.decode(body, other)
        assert caught.value.reason == "arity"


def test_an_older_build_reads_what_a_newer_one_sends_it():
    body = Codec([_New]).encode(Envelope(0, 0, _New(a=1, b="b")), 0)
    assert Codec([_Old]).decode(body, 0).message == _Old(a=1)
    older = Codec([_Old]).encode(Envelope(0, 0, _Old(a=2)), 0)
    assert Codec([_New]).decode(older, 0).message == _New(a=2)


def test_a_new_field_needs_a_default_and_the_last_place():
    @attrs.frozen(kw_only=True)
    class NoDefault(Message):
        TAG = 2
        NAME = "x"
        a: int = attrs.field(validator=U32, metadata={"since": 1})

    @attrs.frozen(kw_only=True)
    class Middle(Message):
        TAG = 3
        NAME = "y"
        a: int = attrs.field(default=1, validator=U32, metadata={"since": 1})
        b: int = attrs.field(default=1, validator=U32)

    @attrs.frozen(kw_only=True)
    class Untyped(Message):
        TAG = 4
        NAME = "z"
        a: int = 1

    for cls, text in ((NoDefault, "default"), (Middle, "last"), (Untyped, "field type")):
        with pytest.raises(TypeError, match=text):
            Codec([cls])


def test_nothing_is_sent_before_both_prefaces():
    connection = Connection(Role.WORKER)
    connection.start()
    with pytest.raises(LocalProtocolError) as caught:
        connection.send(SETUP[0][1])
    assert caught.value.reason == "preface"
    with pytest.raises(LocalProtocolError):
        connection.start()
