"""The device interface over `cuda.core`. See `ds4.cuda.device`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from cuda.bindings import driver
from cuda.core import Device as CoreDevice
from cuda.core import EventOptions
from numpy.typing import NDArray

from ds4.cuda.device import Device, Launch, Replay, out_of_memory
from ds4.cuda.kernels.programmatic import relax_kernel_edges
from ds4.errors import DeviceError

cuda: Final[Any] = importlib.import_module("numba.cuda")
_errors: Final[Any] = importlib.import_module("numba.cuda.cudadrv.error")

try:
    _TIMED = EventOptions(timing_enabled=True)
except TypeError:  # the name before cuda-core 1.1
    _TIMED = EventOptions(enable_timing=True)


def _check(operation: str, result: Any) -> Any:
    """The values of a driver call's result tuple.

    Raises:
      DeviceError: names the operation and the driver's status.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{operation}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _foreign_errors() -> tuple[type[Exception], ...]:
    """Errors that Numba and cuda.core raise for a failed driver call."""
    # cuda.core has no public name for its error yet.
    internals: Any = importlib.import_module("cuda.core._utils.cuda_utils")
    return (_errors.CudaDriverError, internals.CUDAError)


_FOREIGN: Final = _foreign_errors()


@contextmanager
def _translated(operation: str) -> Iterator[None]:
    """Turn a foreign error into a DeviceError that names the operation."""
    try:
        yield
    except _FOREIGN as error:
        raise DeviceError(f"{operation}: {error}") from error


class _Graph:
    """An instantiated graph; the launches' operands outlive it by construction (one arena)."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph = graph
        self._stream = stream

    def launch(self) -> None:
        with _translated("graph launch"):
            self._graph.launch(self._stream)

    def close(self) -> None:
        self._graph.close()


class RealDevice(Device):
    """A GPU. Made current for the calling thread, which is the only one to use it."""

    def __init__(self, ordinal: int) -> None:
        try:
            n_devices = len(cuda.gpus)
        except (_errors.CudaSupportError, _errors.CudaDriverError) as error:
            raise DeviceError(f"no CUDA device can be used: {error}") from error
        if not 0 <= ordinal < n_devices:
            raise DeviceError(f"no CUDA device {ordinal}: this process sees {n_devices}")
        cuda.select_device(ordinal)
        self._core = CoreDevice(ordinal)
        self._core.set_current()
        super().__init__(ordinal, self._core.name)
        self.stream = self._core.create_stream()
        self._numba_stream = cuda.external_stream(int(self.stream.handle))
        self._buffers: list[Any] = []
        self._context = cuda.current_context()

    def allocate(self, n_bytes: int) -> Any:
        free, _ = self.memory()
        if n_bytes > free:
            raise out_of_memory("device arena", n_bytes, free)
        try:
            pointer = _check("cuMemAlloc", driver.cuMemAlloc(n_bytes))
        except DeviceError as error:
            raise out_of_memory(f"device arena ({error})", n_bytes, free) from error
        self._buffers.append(pointer)
        description = {
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (int(pointer), False),
            "version": 3,
        }
        return cuda.from_cuda_array_interface(description, sync=False)

    def memory(self) -> tuple[int, int]:
        free, total = _check("cuMemGetInfo", driver.cuMemGetInfo())
        return int(free), int(total)

    def pinned(self, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        array: NDArray[Any] = cuda.pinned_array(shape, dtype)
        return array

    def upload(self, target: Any, source: NDArray[Any]) -> None:
        flat = np.ascontiguousarray(source)
        pointer = int(target.device_ctypes_pointer.value)
        copy = driver.cuMemcpyHtoDAsync(pointer, flat.ctypes.data, flat.nbytes, self.stream.handle)
        _check("copy to device", copy)

    def download(self, target: NDArray[Any], source: Any) -> None:
        pointer = int(source.device_ctypes_pointer.value)
        copy = driver.cuMemcpyDtoHAsync(
            target.ctypes.data, pointer, target.nbytes, self.stream.handle
        )
        _check("copy to host", copy)

    def copy(self, target: Any, source: Any) -> None:
        to, start = int(target.device_ctypes_pointer.value), int(source.device_ctypes_pointer.value)
        _check("copy", driver.cuMemcpyDtoDAsync(to, start, target.nbytes, self.stream.handle))

    def synchronize(self) -> None:
        _check("step", driver.cuStreamSynchronize(self.stream.handle))

    def run(self, launches: Iterable[Launch]) -> None:
        for launch in launches:
            with _translated(launch.name):
                launch.enqueue(self.stream)

    def capture(self, launches: Sequence[Launch], *, overlap: bool = False) -> Replay:
        self.synchronize()
        with _translated("graph capture"):
            builder = self.stream.create_graph_builder()
            builder.begin_building()
            for launch in launches:
                launch.enqueue(builder)
            builder.end_building()
            if overlap:
                relax_kernel_edges(builder.graph_definition.handle)
            graph = builder.complete()
            builder.close()
        return _Graph(graph, self.stream)

    def timestamp(self) -> Any:
        return self.stream.record(options=_TIMED)

    def wait(self, mark: Any) -> None:
        mark.sync()

    def seconds_between(self, begin: Any, end: Any) -> float:
        end.sync()
        return float(end - begin) / 1e3

    def ordinal_of(self, operand: Any) -> int | None:
        data = getattr(operand, "gpu_data", None)
        if data is None:
            return None
        return int(data.context.device.id)

    def close(self) -> None:
        if self._buffers:
            self.synchronize()
        for pointer in self._buffers:
            _check("cuMemFree", driver.cuMemFree(pointer))
        self._buffers.clear()
