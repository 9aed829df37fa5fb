"""Any bytes as a model file give a `GGUFFile` or one `ModelFileError` line, in bounded memory.

So do the checks of a DeepSeek V4 file on top of it. What a `GGUFFile` promises holds: every key and
string can be read, every tensor lies inside the file, rows have the stated width and can be
decoded. An input may end in `~hole`: the file then goes on as a sparse file of 96 GiB, so that huge
counts and offsets fall inside it.
"""

from __future__ import annotations

import os
import random
import resource
import struct
import tempfile
from pathlib import Path
from typing import Final

import attrs
import numpy as np

from ds4.errors import ModelFileError
from ds4.gguf import GGUFFile, StringArray, TensorInfo, dequantize
from ds4.gguf.constants import GGML_TYPE_NAMES, ValueType
from ds4.model.deepseek4.tensors import bytes_by_class, load_shape
from fuzz.mutation import INTERESTING
from fuzz.mutation import mutate as mutate_bytes

__all__ = ["mutate", "test_one_input"]

HOLE: Final = b"~hole"
HOLE_BYTES: Final = 96 << 30
# A reader may take 300 MB for a whole process; its header limits allow it about 70.
MOST_GROWTH_BYTES: Final = 160 << 20
# Reading the pages of a hole in a tmpfs takes memory from it, at most a header's 32 MiB at a time.
_NEEDED_MEMORY_BYTES: Final = 1 << 30
_MOST_DECODED: Final = 12


def _fast_folder() -> str | None:
    """A file system without a disk, where there is room; None for the usual one."""
    memory = "/dev/shm"
    if not os.access(memory, os.W_OK):
        return None
    room = os.statvfs(memory)
    return memory if room.f_bavail * room.f_frsize >= _NEEDED_MEMORY_BYTES else None


_FOLDER: Final = tempfile.TemporaryDirectory(prefix="ds4-fuzz-gguf-", dir=_fast_folder())


