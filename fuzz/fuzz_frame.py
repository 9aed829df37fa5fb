"""Any bytes give the same preface and frames however they are cut, or one `RemoteProtocolError`.

What comes out is what a reader written in ten lines over the whole input finds, and the buffer
never holds more than one frame and the last read.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Final

from ds4.errors import RemoteProtocolError
from ds4.protocol.frame import HEADER_BYTES, FrameBuffer
from ds4.protocol.version import CURRENT, MAGIC, PREFACE_BYTES
from fuzz.mutation import INTERESTING
from fuzz.mutation import mutate as mutate_bytes

__all__ = ["mutate", "test_one_input"]

LIMIT: Final = 300


def _expected(data: bytes) -> tuple[list[bytes], str | None]:
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        return [], "magic"
    found = [data[:PREFACE_BYTES]] if len(data) >= PREFACE_BYTES else []
    at = PREFACE_BYTES
    while found and len(data) - at >= HEADER_BYTES:
        length = int.from_bytes(data[at : at + HEADER_BYTES])
        if not 1 <= length <= LIMIT:
            return found, "frame_length"
        if len(data) - at - HEADER_BYTES < length:
            break
        at += HEADER_BYTES + length
        found.append(data[at - length : at])
    return found, None


def _read(pieces: Iterable[bytes]) -> tuple[list[bytes], str | None]:
    buffer = FrameBuffer(LIMIT)
    found: list[bytes] = []
    for piece in pieces:
        buffer.feed(piece)
        try:
            if not found and (version := buffer.next_preface()) is not None:
                found.append(version.preface())
            while found and (body := buffer.next_frame()) is not None:
                found.append(body)
        except RemoteProtocolError as error:
            return found, error.reason
        assert len(buffer) < LIMIT + HEADER_BYTES
    return found, None


def test_one_input(data: bytes) -> None:
    """Cut `data` in three ways and compare with the plain reader."""
    expected = _expected(data)
    assert _read([data]) == expected
    assert _read(data[i : i + 1] for i in range(len(data))) == expected
    rng = random.Random(len(data))
    cuts = [0, *sorted(rng.randrange(len(data) + 1) for _ in range(5)), len(data)]
    assert _read(data[a:b] for a, b in itertools.pairwise(cuts)) == expected


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Start with the preface, add frames with right and wrong lengths."""
    if rng.randrange(4) == 0:
        return mutate_bytes(data, rng)
    if not data.startswith(MAGIC):
        data = CURRENT.preface() + data
    size = rng.choice((1, 2, 9, LIMIT - 1, LIMIT, LIMIT + 1))
    length = size if rng.randrange(4) else rng.choice(INTERESTING) % 2**32
    return data + length.to_bytes(HEADER_BYTES) + rng.randbytes(size)
