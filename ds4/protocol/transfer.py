"""Snapshots in pieces: cut on one side, put together and checked on the other.

Invariant: what `Assembler.finish` returns is byte for byte what was cut, or an error is raised; and
the assembler never holds more than the declared size. Order and sizes of chunks are checked by the
connection as well; this module adds the hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from ds4.errors import ConfigError, SnapshotError

__all__ = ["CHUNK_BYTES", "Assembler", "pieces", "snapshot_hash"]

CHUNK_BYTES = 4 * 2**20
"""Small enough that a step's frame waits a few milliseconds behind one at 10 Gbit/s."""


def snapshot_hash(data: bytes | bytearray) -> bytes:
    """BLAKE2b-256 of a whole snapshot."""
    return hashlib.blake2b(data, digest_size=32).digest()


def pieces(data: bytes, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (index, piece), every piece but the last of `chunk_bytes`; nothing for no data.

    Raises:
      ConfigError: `chunk_bytes` < 1.
    """
    if chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    for index, start in enumerate(range(0, len(data), chunk_bytes)):
        yield index, data[start : start + chunk_bytes]


class Assembler:
    """Puts pieces together.

    Args:
      max_bytes: declared size, or the most that is acceptable where none was declared.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._next = 0

    def __len__(self) -> int:
        return len(self._data)

    def add(self, index: int, piece: bytes) -> None:
        """Append the next piece.

        Raises:
          SnapshotError: out of order, or more than `max_bytes`.
        """
        if index != self._next:
            raise SnapshotError(f"snapshot piece {index} arrived, expected {self._next}")
        if len(self._data) + len(piece) > self._max_bytes:
            raise SnapshotError(f"a snapshot is larger than {self._max_bytes} bytes")
        self._data += piece
        self._next += 1

    def finish(self, expected_hash: bytes) -> bytes:
        """The whole snapshot.

        Raises:
          SnapshotError: the hash does not match.
        """
        found = snapshot_hash(self._data)
        if found != expected_hash:
            raise SnapshotError(
                f"snapshot of {len(self._data)} bytes is damaged: hash {found.hex()[:16]}, "
                f"expected {expected_hash.hex()[:16]}"
            )
        return bytes(self._data)