def test_one_input(data: bytes) -> None:
    """Open, read and check `data` as a file; see the module for what must hold."""
    path = Path(_FOLDER.name) / "m.gguf"
    sparse = data.endswith(HOLE)
    path.write_bytes(data.removesuffix(HOLE))
    if sparse:
        os.truncate(path, HOLE_BYTES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        _read(path)
    except ModelFileError as error:
        text = str(error)
        assert text.startswith(f"{path}: "), text
        assert ": expected " in text, text
        assert ", found " in text, text
        assert text.isprintable(), text
        assert len(text) < 1000, text
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert growth < MOST_GROWTH_BYTES, f"memory grew by {growth} bytes"


def _read(path: Path) -> None:
    with GGUFFile.open(path) as file:
        for key, value in file.metadata.items():
            assert key, "an empty key"
            if isinstance(value, StringArray):
                texts = list(value)
                assert len(texts) == len(value)
                assert texts[:3] == [value[i] for i in range(min(3, len(value)))]
            elif isinstance(value, np.ndarray):
                assert value.ndim == 1
            else:
                assert isinstance(value, bool | int | float | str)
        for info in file.tensors.values():
            _check_place(file, info)
        for info in list(file.tensors.values())[:_MOST_DECODED]:
            _read_rows(file, info)
        shape = load_shape(file)
        for rope in (shape.rope_window, shape.rope_compressed):
            assert np.isfinite(rope.frequencies()).all()
        assert sum(n for _, n in bytes_by_class(file, shape).values()) <= file.file_bytes


def _check_place(file: GGUFFile, info: TensorInfo) -> None:
    assert info.shape == info.ne[::-1]
    assert (info.offset - file.data_offset) % file.alignment == 0
    assert file.data_offset <= info.offset
    assert info.offset + info.n_bytes <= file.file_bytes
    assert info.n_bytes == info.row_bytes * info.n_rows


def _read_rows(file: GGUFFile, info: TensorInfo) -> None:
    for row in {0, info.n_rows - 1}:
        view = file.rows(info.name, row, 1)
        assert view.shape == (1, info.row_bytes)
        values = dequantize(view[:, : info.type.block_bytes], info.type)
        assert values.shape == (1, info.type.block_elements)


@attrs.frozen
class _Field:
    """An integer of the header: where it is, its width, and what it tells."""

    at: int
    width: int
    is_type: bool = False


@attrs.frozen
class _Layout:
    """The integers of a header, and the spans of its entries (keys, then tensors) and values."""

    fields: list[_Field]
    entries: list[tuple[int, int]]
    values: list[tuple[int, int]]


_WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MOST_ITEMS: Final = 16


def _layout(data: bytes) -> _Layout:
    """Walk the header as far as it makes sense. Deliberately not the reader under test."""
    fields = [_Field(4, 4), _Field(8, 8), _Field(16, 8)]
    entries: list[tuple[int, int]] = []
    values: list[tuple[int, int]] = []
    at = 24

    def take(width: int, *, is_type: bool = False) -> int:
        nonlocal at
        fields.append(_Field(at, width, is_type))
        raw = data[at : at + width]
        if len(raw) < width:
            raise EOFError
        at += width
        return int.from_bytes(raw, "little")

    def skip(n_bytes: int) -> None:
        nonlocal at
        if n_bytes > len(data) - at:
            raise EOFError
        at += n_bytes

    def value(kind: int) -> None:
        if kind == ValueType.STRING:
            skip(take(8))
        elif kind == ValueType.ARRAY:
            item, count = take(4, is_type=True), take(8)
            if item == ValueType.STRING:
                for _ in range(min(count, _MOST_ITEMS)):
                    skip(take(8))
                for _ in range(count - _MOST_ITEMS):
                    skip(8 + int.from_bytes(data[at : at + 8], "little"))
            else:
                skip(count * _WIDTHS.get(item, 1))
        else:
            take(_WIDTHS.get(kind, 1))

    try:
        n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
        for _ in range(n_keys):
            start = at
            skip(take(8))
            value_start = at
            value(take(4, is_type=True))
            values.append((value_start, at))
            entries.append((start, at))
        for _ in range(n_tensors):
            start = at
            skip(take(8))
            for _ in range(min(take(4), 8)):
                take(8)
            take(4, is_type=True)
            take(8)
            entries.append((start, at))
    except (EOFError, struct.error):
        pass  # the rest is not a header; what was found is enough to mutate
    return _Layout(fields, entries, values)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a header integer; move, repeat or drop an entry; give a key another one's value."""
    layout = _layout(data)
    changed = bytearray(data)
    kind = rng.random()
    if kind < 0.6 or not layout.entries:
        field = rng.choice(layout.fields)
        changed[field.at : field.at + field.width] = _integer(data, field, layout, rng)
    elif kind < 0.75:
        _move_entry(changed, layout, rng)
    elif kind < 0.9 and layout.values:
        start, end = rng.choice(layout.values)
        other, other_end = rng.choice(layout.values)
        changed[start:end] = data[other:other_end]
    elif kind < 0.95:
        del changed[rng.choice(layout.fields).at :]
        changed += rng.choice((b"", HOLE))
    else:
        changed += HOLE
    return mutate_bytes(bytes(changed), rng) if rng.random() < 0.2 else bytes(changed)


def _integer(data: bytes, field: _Field, layout: _Layout, rng: random.Random) -> bytes:
    old = int.from_bytes(data[field.at : field.at + field.width], "little")
    other = rng.choice(layout.fields)
    choices = [
        old + rng.choice((-1, 1, 8, 32, -32)),
        rng.choice(INTERESTING),
        len(data) - field.at - field.width + rng.choice((-1, 0, 1)),
        int.from_bytes(data[other.at : other.at + other.width], "little"),
    ]
    if field.is_type:
        choices += [rng.randrange(14), rng.choice(list(GGML_TYPE_NAMES))]
    value = rng.choice(choices)
    return (value % (1 << 8 * field.width)).to_bytes(field.width, "little")


def _move_entry(changed: bytearray, layout: _Layout, rng: random.Random) -> None:
    start, end = rng.choice(layout.entries)
    entry = bytes(changed[start:end])
    action = rng.randrange(3)
    if action == 0:
        changed[end:end] = entry
    elif action == 1:
        del changed[start:end]
    else:
        there, _ = rng.choice(layout.entries)
        changed[there:there] = entry
    if rng.random() < 0.7:  # keep the count right, or the rest of the header is nonsense
        place = 16 if layout.entries.index((start, end)) < _count(changed, 16) else 8
        count = _count(changed, place) + (-1 if action == 1 else 1)
        changed[place : place + 8] = (count % (1 << 64)).to_bytes(8, "little")


def _count(data: bytearray, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")
