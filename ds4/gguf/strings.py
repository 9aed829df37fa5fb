"""An array of GGUF strings, kept as bytes and decoded item by item.

A vocabulary has 129,280 tokens and its merge list about as many; most readers of a header need
neither. So the array keeps one copy of the bytes and the place of each string. All of it is checked
before the object exists: every length is inside the file and every string is valid UTF-8.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["InvalidStringError", "StringArray"]

LENGTH_BYTES: Final = 8
# Bounds the temporaries of the checks; the result does not depend on it.
_CHUNK: Final = 1 << 20


class InvalidStringError(ValueError):
    """A string is not UTF-8.

    Args:
      index: which string of the array.
      offset: where its bad byte is, counted from the first length of the array.
      reason: what the decoder says.
    """

    def __init__(self, index: int, offset: int, reason: str) -> None:
        self.index = index
        self.offset = offset
        super().__init__(f"string {index}: {reason}")


class StringArray(Sequence[str]):
    """Read-only sequence of strings; equal to any sequence of the same strings.

    Args:
      raw: u8[n], lengths and strings as they are in the file; the array keeps it and writes to it.
      starts: u32[count], place of each string's first byte in `raw`.
      ends: u32[count], place behind its last byte.

    Raises:
      InvalidStringError: a string is not UTF-8.
    """

    __slots__ = ("_ends", "_raw", "_starts")

    def __init__(
        self, raw: NDArray[np.uint8], starts: NDArray[np.uint32], ends: NDArray[np.uint32]
    ) -> None:
        self._starts = starts
        self._ends = ends
        # With the lengths zeroed, every string is fenced by ASCII, so one pass over the whole
        # buffer accepts exactly what decoding string by string would accept.
        for first in range(0, len(starts), _CHUNK):
            places = starts[first : first + _CHUNK]
            for byte in range(1, LENGTH_BYTES + 1):
                raw[places - np.uint32(byte)] = 0
        self._raw = raw.data
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for first in range(0, len(raw), _CHUNK):
                decoder.decode(self._raw[first : first + _CHUNK])
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise self._first_invalid() from None

    def _first_invalid(self) -> InvalidStringError:
        for index in range(len(self)):
            try:
                self[index]
            except UnicodeDecodeError as error:
                offset = int(self._starts[index]) + error.start
                return InvalidStringError(index, offset, error.reason)
        raise AssertionError("the buffer is not UTF-8, yet every string is")

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self._decode(self._starts[index], self._ends[index])
        return str(self._raw[self._starts[index] : self._ends[index]], "utf-8")

    def __iter__(self) -> Iterator[str]:
        return iter(self._decode(self._starts, self._ends))

    def _decode(self, starts: NDArray[np.uint32], ends: NDArray[np.uint32]) -> list[str]:
        raw = self._raw
        places = zip(starts.tolist(), ends.tolist(), strict=True)
        return [str(raw[start:end], "utf-8") for start, end in places]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash

    def __repr__(self) -> str:
        head = ", ".join(repr(text[:40]) for text in self[:3])
        return f"StringArray([{head}{', ...' if len(self) > 3 else ''}], n={len(self)})"
