"""Frames on a byte stream: a preface once, then length-prefixed bodies.

Invariant: how the bytes were cut into reads never changes what comes out, and the buffer never
holds more than one frame's worth of bytes plus the last read. A length is checked when its four
bytes are here, before anything is kept for the body.

A frame is a u32 length, big-endian, and that many body bytes. What a body means is not known here.
"""

from __future__ import annotations

import struct

from ds4.errors import LocalProtocolError, RemoteProtocolError
from ds4.protocol.version import PREFACE_BYTES, Version, check_magic

__all__ = ["HEADER_BYTES", "FrameBuffer", "frame"]

HEADER_BYTES = 4
_HEADER = struct.Struct(">I")


def frame(body: bytes, max_frame_bytes: int) -> bytes:
    """Return `body` with its length before it.

    Raises:
      LocalProtocolError: the body is empty or longer than the limit (reason `frame_length`).
    """
    if not 0 < len(body) <= max_frame_bytes:
        raise LocalProtocolError(
            f"a frame body must have 1 to {max_frame_bytes} bytes, this has {len(body)}",
            reason="frame_length",
        )
    return _HEADER.pack(len(body)) + body


class FrameBuffer:
    """Bytes in, one preface and then whole frame bodies out.

    Args:
      max_frame_bytes: longest body that is accepted.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes from the peer.

        Raises:
          LocalProtocolError: a whole frame's worth is waiting already (reason `unread`). Taking
            frames out before feeding more is what keeps memory bounded.
        """
        if len(self._data) >= self._max_frame_bytes + HEADER_BYTES:
            raise LocalProtocolError(
                f"{len(self._data)} bytes wait to be read; take the events first", reason="unread"
            )
        self._data += data

    def next_preface(self) -> Version | None:
        """Take the preface, or return None until it is complete.

        Raises:
          RemoteProtocolError: the first wrong byte has arrived (reason `magic`).
        """
        start = bytes(self._data[:PREFACE_BYTES])
        check_magic(start)
        if len(start) < PREFACE_BYTES:
            return None
        del self._data[:PREFACE_BYTES]
        return Version.from_preface(start)

    def next_frame(self) -> bytes | None:
        """Take the next whole body, or return None until it is complete.

        Raises:
          RemoteProtocolError: the length is zero or over the limit (reason `frame_length`).
        """
        if len(self._data) < HEADER_BYTES:
            return None
        (length,) = _HEADER.unpack_from(self._data)
        if not 0 < length <= self._max_frame_bytes:
            raise RemoteProtocolError(
                f"frame length {length} is not from 1 to {self._max_frame_bytes} bytes",
                reason="frame_length",
            )
        end = HEADER_BYTES + length
        if len(self._data) < end:
            return None
        with memoryview(self._data) as view:
            body = bytes(view[HEADER_BYTES:end])
        del self._data[:end]
        return body

    def clear(self) -> None:
        """Drop what is buffered; called once the connection is past saving."""
        self._data = bytearray()
