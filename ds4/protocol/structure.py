"""A walk over msgpack bytes that bounds what decoding them may cost.

Invariant: a body that passes holds nothing but arrays, integers, float64, bool, nil, text and
bytes, at most `MAX_OBJECTS` of them, at most `MAX_DEPTH` deep, and ends exactly at its last byte.
Without it 3 KB of nested array headers make the C decoder reserve 23 MiB, and every MiB of empty
arrays 66 MiB (both measured with msgpack 1.2).

Maps, extension types and timestamps, and float32, are not part of the protocol. What the values
mean is the codec's business.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

from ds4.errors import RemoteProtocolError

__all__ = ["MAX_DEPTH", "MAX_OBJECTS", "check_structure"]

MAX_OBJECTS = 65_536
"""Objects in one body. The largest step, 4096 rows of ten objects, stays below."""
MAX_DEPTH = 4
"""Arrays within arrays: frame, plan, list of entries, entry."""

# What a leading byte means: 1..9 is the size of a whole scalar with its leading byte; the other
# values say where its length is found.
_FIXARRAY, _FIXSTR, _LEN8, _LEN16, _LEN32, _ARRAY16, _ARRAY32, _REFUSED = range(100, 108)
_NAMES = {0xC1: "the reserved byte 0xc1", 0xCA: "a float32", 0xDE: "a map", 0xDF: "a map"}
_NAMES |= dict.fromkeys(range(128, 144), "a map")


def _kinds() -> list[int]:
    kinds = [_REFUSED] * 256
    for byte in range(0x80):
        kinds[byte] = 1
    for byte in range(0x90, 0xA0):
        kinds[byte] = _FIXARRAY
    for byte in range(0xA0, 0xC0):
        kinds[byte] = _FIXSTR
    for byte in range(0xE0, 0x100):
        kinds[byte] = 1
    sizes = {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
    sizes |= {0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
    lengths = {0xC4: _LEN8, 0xC5: _LEN16, 0xC6: _LEN32, 0xD9: _LEN8, 0xDA: _LEN16, 0xDB: _LEN32}
    lengths |= {0xDC: _ARRAY16, 0xDD: _ARRAY32}
    for byte, kind in (sizes | lengths).items():
        kinds[byte] = kind
    return kinds


_KINDS = _kinds()


def _refused(byte: int, position: int) -> RemoteProtocolError:
    what = _NAMES.get(byte, f"an extension type (0x{byte:02x})")
    return RemoteProtocolError(
        f"{what} at byte {position} is not part of the protocol", reason="msgpack_type"
    )


def _cut_off(length: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the body's {length} bytes end inside a value", reason="msgpack_cut_off"
    )


def check_structure(body: bytes) -> None:
    """Check the shape of one msgpack value without building it.

    Raises:
      RemoteProtocolError: reason `msgpack_type`, `msgpack_cut_off`, `msgpack_size`,
        `msgpack_depth` or `msgpack_extra`; the text has the byte position.
    """
    kinds = _KINDS
    end = len(body)
    position = 0
    objects = 1
    left = 1  # values still to come in the innermost array
    outer: list[int] = []
    while True:
        while not left:
            if not outer:
                if position != end:
                    raise RemoteProtocolError(
                        f"{end - position} bytes follow the frame's value", reason="msgpack_extra"
                    )
                return
            left = outer.pop()
        if position >= end:
            raise _cut_off(end)
        byte = body[position]
        kind = kinds[byte]
        left -= 1
        if kind < 100:
            position += kind
        elif kind == _FIXSTR:
            position += 1 + (byte & 0x1F)
        elif kind == _REFUSED:
            raise _refused(byte, position)
        elif kind in (_LEN8, _LEN16, _LEN32):
            width = 1 << (kind - _LEN8)
            position += 1 + width + int.from_bytes(body[position + 1 : position + 1 + width])
        else:
            width = 0 if kind == _FIXARRAY else 2 << (kind - _ARRAY16)
            count = (
                byte & 0x0F
                if not width
                else int.from_bytes(body[position + 1 : position + 1 + width])
            )
            objects += count
            if objects > MAX_OBJECTS:
                raise RemoteProtocolError(
                    f"the array at byte {position} makes more than {MAX_OBJECTS} values",
                    reason="msgpack_size",
                )
            position += 1 + width
            outer.append(left)
            if len(outer) > MAX_DEPTH:
                raise RemoteProtocolError(
                    f"arrays nest deeper than {MAX_DEPTH} at byte {position}",
                    reason="msgpack_depth",
                )
            left = count
        if position > end:
            raise _cut_off(end)
