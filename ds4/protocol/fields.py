"""Field types: one object both validates an attrs field and says how it looks on the wire.

Invariant: what passes the check when a message is built is exactly what may be sent, and what is
received passes the same check. So `pack` and `unpack` only change the representation.

Checks are by exact type: a bool is not an integer, a str subclass is not text. Sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import LocalProtocolError

__all__ = [
    "BOOL",
    "DIGEST",
    "FLOAT",
    "HASH",
    "U16",
    "U32",
    "U64",
    "Choice",
    "Field",
    "Int",
    "ListOf",
    "Octets",
    "Pair",
    "Record",
    "Text",
    "fields_of",
    "pack_f32",
    "pack_i32",
    "unpack_f32",
    "unpack_i32",
]

_T = TypeVar("_T")


class Field(Generic[_T]):
    """Base of the field types. Subclasses override `problem`, and `pack`/`unpack` where needed."""

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, as the end of a sentence that starts with its name."""
        raise NotImplementedError

    def pack(self, value: _T, minor: int) -> object:
        """The msgpack form of a checked value."""
        return value

    def unpack(self, value: object, minor: int) -> object:
        """The Python form of a msgpack value; may return a wrong value, which the check refuses."""
        return value

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        """Validate as an attrs validator."""
        problem = self.problem(value)
        if problem is not None:
            raise LocalProtocolError(
                f"{type(instance).__name__}.{attribute.name} {problem}", reason="field"
            )


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Int(Field[int]):
    """A whole number in a closed range."""

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def problem(self, value: object) -> str | None:  # noqa: D102  # as in Field
        if type(value) is int and self.low <= value <= self.high:
            return None
        return f"must be a whole number from {self.low} to {self.high}, got {_show(value)}"


class Choice(Field[int]):
    """One of a few whole numbers."""

    def __init__(self, *accepted: int) -> None:
        self.accepted = accepted

    def problem(self, value: object) -> str | None:  # noqa: D102  # as in Field
        if type(value) is int and value in self.accepted:
            return None
        return f"must be one of {self.accepted}, got {_show(value)}"


class Bool(Field[bool]):
    """True or False, nothing else."""

    def problem(self, value: object) -> str | None:  # as in Field
        return None if type(value) is bool else f"must be true or false, got {_show(value)}"


class Float(Field[float]):
    """A finite float64 >= 0. Used for measurements and sampling, never for identity."""

    def problem(self, value: object) -> str | None:  # as in Field
        if type(value) is float and math.isfinite(value) and value >= 0.0:
            return None
        return f"must be a finite float >= 0, got {_show(value)}"


