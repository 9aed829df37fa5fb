"""Generic mutations of byte strings, and the coverage that decides which results are kept.

Everything follows from the `random.Random` that is passed in, so a run with the same seed, corpus
and code tries the same inputs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, Self

__all__ = ["INTERESTING", "Coverage", "mutate", "shrink"]

# Values around which length and sign handling breaks.
INTERESTING: Final = (
    *(0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 1000, 4095, 4096),
    *(2**15 - 1, 2**15, 2**16 - 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1),
)
MAX_BYTES: Final = 1 << 18
_PACKAGE: Final = str(Path(__file__).parents[1] / "ds4")


def mutate(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A changed copy of `data`, after one to four mutations.

    Args:
      data: where to start from.
      rng: the only source of chance.
      others: inputs from which pieces may be taken.
    """
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        rng.choice(_MUTATIONS)(changed, rng, others)
    return bytes(changed[:MAX_BYTES])


_Mutation = Callable[[bytearray, random.Random, Sequence[bytes]], None]


def _place(data: bytearray, rng: random.Random) -> int:
    return rng.randrange(len(data)) if data else 0


def _piece(data: bytes | bytearray, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    length = rng.choice((1, 2, 4, 8, 16, 64, 256, len(data)))
    return bytes(data[start : start + length])


def _flip_bit(data: bytearray, rng: random.Random, _others: Sequence[bytes]) -> None:
    if data:
        data[_place(data, rng)] ^= 1 << rng.randrange(8)


def _set_byte(data: bytearray, rng: random.Random, _others: Sequence[bytes]) -> None:
    if data:
        data[_place(data, rng)] = rng.randrange(256)


def _set_integer(data: bytearray, rng: random.Random, _others: Sequence[bytes]) -> None:
    width = rng.choice((1, 2, 4, 8))
    value = rng.choice((*INTERESTING, len(data))) + rng.choice((-1, 0, 0, 1))
    at = _place(data, rng)
    data[at : at + width] = (value % (1 << 8 * width)).to_bytes(
        width, rng.choice(("little", "big"))
    )


def _insert(data: bytearray, rng: random.Random, _others: Sequence[bytes]) -> None:
    at = _place(data, rng)
    data[at:at] = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(rng.randrange(1, 17))))


def _delete(data: bytearray, rng: random.Random, _others: Sequence[bytes]) -> None:
    at = _place(data, rng)
    del data[at : at + rng.choice((1, 2, 4, 8, 64))]


def _repeat(data: bytearray, rng: random.Random, _others: Sequence[bytes]) -> None:
    at = _place(data, rng)
    data[at:at] = _piece(data, rng)


def _truncate(data: bytearray, rng: random.Random, _others: Sequence[bytes]) -> None:
    del data[_place(data, rng) :]


def _splice(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    if others:
        piece = _piece(rng.choice(others), rng)
        at = _place(data, rng)
        data[at : at + rng.choice((0, len(piece)))] = piece


_MUTATIONS: Final[tuple[_Mutation, ...]] = (
    _flip_bit,
    _set_byte,
    _set_integer,
    _insert,
    _delete,
    _repeat,
    _truncate,
    _splice,
)


def shrink(data: bytes, still_fails: Callable[[bytes], bool], most_attempts: int = 400) -> bytes:
    """A shorter input that still fails, found by leaving out ever smaller pieces."""
    attempts = 0
    width = max(len(data) // 2, 1)
    while width and attempts < most_attempts:
        at = 0
        while at < len(data) and attempts < most_attempts:
            candidate = data[:at] + data[at + width :]
            attempts += 1
            if still_fails(candidate):
                data = candidate
            else:
                at += width
        width //= 2
    return data


_Trace = Callable[[FrameType, str, Any], Any]


class Coverage:
    """Lines of `ds4` that inputs have reached, seen by a trace function while it is entered.

    Only this thread is traced, and only functions of the package that still have unseen lines, so
    libraries run at full speed and known code nearly so.
    """

    def __init__(self) -> None:
        self.n_lines = 0
        self.grew = False
        self._unseen: dict[CodeType, set[int]] = {}
        self._before: Any = None

    def __enter__(self) -> Self:
        self.grew = False
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, _event: str, _arg: object) -> _Trace | None:
        code = frame.f_code
        unseen = self._unseen.get(code)
        if unseen is None:
            ours = code.co_filename.startswith(_PACKAGE)
            lines = (line for _, _, line in code.co_lines() if line is not None)
            unseen = self._unseen[code] = set(lines) if ours else set()
            unseen.discard(code.co_firstlineno)  # the call itself, for which there is no line event
        return self._line if unseen else None

    def _line(self, frame: FrameType, _event: str, _arg: object) -> _Trace:
        unseen = self._unseen[frame.f_code]
        if frame.f_lineno in unseen:
            unseen.remove(frame.f_lineno)
            self.n_lines += 1
            self.grew = True
        return self._line
