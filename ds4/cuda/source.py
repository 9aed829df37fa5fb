"""Where a rank's weights come from: slices of a mapped file, into the planes of its arena.

A `WeightSource` knows tensors by name; it is asked for the storage type of each and then fills
device planes piece by piece. What is kept of which tensor is decided in `weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.cuda.device import Device
from ds4.cuda.layout import LAYOUTS, repack
from ds4.gguf import GGUFFile, QuantType, dequantize
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import check_hash_table

__all__ = ["FileSource", "Piece", "Uploader", "WeightSource", "plane_layout"]

STAGING_BYTES = 32 << 20
"""Size of each of the two pinned buffers."""


@attrs.frozen(kw_only=True)
class Piece:
    """Part of a tensor.

    Attributes:
      tensor: its name.
      first: first row, counted through all outer dimensions.
      count: rows.
      columns: half-open range of elements of every row; whole quant blocks.
    """

    tensor: str
    first: int
    count: int
    columns: tuple[int, int]

    @property
    def n_columns(self) -> int:
        """Elements kept of every row."""
        return self.columns[1] - self.columns[0]


def plane_layout(storage: QuantType) -> tuple[tuple[str, int], ...]:
    """(dtype, weights per item) of every plane; F32 storage has one plane of floats."""
    if storage is QuantType.F32:
        return (("float32", 1),)
    return tuple((p.dtype, p.weights_per_item) for p in LAYOUTS[storage].planes)


class WeightSource(Protocol):
    """Gives a model's weights to one rank."""

    @property
    def shape(self) -> DeepSeek4Shape:
        """Shape of the model."""

    def kind(self, name: str) -> QuantType | None:
        """Type of a tensor, or None where the model has no such tensor."""

    def fill(
        self, storage: QuantType, pieces: Sequence[Piece], planes: Sequence[Any], up: Uploader
    ) -> None:
        """Write pieces, back to back by rows, into the planes of a storage type."""

    def vector(self, name: str) -> NDArray[np.float32]:
        """A small tensor in float32, flat."""

    def hash_table(self, name: str) -> NDArray[np.int32]:
        """A checked table of expert ids, i32[V K]."""


class Uploader:
    """Copies host arrays to the device through two pinned buffers, so that copy and work overlap.

    Args:
      device: where to.
      slot_bytes: size of each buffer.

    Attributes:
      n_bytes: bytes copied so far.
    """

    def __init__(self, device: Device, slot_bytes: int = STAGING_BYTES) -> None:
        self.device = device
        self.n_bytes = 0
        self._slots = [device.pinned(slot_bytes, np.uint8) for _ in range(2)]
        self._marks: list[Any] = [None, None]
        self._turn = 0

    def put(self, target: Any, values: NDArray[Any]) -> None:
        """Enqueue the copy of a flat host array into a device array of its dtype and size.

        `values` may be changed as soon as this returns.
        """
        flat = np.ascontiguousarray(values).reshape(-1)
        room = self._slots[0].nbytes // flat.itemsize
        for at in range(0, flat.size, room):
            part = flat[at : at + room]
            slot, mark = self._slots[self._turn], self._marks[self._turn]
            if mark is not None:
                self.device.wait(mark)
            staged = slot[: part.nbytes].view(part.dtype)
            np.copyto(staged, part)
            self.device.upload(target[at : at + part.size], staged)
            self._marks[self._turn] = self.device.timestamp()
            self._turn ^= 1
            self.n_bytes += part.nbytes

    def finish(self) -> None:
        """Wait for every copy."""
        self.device.synchronize()


class FileSource:
    """Weights of an opened GGUF file that was checked against its shape."""

    def __init__(self, file: GGUFFile, shape: DeepSeek4Shape) -> None:
        self.file = file
        self.shape = shape

    def kind(self, name: str) -> QuantType | None:
        """See `WeightSource.kind`."""
        info = self.file.tensors.get(name)
        return None if info is None else info.type

    def fill(
        self, storage: QuantType, pieces: Sequence[Piece], planes: Sequence[Any], up: Uploader
    ) -> None:
        """See `WeightSource.fill`. Bytes are read once, a few megabytes at a time."""
        layout = plane_layout(storage)
        row = 0
        for piece in pieces:
            kind = self.file.tensors[piece.tensor].type
            low, high = (c // kind.block_elements * kind.block_bytes for c in piece.columns)
            expanded = 4 * piece.n_columns if storage is QuantType.F32 else high - low
            step = max(1, STAGING_BYTES // max(1, expanded))
            for first in range(0, piece.count, step):
                count = min(step, piece.count - first)
                blocks = self.file.rows(piece.tensor, piece.first + first, count)[:, low:high]
                if storage is QuantType.F32:
                    parts: Sequence[NDArray[Any]] = (dequantize(blocks, kind).reshape(-1),)
                else:
                    parts = repack(blocks, storage)
                for plane, part, (_, per_item) in zip(planes, parts, layout, strict=True):
                    at = (row + first) * (piece.n_columns // per_item)
                    up.put(plane[at : at + part.size], part)
            row += piece.count

    def vector(self, name: str) -> NDArray[np.float32]:
        """See `WeightSource.vector`."""
        info = self.file.tensors[name]
        values: NDArray[np.float32] = dequantize(self.file.rows(name), info.type).reshape(-1)
        return values

    def hash_table(self, name: str) -> NDArray[np.int32]:
        """See `WeightSource.hash_table`."""
        s = self.shape
        table = self.file.rows(name).reshape(-1).view(np.int32)
        check_hash_table(self.file.path, name, table.reshape(-1, s.n_used), s.n_experts)
        return table
