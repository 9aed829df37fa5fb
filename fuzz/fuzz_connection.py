"""Any bytes yield events or `RemoteProtocolError`, at any point of any conversation.

One chunk and byte-at-a-time agree, in events and in the error's text; memory stays under the limit;
the error is sticky; and every message that is delivered encodes to a frame that means the same.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgpack

from ds4.errors import RemoteProtocolError
from ds4.protocol.codec import CODEC, Envelope
from ds4.protocol.connection import Closed, Connection, Event, PeerVersion
from ds4.protocol.frame import HEADER_BYTES, frame
from ds4.protocol.limits import Limits
from ds4.protocol.messages import Message, Role
from ds4.protocol.version import CURRENT
from fuzz.conversation import CHALLENGES, EXAMPLES, KEY, RUN, SETUP, Pair, Script
from fuzz.mutation import INTERESTING
from fuzz.mutation import mutate as mutate_bytes

__all__ = ["mutate", "test_one_input"]

LIMITS: Final = Limits(max_frame_bytes=4096, max_window=2, max_ops=4, max_pings=2)
# An input opens with two bytes: how the conversation began, and how many messages it has had.
# Without a start the peer's preface is part of the input.
AS_LEADER: Final = 1
WITH_KEY: Final = 2
STARTED: Final = 4
HEAD_BYTES: Final = 2


def _script(flags: int, n_messages: int) -> Script:
    whole = (CHALLENGES if flags & WITH_KEY else ()) + SETUP + RUN
    return whole[: n_messages % (len(whole) + 1)]


def _end(flags: int, n_messages: int) -> Connection:
    """The end that is fuzzed, at its point of the conversation."""
    role = Role.LEADER if flags & AS_LEADER else Role.WORKER
    key = KEY if flags & WITH_KEY else None
    if flags & STARTED:
        return Pair(LIMITS, key=key).play(_script(flags, n_messages)).ends[role]
    fresh = Connection(role, LIMITS, key=key)
    fresh.start()
    return fresh


def _check_event(event: Event) -> None:
    if isinstance(event, (PeerVersion, Closed)):
        return
    envelope = Envelope(2**64 - 1, 0, event)
    assert CODEC.decode(CODEC.encode(envelope, CURRENT.minor), CURRENT.minor) == envelope


def _events(end: Connection, pieces: Iterable[bytes], most: int) -> Iterator[Event]:
    for piece in pieces:
        end.receive_data(piece)
        while (event := end.next_event()) is not None:
            yield event
        assert end.buffered_bytes <= most
    end.receive_eof()
    while (event := end.next_event()) is not None:
        yield event


def _run(end: Connection, pieces: Iterable[bytes], most: int) -> tuple[list[Event], str | None]:
    events: list[Event] = []
    try:
        events.extend(_events(end, pieces, most))
    except RemoteProtocolError as error:
        text = f"{error.reason}: {error}"
    else:
        return events, None
    # Sticky, and nothing is kept of what a broken peer said.
    assert f"{end.error and end.error.reason}: {end.error}" == text
    assert not end.buffered_bytes
    return events, text


def test_one_input(data: bytes) -> None:
    """Play a conversation up to a point, then let `data` be what the peer says."""
    flags, n_messages = (*data[:HEAD_BYTES], 0, 0)[:HEAD_BYTES]
    said = data[HEAD_BYTES:]
    most = LIMITS.max_frame_bytes + HEADER_BYTES
    end = _end(flags, n_messages)
    events, error = _run(end, [said], most)
    other = _end(flags, n_messages)
    assert _run(other, (said[i : i + 1] for i in range(len(said))), most) == (events, error)
    assert other.state is end.state
    for event in events:
        _check_event(event)


@functools.cache
def _expected_header(flags: int, n_messages: int) -> tuple[int, int]:
    """Frame number and epoch of the peer's next frame, as for most messages."""
    peer = Role.WORKER if flags & AS_LEADER else Role.LEADER
    sent = [message for sender, message in _script(flags, n_messages) if sender is peer]
    return len(sent), sum(message.NAME in {"nccl_id", "nccl_ok"} for message in sent)


def _bent(values: list[Any], rng: random.Random) -> list[Any]:
    """One value replaced, at any depth."""
    changed = list(values)
    at = rng.randrange(len(changed))
    if isinstance(changed[at], list) and changed[at] and rng.randrange(4):
        changed[at] = _bent(changed[at], rng)
    else:
        odd: tuple[object, ...] = (None, True, -1, 0.5, float("nan"), "", "x", b"", b"1234", [])
        changed[at] = rng.choice((rng.choice(INTERESTING), rng.choice(odd)))
    return changed


def _body(message: Message, n: int, epoch: int, rng: random.Random) -> bytes:
    body = CODEC.encode(Envelope(n, epoch, message), CURRENT.minor)
    match rng.randrange(4):
        case 0:
            return body
        case 1:
            return mutate_bytes(body, rng) or body
        case _:
            bent: bytes = msgpack.packb(_bent(msgpack.unpackb(body), rng))
            return bent


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Move to another point, or say the next thing of the script, right or slightly wrong."""
    head = bytearray((*data[:HEAD_BYTES], 0, 0)[:HEAD_BYTES])
    said = data[HEAD_BYTES:]
    match rng.randrange(6):
        case 0:
            return mutate_bytes(data, rng)
        case 1:
            return bytes((rng.randrange(8), rng.randrange(64))) + said
        case 2:
            head[0] &= ~STARTED & 0xFF
            return bytes(head) + CURRENT.preface() + said
        case _:
            head[0] |= STARTED
            flags, n_messages = head
            whole = _script(flags, n_messages)
            rest = (_script(flags, 255) + SETUP + RUN)[len(whole) : len(whole) + 3]
            message = rng.choice((*(m for _, m in rest), rng.choice(EXAMPLES)))
            n, epoch = _expected_header(flags, n_messages)
            fresh = rng.randrange(3) > 0
            before = b"" if fresh else said
            body = _body(message, n + (not fresh), epoch, rng)
            return bytes(head) + before + frame(body, 2**20)
