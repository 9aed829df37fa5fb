"""One rank's device: its ordinal, its stream, memory, copies, timing and graph capture.

`cuda.core` owns device, stream, memory and graph; Numba kernels get array views of that memory and
launch on that stream. Under Numba's CUDA simulator (`NUMBA_ENABLE_CUDASIM=1`) the same interface
runs on host memory, so everything above this module can be tested without a GPU. Nothing here
knows models or kernels.

Ownership: a `Device` is created, used and closed by one thread; handles are given up in `close`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import attrs
from numpy.typing import NDArray

from ds4.errors import ConfigError, DeviceError, OutOfDeviceMemory

__all__ = [
    "Device",
    "Launch",
    "Operand",
    "Replay",
    "check_operands",
    "is_available",
    "open_device",
    "require_packages",
]


@attrs.frozen
class Operand:
    """One array of a launch, as far as the guard is concerned.

    Attributes:
      name: what the launch calls it.
      ordinal: device whose memory it is in.
    """

    name: str
    ordinal: int


def check_operands(launch: str, ordinal: int, operands: Iterable[Operand]) -> None:
    """Refuse a launch whose operands do not all live on the launching device.

    Peer access would make such a launch work, slowly and silently; without it, it is a fault.

    Raises:
      DeviceError: names the launch, the operand and both devices.
    """
    for operand in operands:
        if operand.ordinal != ordinal:
            raise DeviceError(
                f"{launch}: operand {operand.name} is on device {operand.ordinal}, "
                f"the launch is on device {ordinal}"
            )


@attrs.frozen
class Launch:
    """A kernel bound to its operands: enqueued any number of times, eagerly or into a graph.

    Attributes:
      name: for errors and traces.
      enqueue: puts the kernel on a stream or a graph builder.
    """

    name: str
    enqueue: Callable[[Any], None]


class Replay(Protocol):
    """A captured sequence of launches."""

    def launch(self) -> None:
        """Enqueue the whole sequence on the device's stream."""

    def close(self) -> None:
        """Free the graph. Safe to call twice."""


class Device:
    """What a rank does with its GPU. Use `open_device`.

    Attributes:
      ordinal: device ordinal in this process.
      name: as the driver reports it.
      stream: what launches go to.
    """

    def __init__(self, ordinal: int, name: str) -> None:
        self.ordinal = ordinal
        self.name = name
        self.stream: Any = 0
        self.is_simulated = False

    def allocate(self, n_bytes: int) -> Any:
        """Allocate u8[n_bytes], 256-byte aligned; freed by `close`.

        Raises:
          OutOfDeviceMemory: does not fit; the text has both numbers.
        """
        raise NotImplementedError

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device now."""
        raise NotImplementedError

    def pinned(self, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Page-locked host array, for copies that overlap with work."""
        raise NotImplementedError

    def upload(self, target: Any, source: NDArray[Any]) -> None:
        """Enqueue host to device; `source` must stay unchanged until a `synchronize`."""
        raise NotImplementedError

    def download(self, target: NDArray[Any], source: Any) -> None:
        """Enqueue device to host; `target` is valid after `synchronize`."""
        raise NotImplementedError

    def copy(self, target: Any, source: Any) -> None:
        """Enqueue device to device."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until everything enqueued is done. Releases the GIL.

        Raises:
          DeviceError: a kernel failed.
        """
        raise NotImplementedError

    def capture(self, launches: Sequence[Launch], *, overlap: bool = False) -> Replay:
        """Capture launches into a graph. Nothing runs; every kernel must have run once before.

        Args:
          launches: in order.
          overlap: let a kernel start before its predecessor has ended. Every kernel must then wait
            for it by itself (`kernels.block.begin`) before it touches what others write.
        """
        raise NotImplementedError

    def timestamp(self) -> Any:
        """Mark the present point of the stream, for `seconds_between`."""
        raise NotImplementedError

    def wait(self, mark: Any) -> None:
        """Wait until the stream has passed a mark of `timestamp`."""
        raise NotImplementedError

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Device seconds between two marks that the stream has passed."""
        raise NotImplementedError

    def close(self) -> None:
        """Free stream and memory. Safe to call twice."""

    def run(self, launches: Iterable[Launch]) -> None:
        """Enqueue launches one by one on the stream."""
        for launch in launches:
            launch.enqueue(self.stream)

    def bind(
        self, name: str, kernel: Any, grid: Any, block: int, operands: Sequence[Any]
    ) -> Launch:
        """Bind a compiled kernel to its arguments, after the operand guard.

        Args:
          name: of the launch.
          kernel: a `cuda.jit` dispatcher.
          grid: blocks per axis.
          block: threads of a block.
          operands: the kernel's arguments; those with device memory are checked.

        Raises:
          DeviceError: an operand is on another device.
        """
        self.guard(name, operands)
        arguments = tuple(operands)
        stream_of_launcher: Any = None
        launcher: Any = None

        def enqueue(stream: Any) -> None:
            nonlocal stream_of_launcher, launcher
            # Configuring a launch costs as much as the launch, so it is done once a stream.
            if launcher is None or stream is not stream_of_launcher:
                launcher, stream_of_launcher = kernel[grid, block, stream], stream
            launcher(*arguments)

        return Launch(name, enqueue)

    def guard(self, name: str, operands: Sequence[Any]) -> None:
        """Run `check_operands` over the arrays among a launch's operands."""
        arrays = (
            Operand(str(index), ordinal)
            for index, operand in enumerate(operands)
            if (ordinal := self.ordinal_of(operand)) is not None
        )
        check_operands(name, self.ordinal, arrays)

    def ordinal_of(self, operand: Any) -> int | None:
        """Device of an array, or None for what is not a device array."""
        raise NotImplementedError


def open_device(ordinal: int = 0) -> Device:
    """Open a CUDA device, or the simulator's when `NUMBA_ENABLE_CUDASIM=1`.

    Raises:
      ConfigError: see `require_packages`.
      DeviceError: no such device.
    """
    require_packages()
    if _is_simulated():
        from ds4.cuda._device_simulated import SimulatedDevice

        return SimulatedDevice(ordinal)
    from ds4.cuda._device_real import RealDevice

    return RealDevice(ordinal)


def out_of_memory(what: str, wanted: int, free: int) -> OutOfDeviceMemory:
    """The error for an allocation that does not fit, with its arithmetic."""
    gib = float(1 << 30)
    return OutOfDeviceMemory(
        f"{what}: {wanted / gib:.2f} GiB wanted, {free / gib:.2f} GiB free on the device"
    )


def require_packages() -> None:
    """Check that the CUDA backend can run here, before any kernel module is imported.

    Raises:
      ConfigError: a package of the extra `cuda` is missing, or there is no device; says which.
    """
    if _is_simulated():
        return
    missing = [
        name for name in ("numba_cuda", "cuda.core", "cuda.bindings") if not _is_installed(name)
    ]
    if missing:
        raise ConfigError(
            f"backend cuda needs the packages of the extra 'cuda' (pip install 'ds4[cuda]'); "
            f"missing: {', '.join(missing)}"
        )
    cuda: Any = importlib.import_module("numba.cuda")
    if not cuda.is_available():
        raise ConfigError("backend cuda needs a CUDA device, and this process sees none")


def _is_simulated() -> bool:
    config: Any = importlib.import_module("numba.core.config")
    return bool(config.ENABLE_CUDASIM)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def is_available() -> bool:
    """Whether `require_packages` would pass."""
    try:
        require_packages()
    except ConfigError:
        return False
    return True
