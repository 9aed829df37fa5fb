"""Reads the header of a GGUF file and maps its tensors.

Invariant: any file gives either a checked `GGUFFile` or one `ModelFileError` that names the file,
the place, what was expected and what was found. Every count and length is compared with what is
left of the file before anything is allocated, nothing recurses, and the data section is only
mapped: opening reads the header's pages and no others, so an 80 GiB file opens as fast as a small
one. This module does not know what the keys and tensors mean.

Source: the GGUF specification, versions 2 and 3, little endian.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import mmap
import os
import stat
import struct
from array import array
from typing import Any, Final, NoReturn, Self, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ModelFileError, QuantFormatError, UnsupportedModelError
from ds4.gguf.constants import (
    DEFAULT_ALIGNMENT,
    GGML_TYPE_NAMES,
    MAGIC,
    MAX_DIMS,
    VERSIONS,
    QuantType,
    ValueType,
    type_name,
)
from ds4.gguf.strings import LENGTH_BYTES, InvalidStringError, StringArray

__all__ = ["GGUFFile", "StringArray", "TensorInfo", "Value"]

Value: TypeAlias = bool | int | float | str | NDArray[Any] | StringArray

# A real header is 2 to 12 MB, nearly all of it vocabulary. The limits keep a hostile or sparse
# file, whose zeros can pass for any number of empty strings, to about 100 MB of memory.
MAX_HEADER_BYTES: Final = 32 << 20
MAX_KEYS: Final = 1 << 14
MAX_TENSORS: Final = 1 << 16
MAX_KEY_BYTES: Final = (1 << 16) - 1
MAX_NAME_BYTES: Final = 255
MAX_STRING_BYTES: Final = 4 << 20
MAX_STRINGS: Final = 1 << 21  # of one array; the largest published vocabularies have 2**18
_SHOWN_CHARACTERS: Final = 80

_MIN_KEY_BYTES: Final = LENGTH_BYTES + 1 + 4 + 1
_MIN_TENSOR_BYTES: Final = LENGTH_BYTES + 1 + 4 + 8 + 4 + 8

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_SCALARS: Final[dict[ValueType, struct.Struct]] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: _U32,
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.UINT64: _U64,
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}
_DTYPES: Final[dict[ValueType, np.dtype[Any]]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}


@attrs.frozen
class TensorInfo:
    """Where one tensor lies and how its bytes are to be read.

    Attributes:
      name: the tensor's name.
      ne: sizes as in the file, the contiguous one first.
      shape: the same in NumPy order, the contiguous one last.
      type: how the weights are stored.
      offset: first byte, counted from the start of the file.
      n_bytes: size in the file.
    """

    name: str
    ne: tuple[int, ...]
    shape: tuple[int, ...]
    type: QuantType
    offset: int
    n_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along `ne[0]`."""
        return self.ne[0] // self.type.block_elements * self.type.block_bytes

    @property
    def n_rows(self) -> int:
        """Rows of all the other dimensions together."""
        return math.prod(self.ne[1:])


