"""What `python -m fuzz live` says to a target: damaged conversations as data, nothing is sent here.

Invariant: conversation `i` depends only on the seed and `i`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import attrs

from ds4.errors import ProtocolError
from ds4.protocol.connection import Connection
from ds4.protocol.limits import DEFAULT_LIMITS
from ds4.protocol.membership import ClusterKey
from ds4.protocol.messages import Hello, Role
from ds4.protocol.version import CURRENT, MAGIC, Version
from fuzz.conversation import CHALLENGES, KEY, SETUP, Pair, Script
from fuzz.mutation import INTERESTING, mutate

__all__ = ["KINDS", "MAX_FLOOD", "PROBE", "PROOF_AT", "Attack", "is_a_rank", "plan"]

MAX_FLOOD: Final = 56
"""Most connections of one conversation at a time."""
PROOF_AT: Final = 2
"""Place of the response among the chunks of a conversation with a key: preface, challenge, it."""


@attrs.frozen(kw_only=True)
class Attack:
    """One conversation to hold, from the side of a worker.

    Attributes:
      kind: one of `KINDS`.
      chunks: bytes in the order in which they are sent.
      pause_s: between two chunks.
      ends: whether the sending direction is closed after the last chunk.
      key: proves membership with this key; the response among the chunks is replaced then.
      n_sockets: how many connections say the same at a time.
    """

    kind: str
    chunks: tuple[bytes, ...]
    pause_s: float = 0.0
    ends: bool = False
    key: ClusterKey | None = None
    n_sockets: int = 1


def _recorded(script: Script, key: ClusterKey | None) -> tuple[bytes, ...]:
    """What the worker sends in a conversation: its preface, then one frame each."""
    pair = Pair(key=key)
    chunks = [CURRENT.preface()]
    for sender, message in script:
        data = pair.ends[sender].send(message)
        pair.deliver(sender, data)
        if sender is Role.WORKER:
            chunks.append(data)
    return tuple(chunks)


_WITH_KEY: Final = _recorded((*CHALLENGES, *SETUP), KEY)
_WITHOUT_KEY: Final = _recorded(SETUP, None)
PROBE: Final = _WITH_KEY[:2]
"""Asks a head whether it has a key; harms none."""
_TLS_HELLO: Final = b"\x16\x03\x01\x00\x2f\x01\x00\x00\x2b\x03\x03" + bytes(32) + b"\x00\x00\x02"
_HTTP: Final = (
    b"GET / HTTP/1.1\r\nHost: ds4\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 4294967296\r\n\r\n{",
    b"CONNECT ds4:443 HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


def _either(rng: random.Random) -> tuple[bytes, ...]:
    return rng.choice((_WITH_KEY, _WITHOUT_KEY))


def _garbage(rng: random.Random) -> Attack:
    data = rng.randbytes(rng.choice((1, 7, 8, 64, 4096)))
    return Attack(
        kind="garbage", chunks=(rng.choice((b"", MAGIC)) + data,), ends=rng.random() < 0.5
    )


def _http(rng: random.Random) -> Attack:
    return Attack(kind="http", chunks=(rng.choice(_HTTP),))


def _tls(rng: random.Random) -> Attack:
    return Attack(kind="tls", chunks=(rng.choice((_TLS_HELLO, mutate(_TLS_HELLO, rng))),))


def _version(rng: random.Random) -> Attack:
    major = rng.choice((0, CURRENT.major + 1, 2**15, 2**16 - 1))
    preface = Version(major, rng.choice((0, 1, 2**16 - 1))).preface()
    return Attack(kind="other version", chunks=(preface, *_either(rng)[1:]))


def _truncated(rng: random.Random) -> Attack:
    data = b"".join(_either(rng)[:3])
    return Attack(
        kind="truncated", chunks=(data[: rng.randrange(len(data))],), ends=rng.random() < 0.8
    )


def _length(rng: random.Random) -> Attack:
    wild = [0, DEFAULT_LIMITS.max_frame_bytes + 1, 2**31, 2**32 - 1]
    wild += [value for value in INTERESTING if value < 2**32]
    wild.append(DEFAULT_LIMITS.max_frame_bytes)
    length = rng.choice(wild).to_bytes(4, "big")
    body = rng.choice((b"", _WITH_KEY[1][4:], rng.randbytes(1000)))
    return Attack(kind="length", chunks=(CURRENT.preface(), length + body), ends=rng.random() < 0.8)


def _trickle(rng: random.Random) -> Attack:
    data = b"".join(_WITH_KEY[:3])[: rng.randrange(1, 64)]
    pieces = tuple(data[at : at + 1] for at in range(len(data)))
    return Attack(kind="trickle", chunks=pieces, pause_s=rng.choice((0.005, 0.02)))


def _flood(rng: random.Random) -> Attack:
    chunks = rng.choice(((), _WITH_KEY[:1], _WITH_KEY[:2]))
    return Attack(kind="flood", chunks=chunks, n_sockets=rng.randrange(8, MAX_FLOOD + 1))


def _replay(rng: random.Random) -> Attack:
    chunks = list(_either(rng)[: rng.choice((2, 4, None))])
    if rng.random() < 0.5:
        again = rng.randrange(1, len(chunks))
        chunks.insert(again, chunks[again])
    return Attack(kind="replay", chunks=tuple(chunks))


def _bit_flip(rng: random.Random) -> Attack:
    chunks = list(_either(rng)[:4])
    at = rng.randrange(1, len(chunks))
    changed = bytearray(chunks[at])
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    chunks[at] = bytes(changed)
    return Attack(kind="bit flip", chunks=tuple(chunks), ends=True)


def _wrong_key(rng: random.Random) -> Attack:
    return Attack(kind="wrong key", chunks=_WITH_KEY[:4], key=ClusterKey(rng.randbytes(32)))


def _mutated(rng: random.Random) -> Attack:
    chunks = _either(rng)
    data = mutate(b"".join(chunks), rng, chunks)
    return Attack(kind="mutated", chunks=(data,), ends=rng.random() < 0.8)


_PLANS: Final[dict[str, Callable[[random.Random], Attack]]] = {
    "garbage": _garbage,
    "http": _http,
    "tls": _tls,
    "other version": _version,
    "truncated": _truncated,
    "length": _length,
    "trickle": _trickle,
    "flood": _flood,
    "replay": _replay,
    "bit flip": _bit_flip,
    "wrong key": _wrong_key,
    "mutated": _mutated,
}
KINDS: Final = (*_PLANS, "member")


def _member(rng: random.Random, key: ClusterKey | None) -> Attack:
    """A proven rank whose words after the proof are damaged."""
    chunks = _WITHOUT_KEY if key is None else _WITH_KEY
    proven = 1 if key is None else PROOF_AT + 1
    said = b"".join(chunks[proven:])
    return Attack(
        kind="member", chunks=(*chunks[:proven], mutate(said, rng, chunks)), key=key, ends=True
    )


def plan(seed: int, index: int, *, member: bool = False, key: ClusterKey | None = None) -> Attack:
    """The conversation with this number.

    Args:
      seed: of the run.
      index: of the conversation, from 0. Every kind has a turn before one comes again.
      member: half of the conversations are a member's.
      key: with which a member proves itself, if the world has a key.
    """
    rng = random.Random(f"{seed}:{index}")
    if member and index % 2:
        return _member(rng, key)
    kinds = tuple(_PLANS.values())
    return kinds[(index // 2 if member else index) % len(kinds)](rng)


def is_a_rank(chunks: tuple[bytes, ...]) -> bool:
    """Whether a head without a cluster key would read a whole hello in this."""
    head = Connection(Role.LEADER)
    try:
        head.receive_data(b"".join(chunks))
        head.next_event()
        return isinstance(head.next_event(), Hello)
    except ProtocolError:
        return False
