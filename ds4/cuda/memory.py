"""Device memory: one allocation, laid out before it is made.

Everything a rank keeps on its device is first reserved in a `MemoryLayout`, from header and options
alone; the layout's total is the memory plan. The `Arena` then makes one allocation of exactly that
size and hands out views at the planned places, so plan and use agree by construction. After
construction nothing is allocated again: a session takes its place from a `Regions` of the arena.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from ds4.cuda.device import Device
from ds4.errors import DeviceError, OutOfDeviceMemory
from ds4.model.deepseek4.shape import DeepSeek4Shape

__all__ = ["ALIGNMENT", "Arena", "MemoryLayout", "Regions", "Reservation", "state_elements"]

ALIGNMENT = 256
_GIB = float(1 << 30)


@attrs.frozen
class Reservation:
    """A place in the arena.

    Attributes:
      name: what lies there.
      offset: first byte, a multiple of `ALIGNMENT`.
      shape: of the array.
      dtype: of the array.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def n_bytes(self) -> int:
        """Bytes of the array, padding not included."""
        return math.prod(self.shape) * self.dtype.itemsize


class MemoryLayout:
    """Assigns every array of a rank its place, before there is any memory.

    Attributes:
      total_bytes: size of the arena so far.
      by_class: bytes so far of each class, padding included.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self.by_class: dict[str, int] = {}

    def reserve(
        self, kind: str, name: str, shape: int | tuple[int, ...], dtype: Any
    ) -> Reservation:
        """Reserve an array of at least one element, aligned to `ALIGNMENT` bytes.

        Args:
          kind: class of the memory plan: `weights`, `workspace`, `sessions`.
          name: of the array.
          shape: its shape; a zero-sized array gets one element, which nothing reads.
          dtype: its NumPy type.
        """
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        if math.prod(dims) == 0:
            dims = (1,)
        made = Reservation(name, self.total_bytes, dims, np.dtype(dtype))
        padded = -(-made.n_bytes // ALIGNMENT) * ALIGNMENT
        self.total_bytes += padded
        self.by_class[kind] = self.by_class.get(kind, 0) + padded
        return made

    def text(self) -> str:
        """The plan as one line: total and every class."""
        parts = ", ".join(f"{name} {n / _GIB:.2f}" for name, n in self.by_class.items())
        return f"{self.total_bytes / _GIB:.2f} GiB ({parts})"


class Arena:
    """The one allocation of a rank.

    Args:
      device: whose memory.
      layout: complete; later reservations have no place here.

    Raises:
      OutOfDeviceMemory: the plan does not fit; the text has the plan and what is free.
    """

    def __init__(self, device: Device, layout: MemoryLayout) -> None:
        self.device = device
        self.total_bytes = layout.total_bytes
        free, _ = device.memory()
        if layout.total_bytes > free:
            raise OutOfDeviceMemory(
                f"the memory plan is {layout.text()}; free on device {device.ordinal}: "
                f"{free / _GIB:.2f} GiB"
            )
        self._bytes = device.allocate(layout.total_bytes)

    def view(self, place: Reservation) -> Any:
        """Device array at a reservation, C-contiguous.

        Raises:
          DeviceError: the reservation is of another layout.
        """
        end = place.offset + place.n_bytes
        if end > self.total_bytes:
            raise DeviceError(f"{place.name} ends at byte {end} of an arena of {self.total_bytes}")
        return self._bytes[place.offset : end].view(place.dtype).reshape(*place.shape)

    def bytes_between(self, start: int, end: int) -> Any:
        """View u8[end - start] of the arena's bytes."""
        return self._bytes[start:end]


class Regions:
    """Places for sessions in one array of `capacity` elements: first fit, merged when freed.

    Pure bookkeeping; offsets and sizes are in elements.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []

    @property
    def free_elements(self) -> int:
        """Elements not taken, perhaps in several pieces."""
        return sum(size for _, size in self._free)

    def take(self, size: int) -> int | None:
        """Offset of `size` adjacent free elements, or None."""
        for index, (start, length) in enumerate(self._free):
            if length >= size:
                if length == size:
                    del self._free[index]
                else:
                    self._free[index] = (start + size, length - size)
                return start
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Return what `take` gave."""
        self._free.append((offset, size))
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


def state_elements(shape: DeepSeek4Shape, n_ctx: int) -> tuple[int, int]:
    """(fixed, growing) float32 elements of one session: window and slots; compressed rows.

    The fixed part is what a checkpoint copies.
    """
    fixed = growing = 0
    for ratio in shape.ratios:
        fixed += shape.window * shape.head_dim
        if ratio:
            c = 2 if ratio == 4 else 1
            width = shape.head_dim + (shape.index_dim if ratio == 4 else 0)
            fixed += 2 * (c * ratio) * c * width
            growing += max(1, n_ctx // ratio) * width
    return fixed, growing