class GGUFFile:
    """The header of one file, and views of its tensors.

    Attributes:
      path: as given.
      version: GGUF version, 2 or 3.
      metadata: key to value. Scalars are Python values, arrays of numbers NumPy arrays of the
        type in the file, arrays of strings `StringArray`.
      tensors: name to place, in file order.
      data_offset: first byte of the data section.
      file_bytes: size of the file.
      alignment: every tensor starts at a multiple of it, counted from `data_offset`.

    The file must not shrink while it is open: reading a mapped page behind the new end kills the
    process (SIGBUS), which no check here can prevent.
    """

    def __init__(
        self,
        path: str,
        mapping: mmap.mmap,
        *,
        version: int,
        metadata: dict[str, Value],
        tensors: dict[str, TensorInfo],
        data_offset: int,
        alignment: int,
    ) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors
        self.data_offset = data_offset
        self.file_bytes = len(mapping)
        self.alignment = alignment
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Read and check the header; map the rest.

        Raises:
          UnsupportedModelError: a tensor type or byte order that ds4 does not compute with.
          QuantFormatError: a row that is not whole quant blocks.
          ModelFileError: the file cannot be read, or is not a well-formed GGUF file.
        """
        name = os.fspath(path)
        mapping = _map(name)
        try:
            return HeaderReader(name, mapping).read()
        except BaseException:
            mapping.close()
            raise

    def close(self) -> None:
        """Give up the mapping. It lasts until the last array from `rows` is gone."""
        self._mapping = None

    def header_digest(self) -> bytes:
        """BLAKE2b-256 over the header's bytes and the file's size: cheap identity of a model.

        Raises:
          ValueError: the file was closed.
        """
        if self._mapping is None:
            raise ValueError(f"{self.path} is closed")
        digest = hashlib.blake2b(self._mapping[: self.data_offset], digest_size=32)
        digest.update(self.file_bytes.to_bytes(8, "little"))
        return digest.digest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tensor(self, name: str) -> TensorInfo:
        """Place of a tensor.

        Raises:
          ModelFileError: there is no tensor of this name.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(
                self.path, f"tensor {_show(name)}", expected="a tensor", found="no such tensor"
            )
        return info

    def rows(self, name: str, first: int = 0, count: int | None = None) -> NDArray[np.uint8]:
        """Rows of a tensor as they lie in the file.

        Args:
          name: the tensor.
          first: first row; rows of all outer dimensions are counted through.
          count: number of rows, up to the last when None.

        Returns:
          u8[count, row_bytes], a read-only view of the file; only pages that are read are loaded.

        Raises:
          ModelFileError: no such tensor, or it has fewer rows.
          ValueError: the file was closed.
        """
        if self._mapping is None:
            raise ValueError(f"{self.path} is closed")
        info = self.tensor(name)
        if count is None:
            count = info.n_rows - first
        if first < 0 or count < 0 or first + count > info.n_rows:
            raise ModelFileError(
                self.path,
                f"rows of tensor {_show(name)}",
                expected=f"rows within 0 to {info.n_rows}",
                found=f"{first} to {first + count}",
                offset=info.offset,
            )
        width = info.row_bytes
        flat = np.frombuffer(
            self._mapping, np.uint8, count=count * width, offset=info.offset + first * width
        )
        return flat.reshape(count, width)


def _map(path: str) -> mmap.mmap:
    """Map a whole regular file for reading."""
    what = "model file"
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise ModelFileError(path, what, expected="a GGUF file", found="a directory")
            if not stat.S_ISREG(status.st_mode):
                raise ModelFileError(
                    path, what, expected="a regular file", found="a device, pipe or socket"
                )
            if status.st_size == 0:
                raise ModelFileError(path, what, expected="a GGUF file", found="an empty file")
            return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
    except OSError as error:
        found = error.strerror or str(error)
        raise ModelFileError(path, what, expected="a readable file", found=found) from error
    except ValueError as error:  # a NUL in the path
        raise ModelFileError(path, what, expected="a path", found=str(error)) from error


def _show(text: str) -> str:
    """Text of a file, made fit for one line of an error message."""
    short = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


