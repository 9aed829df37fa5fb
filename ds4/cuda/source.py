"""Where a rank's weights come from: slices of a mapped file, into the planes of its arena.

A `WeightSource` knows tensors by name; it is asked for the storage type of each and then fills
device planes piece by piece. What is kept of which tensor is decided in `weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.cuda.device import Device
from ds4.cuda.kernels.repack import launch_repack
from ds4.cuda.layout import LAYOUTS
from ds4.gguf import GGUFFile, QuantType, dequantize
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import check_hash_table

__all__ = ["STAGING_BYTES", "FileSource", "Piece", "Uploader", "WeightSource", "plane_layout"]

STAGING_BYTES = 32 << 20
"""Most bytes of each of the two pinned buffers, and of their twins on the device."""

_COPY_THREADS = 4


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

    Quantized rows go through a staging buffer on the device, where a kernel splits them into
    planes; host copies, transfers and kernels of neighbouring pieces overlap.

    Args:
      device: where to.
      staging: u8[2, n] on the device.

    Attributes:
      n_bytes: bytes copied so far.
    """

    def __init__(self, device: Device, staging: Any) -> None:
        self.device = device
        self.n_bytes = 0
        self.slot_bytes = int(staging.shape[1])
        self._staging = staging
        self._slots = [device.pinned(self.slot_bytes, np.uint8) for _ in range(2)]
        self._marks: list[Any] = [None, None]
        self._turn = 0
        self._threads = ThreadPoolExecutor(_COPY_THREADS)

    def _slot(self) -> NDArray[np.uint8]:
        """The next pinned buffer, once its last use is over."""
        if (mark := self._marks[self._turn]) is not None:
            self.device.wait(mark)
        return self._slots[self._turn]

    def _sent(self, n_bytes: int) -> None:
        """Note that everything that reads the present buffer has been enqueued."""
        self._marks[self._turn] = self.device.timestamp()
        self._turn ^= 1
        self.n_bytes += n_bytes

    def _gather(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Rows u8[n, m] of a mapped file, back to back in the next pinned buffer."""
        n_bytes = rows.shape[0] * rows.shape[1]
        target = self._slot()[:n_bytes].reshape(rows.shape)
        cuts = np.linspace(0, len(rows), _COPY_THREADS + 1).astype(int)
        # NumPy copies without the GIL; one thread alone is slower than the bus.
        list(self._threads.map(lambda a, b: np.copyto(target[a:b], rows[a:b]), cuts[:-1], cuts[1:]))
        return target.reshape(-1)

    def put_rows(self, target: Any, rows: NDArray[np.uint8]) -> None:
        """Enqueue the copy of rows as they are; target has their bytes in any dtype."""
        staged = self._gather(rows)
        self.device.upload(target, staged.view(target.dtype))
        self._sent(staged.size)

    def put_blocks(
        self, kind: QuantType, rows: NDArray[np.uint8], n_weights: int, first: int, planes: Any
    ) -> None:
        """Enqueue rows of quant blocks into planes; `first` is the index of the first weight."""
        staged = self._gather(rows)
        stage = self._staging[self._turn, : staged.size]
        self.device.upload(stage, staged)
        launch_repack(self.device.stream, kind, stage.view(np.uint16), n_weights, first, planes)
        self._sent(staged.size)

    def put(self, target: Any, values: NDArray[Any]) -> None:
        """Enqueue the copy of a flat host array into a device array of its dtype and size.

        `values` may be changed as soon as this returns.
        """
        flat = np.ascontiguousarray(values).reshape(-1)
        room = self.slot_bytes // flat.itemsize
        for at in range(0, flat.size, room):
            part = flat[at : at + room]
            staged = self._slot()[: part.nbytes].view(part.dtype)
            np.copyto(staged, part)
            self.device.upload(target[at : at + part.size], staged)
            self._sent(part.nbytes)

    def finish(self) -> None:
        """Wait for every copy and give up the copying threads."""
        self.device.synchronize()
        self._threads.shutdown()


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
        row = 0
        for piece in pieces:
            kind = self.file.tensors[piece.tensor].type
            low, high = (c // kind.block_elements * kind.block_bytes for c in piece.columns)
            row_bytes = 4 * piece.n_columns if storage is QuantType.F32 else high - low
            step = max(1, up.slot_bytes // max(1, row_bytes))
            for first in range(0, piece.count, step):
                count = min(step, piece.count - first)
                blocks = self.file.rows(piece.tensor, piece.first + first, count)[:, low:high]
                weight = (row + first) * piece.n_columns
                if storage is QuantType.F32:
                    values = dequantize(blocks, kind).reshape(-1)
                    up.put(planes[0][weight : weight + values.size], values)
                elif storage is QuantType.F16:
                    up.put_rows(
                        planes[0][weight // 2 : (weight + count * piece.n_columns) // 2], blocks
                    )
                else:
                    up.put_blocks(storage, blocks, count * piece.n_columns, weight, planes)
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
