"""Writes GGUF bytes by hand, so that tests can write what no writer would."""

import struct

import attrs

from ds4.gguf.constants import QuantType, ValueType

FORMATS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "B",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def string(text):
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def scalar(kind, value):
    body = string(value) if kind == ValueType.STRING else struct.pack("<" + FORMATS[kind], value)
    return u32(kind) + body


def array(kind, items, count=None):
    """An array; `items` are values of `kind`, or the finished bytes."""
    if not isinstance(items, bytes):
        count = len(items) if count is None else count
        if kind == ValueType.STRING:
            items = b"".join(string(item) for item in items)
        else:
            items = struct.pack(f"<{len(items)}{FORMATS[kind]}", *items)
    return u32(ValueType.ARRAY) + u32(kind) + u64(count) + items


def key(name, value):
    return string(name) + value


def tensor(name, ne, kind, offset, n_dims=None):
    dims = struct.pack(f"<{len(ne)}Q", *ne)
    return (
        string(name) + u32(len(ne) if n_dims is None else n_dims) + dims + u32(kind) + u64(offset)
    )


@attrs.define
class File:
    """Parts of a file; the defaults form a small valid one."""

    keys: list = attrs.Factory(
        lambda: [
            key("general.architecture", scalar(ValueType.STRING, "deepseek4")),
            key("numbers", array(ValueType.INT32, [3, -4, 5])),
            key("words", array(ValueType.STRING, ["a", "", "žluť", "𝔻"])),
            key("flag", scalar(ValueType.BOOL, 1)),
        ]
    )
    tensors: list = attrs.Factory(
        lambda: [
            tensor("first", [8, 2], QuantType.F32, 0),
            tensor("second", [32, 3], QuantType.Q8_0, 64),
        ]
    )
    data: bytes = bytes(range(166))
    magic: bytes = b"GGUF"
    version: bytes = u32(3)
    n_tensors: int | None = None
    n_keys: int | None = None
    alignment: int = 32

    def header(self):
        counts = u64(len(self.tensors) if self.n_tensors is None else self.n_tensors)
        counts += u64(len(self.keys) if self.n_keys is None else self.n_keys)
        return self.magic + self.version + counts + b"".join(self.keys) + b"".join(self.tensors)

    def build(self):
        header = self.header()
        return header + bytes(-len(header) % self.alignment) + self.data

    def with_key(self, name, value):
        self.keys.append(key(name, value))
        return self
