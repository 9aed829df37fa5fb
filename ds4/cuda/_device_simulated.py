"""The device interface over host memory, for Numba's CUDA simulator. See `ds4.cuda.device`."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.cuda.device import Device, Launch, Replay

_PRETENDED_BYTES = 8 << 30


@attrs.frozen
class _Recorded:
    """The simulator has no graphs: a replay enqueues the same launches again."""

    device: Device
    launches: tuple[Launch, ...]

    def launch(self) -> None:
        self.device.run(self.launches)

    def close(self) -> None:
        """Nothing is held."""


class SimulatedDevice(Device):
    """Kernels run as Python threads on NumPy arrays; every copy is immediate."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal, "Numba CUDA simulator")
        self._cuda: Any = importlib.import_module("numba.cuda")
        self.is_simulated = True
        self._used = 0

    def allocate(self, n_bytes: int) -> Any:
        self._used += n_bytes
        array = self._cuda.to_device(np.full(n_bytes, 0xFF, np.uint8))
        # Host memory carries no ordinal; the guard reads this one.
        array.ordinal = self.ordinal
        return array

    def memory(self) -> tuple[int, int]:
        return _PRETENDED_BYTES - self._used, _PRETENDED_BYTES

    def pinned(self, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        return np.zeros(shape, dtype)

    def upload(self, target: Any, source: NDArray[Any]) -> None:
        target.copy_to_device(np.ascontiguousarray(source).reshape(target.shape))

    def download(self, target: NDArray[Any], source: Any) -> None:
        target[...] = source.copy_to_host().reshape(target.shape)

    def copy(self, target: Any, source: Any) -> None:
        target.copy_to_device(source.copy_to_host())

    def synchronize(self) -> None:
        """Everything has already run."""

    def capture(self, launches: Sequence[Launch], *, overlap: bool = False) -> Replay:
        return _Recorded(self, tuple(launches))

    def timestamp(self) -> Any:
        return time.perf_counter()

    def wait(self, mark: Any) -> None:
        """Everything has already run."""

    def seconds_between(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    def ordinal_of(self, operand: Any) -> int | None:
        if not hasattr(operand, "__cuda_ndarray__"):
            return None
        return int(getattr(operand, "ordinal", self.ordinal))