class Text(Field[str]):
    """Text of at most `max_bytes` UTF-8 bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes

    def problem(self, value: object) -> str | None:  # noqa: D102  # as in Field
        if type(value) is not str:
            return f"must be text, got {_show(value)}"
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            return f"must be text without lone surrogates, got {_show(value)}"
        if size > self.max_bytes:
            return f"must have at most {self.max_bytes} bytes of UTF-8, got {size}"
        return None


class Octets(Field[bytes]):
    """Bytes, of a size between two bounds."""

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def problem(self, value: object) -> str | None:  # noqa: D102  # as in Field
        if type(value) is not bytes:
            return f"must be bytes, got {_show(value)}"
        if not self.low <= len(value) <= self.high:
            return f"must have {self.low} to {self.high} bytes, got {len(value)}"
        return None


class Pair(Field[tuple[Any, Any]]):
    """Two values as a tuple; an array of two on the wire."""

    def __init__(self, first: Field[Any], second: Field[Any]) -> None:
        self.parts = (first, second)

    def problem(self, value: object) -> str | None:  # noqa: D102  # as in Field
        if type(value) is not tuple or len(value) != 2:
            return f"must be a pair, got {_show(value)}"
        for part, item in zip(self.parts, value, strict=True):
            problem = part.problem(item)
            if problem is not None:
                return problem
        return None

    def pack(self, value: tuple[Any, Any], minor: int) -> object:  # noqa: D102  # as in Field
        return [part.pack(item, minor) for part, item in zip(self.parts, value, strict=True)]

    def unpack(self, value: object, minor: int) -> object:  # noqa: D102  # as in Field
        if type(value) is not list or len(value) != 2:
            return value
        return tuple(part.unpack(item, minor) for part, item in zip(self.parts, value, strict=True))


class ListOf(Field[tuple[Any, ...]]):
    """A tuple of at most `high` values of one type; an array on the wire."""

    def __init__(self, item: Field[Any], high: int) -> None:
        self.item = item
        self.high = high

    def problem(self, value: object) -> str | None:  # noqa: D102  # as in Field
        if type(value) is not tuple:
            return f"must be a tuple, got {_show(value)}"
        if len(value) > self.high:
            return f"must have at most {self.high} entries, got {len(value)}"
        for index, item in enumerate(value):
            problem = self.item.problem(item)
            if problem is not None:
                return f"[{index}] {problem}"
        return None

    def pack(self, value: tuple[Any, ...], minor: int) -> object:  # noqa: D102  # as in Field
        return [self.item.pack(item, minor) for item in value]

    def unpack(self, value: object, minor: int) -> object:  # noqa: D102  # as in Field
        if type(value) is not list:
            return value
        return tuple(self.item.unpack(item, minor) for item in value)


class Record(Field[attrs.AttrsInstance]):
    """A nested attrs class whose fields have field types; an array on the wire."""

    def __init__(self, cls: type[attrs.AttrsInstance]) -> None:
        self.cls = cls
        self.fields = fields_of(cls)

    def problem(self, value: object) -> str | None:  # noqa: D102  # as in Field
        if type(value) is self.cls:
            return None
        return f"must be a {self.cls.__name__}, got {_show(value)}"

    def pack(self, value: attrs.AttrsInstance, minor: int) -> object:  # noqa: D102  # as in Field
        return [
            field.pack(getattr(value, name), minor)
            for name, field, since in self.fields
            if since <= minor
        ]

    def unpack(self, value: object, minor: int) -> object:  # noqa: D102  # as in Field
        if type(value) is not list:
            return value
        known = [(name, field) for name, field, since in self.fields if since <= minor]
        if len(value) != len(known):
            raise LocalProtocolError(
                f"{self.cls.__name__} has {len(value)} fields, protocol minor {minor} has "
                f"{len(known)}",
                reason="arity",
            )
        arguments = {
            name: field.unpack(item, minor)
            for (name, field), item in zip(known, value, strict=True)
        }
        return self.cls(**arguments)


def fields_of(cls: type[attrs.AttrsInstance]) -> tuple[tuple[str, Field[Any], int], ...]:
    """Name, field type and first minor version of each field of an attrs class, in wire order.

    The minor comes from the field's metadata entry `since`; without one it is 0.

    Raises:
      TypeError: a field has no field type, a later minor stands before an earlier one, or a field
        that was added later has no default.
    """
    found: list[tuple[str, Field[Any], int]] = []
    for attribute in attrs.fields(cls):
        if not isinstance(attribute.validator, Field):
            raise TypeError(f"{cls.__name__}.{attribute.name} has no field type")
        since = attribute.metadata.get("since", 0)
        if found and since < found[-1][2]:
            raise TypeError(f"{cls.__name__}.{attribute.name}: new fields come last")
        if since and attribute.default is attrs.NOTHING:
            raise TypeError(f"{cls.__name__}.{attribute.name}: a new field needs a default")
        found.append((attribute.name, attribute.validator, since))
    return tuple(found)


U16 = Int(0, 2**16 - 1)
U32 = Int(0, 2**32 - 1)
U64 = Int(0, 2**64 - 1)
BOOL = Bool()
FLOAT = Float()
HASH = Octets(32, 32)
DIGEST = Octets(0, 64)


def _packer(dtype: str) -> Callable[[NDArray[Any]], bytes]:
    def pack(values: NDArray[Any]) -> bytes:
        return np.ascontiguousarray(values, dtype=dtype).tobytes()

    return pack


pack_i32 = _packer("<i4")
pack_f32 = _packer("<f4")


def unpack_i32(data: bytes) -> NDArray[np.int32]:
    """i32[n] from 4n little-endian bytes; a read-only view where the machine is little-endian.

    Raises:
      LocalProtocolError: the size is no multiple of 4 (reason `field`).
    """
    if len(data) % 4:
        raise LocalProtocolError(f"{len(data)} bytes are no whole int32 values", reason="field")
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


def unpack_f32(data: bytes, n_rows: int) -> NDArray[np.float32]:
    """f32[n_rows, V] from little-endian bytes; V follows from the size.

    Raises:
      LocalProtocolError: the bytes do not form that many equal, non-empty rows (reason `field`).
    """
    if n_rows < 1 or not data or len(data) % (4 * n_rows):
        raise LocalProtocolError(
            f"{len(data)} bytes are no {n_rows} equal rows of float32 logits", reason="field"
        )
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False).reshape(n_rows, -1)
