"""Frames: any cut gives the same frames, and a bad length is refused before it is buffered."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import LocalProtocolError, RemoteProtocolError
from ds4.protocol.frame import HEADER_BYTES, FrameBuffer, frame

LIMIT = 100
bodies = st.lists(st.binary(min_size=1, max_size=LIMIT), max_size=6)


def cut(data, points):
    edges = [0, *sorted({p % (len(data) + 1) for p in points}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def read(buffer, pieces):
    found = []
    for piece in pieces:
        buffer.feed(piece)
        while (body := buffer.next_frame()) is not None:
            found.append(body)
    return found


@given(bodies, st.lists(st.integers(0, 1000), max_size=10))
def test_any_cut_gives_the_same_frames(frames, points):
    data = b"".join(frame(body, LIMIT) for body in frames)
    assert frames == read(FrameBuffer(LIMIT), cut(data, points))
    assert frames == read(FrameBuffer(LIMIT), [bytes([b]) for b in data])


@pytest.mark.parametrize("length", [0, LIMIT + 1, 2**31, 2**32 - 1])
def test_a_bad_length_is_refused_from_its_four_bytes_alone(length):
    buffer = FrameBuffer(LIMIT)
    buffer.feed(length.to_bytes(4)[:3])
    assert buffer.next_frame() is None
    buffer.feed(length.to_bytes(4)[3:])
    with pytest.raises(RemoteProtocolError, match=str(length)) as caught:
        buffer.next_frame()
    assert caught.value.reason == "frame_length"


def test_the_longest_legal_frame_passes():
    body = b"x" * LIMIT
    assert read(FrameBuffer(LIMIT), [frame(body, LIMIT)]) == [body]


@pytest.mark.parametrize("size", [0, LIMIT + 1])
def test_a_frame_that_the_peer_would_refuse_is_never_made(size):
    with pytest.raises(LocalProtocolError, match=f"this has {size}"):
        frame(b"x" * size, LIMIT)


def test_the_buffer_holds_at_most_one_frame_before_a_read():
    buffer = FrameBuffer(LIMIT)
    for _ in range(LIMIT + HEADER_BYTES):
        buffer.feed(b"x")
    with pytest.raises(LocalProtocolError) as caught:
        buffer.feed(b"x")
    assert caught.value.reason == "unread"
    assert len(buffer) == LIMIT + HEADER_BYTES


def test_a_frame_does_not_alias_the_buffer():
    buffer = FrameBuffer(LIMIT)
    first = read(buffer, [frame(b"aaaa", LIMIT)])[0]
    buffer.feed(frame(b"bbbb", LIMIT))
    assert first == b"aaaa"
    assert type(first) is bytes