class HeaderReader:
    """One pass over the header, front to back."""

    def __init__(self, path: str, mapping: mmap.mmap) -> None:
        self.path = path
        self.mapping = mapping
        self.file_bytes = len(mapping)
        self.limit = min(self.file_bytes, MAX_HEADER_BYTES)
        self.pos = 0

    def read(self) -> GGUFFile:
        version = self.version()
        n_tensors_at = self.pos
        n_tensors = self.u64("tensor count")
        n_keys_at = self.pos
        n_keys = self.u64("key count")
        self.check_count("key count", n_keys, MAX_KEYS, _MIN_KEY_BYTES, n_keys_at)
        self.check_count("tensor count", n_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES, n_tensors_at)
        metadata: dict[str, Value] = {}
        alignment = DEFAULT_ALIGNMENT
        for index in range(n_keys):
            at = self.pos
            key = self.name(f"key {index}", MAX_KEY_BYTES)
            if key in metadata:
                self.fail(f"key {_show(key)}", "each key once", "it again", at)
            value_at = self.pos
            metadata[key] = self.value(f"key {_show(key)}")
            if key == "general.alignment":
                alignment = self.checked_alignment(metadata[key], value_at)
        places = self.tensor_infos(n_tensors)
        data_offset = -(-self.pos // alignment) * alignment
        tensors = {info.name: self.placed(info, at, data_offset, alignment) for info, at in places}
        self.check_order(tensors, data_offset, alignment)
        return GGUFFile(
            self.path,
            self.mapping,
            version=version,
            metadata=metadata,
            tensors=tensors,
            data_offset=data_offset,
            alignment=alignment,
        )

    def fail(self, what: str, expected: object, found: object, offset: int) -> NoReturn:
        raise ModelFileError(self.path, what, expected=expected, found=found, offset=offset)

    def need(self, n_bytes: int, what: str) -> int:
        """Claim the next bytes; returns where they begin."""
        at = self.pos
        left = self.limit - at
        if n_bytes > left:
            if self.limit < self.file_bytes:
                self.fail(
                    what,
                    f"a header of at most {MAX_HEADER_BYTES} bytes",
                    f"{n_bytes} bytes more at its end",
                    at,
                )
            self.fail(what, f"{n_bytes} bytes", f"{left} left in the file", at)
        self.pos = at + n_bytes
        return at

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.mapping, self.need(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.mapping, self.need(8, what))[0])

    def version(self) -> int:
        at = self.need(len(MAGIC), "magic")
        magic = self.mapping[at : self.pos]
        if magic != MAGIC:
            self.fail("magic", repr(MAGIC), repr(magic), at)
        at = self.pos
        version = self.u32("version")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(
                self.path,
                "byte order",
                expected="a little-endian file",
                found=f"a big-endian one (version {int.from_bytes(_U32.pack(version), 'big')})",
                offset=at,
            )
        if version not in VERSIONS:
            self.fail("version", "GGUF version 2 or 3", version, at)
        return version

    def check_count(self, what: str, count: int, most: int, least_bytes: int, at: int) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything is allocated."""
        fits = min((self.limit - self.pos) // least_bytes, most)
        if count > fits:
            self.fail(what, f"at most {fits}", count, at)

    def string_bytes(self, what: str, most: int) -> bytes:
        at = self.pos
        length = self.u64(f"{what} length")
        if length > most:
            self.fail(f"{what} length", f"at most {most} bytes", length, at)
        start = self.need(length, what)
        return self.mapping[start : self.pos]

    def string(self, what: str, most: int) -> str:
        raw = self.string_bytes(what, most)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            at = self.pos - len(raw) + error.start
            self.fail(what, "UTF-8", f"byte 0x{raw[error.start]:02x} ({error.reason})", at)

    def name(self, what: str, most: int) -> str:
        at = self.pos
        text = self.string(what, most)
        if not text:
            self.fail(what, "a name", "an empty string", at)
        return text

    def value_type(self, what: str) -> ValueType:
        at = self.pos
        tag = self.u32(f"{what} type")
        try:
            return ValueType(tag)
        except ValueError:
            self.fail(f"{what} type", "a value type of 0 to 12", tag, at)

    def value(self, what: str) -> Value:
        kind = self.value_type(what)
        if kind is ValueType.STRING:
            return self.string(what, MAX_STRING_BYTES)
        if kind is ValueType.ARRAY:
            return self.array(what)
        scalar = _SCALARS[kind]
        at = self.need(scalar.size, what)
        value: int | float = scalar.unpack_from(self.mapping, at)[0]
        if kind is ValueType.BOOL:
            if value not in (0, 1):
                self.fail(what, "0 or 1 for a boolean", value, at)
            return bool(value)
        return value

    def array(self, what: str) -> NDArray[Any] | StringArray:
        at = self.pos
        kind = self.value_type(f"{what} items")
        count_at = self.pos
        count = self.u64(f"{what} item count")
        if kind is ValueType.ARRAY:
            self.fail(f"{what} items", "numbers or strings", "nested arrays", at)
        item_bytes = LENGTH_BYTES if kind is ValueType.STRING else _DTYPES[kind].itemsize
        most = MAX_STRINGS if kind is ValueType.STRING else MAX_HEADER_BYTES
        self.check_count(f"{what} item count", count, most, item_bytes, count_at)
        if kind is ValueType.STRING:
            return self.strings(what, count)
        start = self.need(count * item_bytes, what)
        raw = np.frombuffer(self.mapping, np.uint8, count * item_bytes, start).copy()
        if kind is ValueType.BOOL and count and int(raw.max()) > 1:
            bad = int(np.argmax(raw > 1))
            self.fail(f"{what}[{bad}]", "0 or 1 for a boolean", int(raw[bad]), start + bad)
        return raw.view(_DTYPES[kind])

    def strings(self, what: str, count: int) -> StringArray:
        base = pos = self.pos
        limit = self.limit
        mapping = self.mapping
        unpack = _U64.unpack_from
        ends = array("I")
        append = ends.append
        for index in range(count):
            start = pos + LENGTH_BYTES
            if start > limit:
                self.pos = pos
                self.need(LENGTH_BYTES, f"{what}[{index}] length")
            (length,) = unpack(mapping, pos)
            if length > limit - start:
                if length > MAX_STRING_BYTES:
                    self.fail(
                        f"{what}[{index}] length", f"at most {MAX_STRING_BYTES} bytes", length, pos
                    )
                self.pos = start
                self.need(length, f"{what}[{index}]")
            pos = start + length
            append(pos - base)
        self.pos = pos
        raw = np.frombuffer(mapping, np.uint8, pos - base, base).copy()
        stops = np.frombuffer(ends, np.uint32) if count else np.empty(0, np.uint32)
        starts = np.empty_like(stops)
        starts[:1] = LENGTH_BYTES
        np.add(stops[:-1], np.uint32(LENGTH_BYTES), out=starts[1:])
        try:
            return StringArray(raw, starts, stops)
        except InvalidStringError as error:
            found = str(error).split(": ", 1)[1]
            self.fail(f"{what}[{error.index}]", "UTF-8", found, base + error.offset)

    def checked_alignment(self, value: Value, at: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            found = f"a value of type {type(value).__name__}"
            self.fail("key general.alignment", "an integer", found, at)
        if value <= 0 or value & (value - 1):
            self.fail("key general.alignment", "a power of two", value, at)
        return value

    def tensor_infos(self, count: int) -> list[tuple[TensorInfo, int]]:
        """All entries, with offsets still relative to the data section, and where each begins."""
        places: list[tuple[TensorInfo, int]] = []
        names: set[str] = set()
        for index in range(count):
            at = self.pos
            name = self.name(f"tensor {index} name", MAX_NAME_BYTES)
            what = f"tensor {_show(name)}"
            if name in names:
                self.fail(what, "each tensor once", "it again", at)
            names.add(name)
            dims_at = self.pos
            n_dims = self.u32(f"{what} dimension count")
            if not 1 <= n_dims <= MAX_DIMS:
                self.fail(f"{what} dimension count", f"1 to {MAX_DIMS}", n_dims, dims_at)
            dims_at = self.need(8 * n_dims, f"{what} dimensions")
            ne = struct.unpack_from(f"<{n_dims}Q", self.mapping, dims_at)
            if 0 in ne:
                self.fail(f"{what} dimensions", "sizes above 0", list(ne), dims_at)
            kind = self.quant_type(what)
            if ne[0] % kind.block_elements:
                raise QuantFormatError(
                    self.path,
                    f"{what} row",
                    expected=f"a multiple of {kind.block_elements} elements for {kind.name}",
                    found=ne[0],
                    offset=dims_at,
                )
            # Python integers do not overflow; the range check against the file bounds the product.
            n_bytes = math.prod(ne) // kind.block_elements * kind.block_bytes
            offset = self.u64(f"{what} offset")
            places.append((TensorInfo(name, ne, ne[::-1], kind, offset, n_bytes), at))
        return places

    def quant_type(self, what: str) -> QuantType:
        at = self.pos
        tag = self.u32(f"{what} type")
        try:
            return QuantType(tag)
        except ValueError:
            error = UnsupportedModelError if tag in GGML_TYPE_NAMES else ModelFileError
            accepted = ", ".join(t.name for t in QuantType)
            raise error(
                self.path,
                f"{what} type",
                expected=f"one of {accepted}",
                found=type_name(tag),
                offset=at,
            ) from None

    def placed(self, info: TensorInfo, at: int, data_offset: int, alignment: int) -> TensorInfo:
        """The entry with its offset counted from the start of the file, checked against it."""
        what = f"tensor {_show(info.name)} data"
        if info.offset % alignment:
            self.fail(what, f"an offset that is a multiple of {alignment}", info.offset, at)
        start = data_offset + info.offset
        end = start + info.n_bytes
        if end > self.file_bytes:
            found = f"bytes {start} to {end}"
            self.fail(what, f"data within the file's {self.file_bytes} bytes", found, at)
        return attrs.evolve(info, offset=start)

    def check_order(self, tensors: dict[str, TensorInfo], data_offset: int, alignment: int) -> None:
        """Every tensor begins where the one before it ends, padded: no overlap, and no gap.

        A gap means that a tensor is smaller than the space its writer gave it: its type or shape in
        the header is not the one it was written with.
        """
        ordered = sorted(tensors.values(), key=lambda info: info.offset)
        for one, two in itertools.pairwise(ordered):
            end = one.offset + one.n_bytes
            padded = data_offset + -(-(end - data_offset) // alignment) * alignment
            if two.offset != padded:
                self.fail(
                    f"tensor {_show(two.name)} data",
                    f"an offset from {end} on, behind tensor {_show(one.name)}"
                    if two.offset < end
                    else f"offset {padded}, right behind tensor {_show(one.name)}",
                    two.offset,
                    two.offset,
                )
