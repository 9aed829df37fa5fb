"""Reading and writing the files that options name.

Every failure is one `FileError` that names the option and the path. An output file is written
beside its final place and then moved there, so a failed run never leaves half of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ds4.errors import Ds4Error

__all__ = [
    "FileError",
    "check_writable",
    "decode_text",
    "read_text",
    "read_token_ids",
    "write_file",
]

MAX_TEXT_BYTES = 256 << 20
"""Longest text that is read: several times what the longest context holds."""


class FileError(Ds4Error):
    """A file named on the command line cannot be used."""

    code = "file"

    def __init__(self, option: str, path: str, problem: str) -> None:
        super().__init__(f"{option} {path}: {problem}")


def _reason(error: OSError | ValueError) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return text or str(error)


def decode_text(option: str, path: str, data: bytes) -> str:
    """Text of UTF-8 bytes; a leading byte-order mark is dropped.

    Raises:
      FileError: not UTF-8; names the first bad byte.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8"
        raise FileError(option, path, found) from error


def _read(option: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise FileError(option, path, _reason(error)) from error
    if len(data) > MAX_TEXT_BYTES:
        raise FileError(option, path, f"longer than {MAX_TEXT_BYTES} bytes")
    return data


def read_text(option: str, path: str) -> str:
    """A text file as it is.

    Raises:
      FileError: unreadable, too long or not UTF-8.
    """
    return decode_text(option, path, _read(option, path))


def read_token_ids(option: str, path: str, n_vocab: int) -> list[int]:
    """A JSON list of token ids.

    Raises:
      FileError: not JSON, not a list, empty, or an item that is no id of this vocabulary; names
        the item.
    """
    text = read_text(option, path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(option, path, f"not JSON: {error}") from error
    if not isinstance(value, list):
        raise FileError(option, path, f"expected a JSON list of token ids, found {_kind(value)}")
    if not value:
        raise FileError(option, path, "expected at least one token id, found an empty list")
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < n_vocab:
            shown = repr(item) if isinstance(item, (int, float)) else _kind(item)
            raise FileError(
                option,
                path,
                f"item {index}: expected a token id from 0 to {n_vocab - 1}, found {shown[:40]}",
            )
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return names.get(type(value), f"{value!r}"[:40])


def check_writable(option: str, path: str) -> None:
    """Find out before the work, not after it, that an output cannot be written.

    Raises:
      FileError: a directory, or no permission.
    """
    place = Path(path)
    try:
        if place.is_dir():
            raise FileError(option, path, "is a directory")
        if place.exists():
            if not os.access(place, os.W_OK):
                raise FileError(option, path, "no permission to write")
        elif not place.parent.is_dir():
            raise FileError(option, path, f"no such directory: {place.parent}")
        elif not os.access(place.parent, os.W_OK):
            raise FileError(option, path, f"no permission to write in {place.parent}")
    except (OSError, ValueError) as error:
        raise FileError(option, path, _reason(error)) from error


def write_file(option: str, path: str, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace a file by what `write` puts into it.

    Raises:
      FileError: it cannot be written; what was there before is unchanged.
    """
    place = Path(path)
    try:
        if place.exists() and not stat.S_ISREG(place.stat().st_mode):
            with place.open("wb") as file:  # a device or pipe has no beside
                write(file)
            return
        place = place.resolve()  # keeps a symbolic link and replaces what it points to
        handle, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
            os.chmod(name, place.stat().st_mode if place.exists() else 0o666 & ~_umask())
            os.replace(name, place)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except (OSError, ValueError) as error:
        raise FileError(option, path, _reason(error)) from error


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
