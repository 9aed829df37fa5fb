"""Simulated form of `intrinsics`: the same functions in NumPy. Import `intrinsics`, not this.

Warp-wide functions exchange values among the 32 simulator threads of a warp and stop with an error
after a minute if one of them never arrives, which on a GPU would be undefined behaviour.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import numpy as np
from numba import cuda as _numba_cuda

_PATIENCE_S = 60.0
_LANES = 32
_simulator: Any = importlib.import_module("numba.cuda.simulator.kernel")


class _Cuda:
    """The name `cuda` of kernel modules: the running kernel's view of it, or else Numba's module.

    The simulator rebinds a module's own `cuda` while one of its functions runs, and the first
    thread to leave the function rebinds it back under the others. This object needs no rebinding.
    """

    def __getattr__(self, name: str) -> Any:
        context = _simulator._kernel_context
        if context is not None and name != "jit":
            return getattr(context, name)
        return getattr(_numba_cuda, name)


cuda: Any = _Cuda()

device_function = cuda.jit(device=True)


def bounded_kernel(max_threads: int, min_blocks: int) -> Any:
    """Registers are no concern of the simulator."""
    return cuda.jit


class _Board:
    """Meeting point of one warp: every lane posts a value, then reads all."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(_LANES)
        self.slots: list[Any] = [None] * _LANES


_guard = threading.Lock()


def _exchange(value: Any) -> tuple[int, list[Any]]:
    """(own lane, values of all lanes)."""
    thread: Any = threading.current_thread()
    warp, lane = divmod(thread.thread_id, _LANES)
    manager = thread._manager
    with _guard:
        boards = manager.__dict__.setdefault("_ds4_boards", {})
        board = boards.setdefault(warp, _Board())
    board.slots[lane] = value
    board.barrier.wait(_PATIENCE_S)
    everything = list(board.slots)
    board.barrier.wait(_PATIENCE_S)
    return lane, everything


def shfl_xor(value: Any, lane_mask: int) -> Any:
    lane, everything = _exchange(value)
    return everything[lane ^ int(lane_mask)]


def shfl_from(value: Any, lane: int) -> Any:
    _, everything = _exchange(value)
    return everything[int(lane)]


class _Pointer:
    """A byte address inside one flat array; the only arithmetic is adding bytes."""

    def __init__(self, array: np.ndarray[Any, Any], offset: int) -> None:
        self.array = array
        self.offset = offset

    def __add__(self, n_bytes: Any) -> _Pointer:
        return _Pointer(self.array, self.offset + int(n_bytes))

    def load(self, dtype: Any, count: int) -> np.ndarray[Any, Any]:
        size = np.dtype(dtype).itemsize * count
        raw = self.array.view(np.uint8)
        inside = 0 <= self.offset <= raw.size - size
        assert inside, f"load of {size} bytes at {self.offset} of {raw.size}"
        assert self.offset % size == 0, f"a load of {size} bytes at {self.offset} is not aligned"
        return raw[self.offset : self.offset + size].view(dtype)


def address(array: Any, index: Any) -> _Pointer:
    while not isinstance(array, np.ndarray):
        array = array._item if hasattr(array, "_item") else array._ary
    assert array.flags.c_contiguous, "addresses are of contiguous arrays"
    return _Pointer(array.reshape(-1), int(index) * array.itemsize)


def ld_u32x4_stream(pointer: _Pointer) -> Any:
    return tuple(pointer.load(np.uint32, 4))


def ld_u32x2_stream(pointer: _Pointer) -> Any:
    return tuple(pointer.load(np.uint32, 2))


def ld_u32x2(pointer: _Pointer) -> Any:
    return tuple(pointer.load(np.uint32, 2))


def ld_u32_stream(pointer: _Pointer) -> Any:
    return pointer.load(np.uint32, 1)[0]


def ld_u16_stream(pointer: _Pointer) -> Any:
    return np.uint32(pointer.load(np.uint16, 1)[0])


def ld_u32x4(pointer: _Pointer) -> Any:
    return tuple(pointer.load(np.uint32, 4))


def ld_f32x4(pointer: _Pointer) -> Any:
    return tuple(pointer.load(np.float32, 4))


def ld_f32(pointer: _Pointer) -> Any:
    return pointer.load(np.float32, 1)[0]


def _bytes(word: Any) -> list[int]:
    return [(int(word) >> 8 * i) & 0xFF for i in range(4)]


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def dp4a(a: Any, b: Any, c: Any) -> np.int32:
    products = zip(_bytes(a), _bytes(b), strict=True)
    return np.int32(int(c) + sum(_signed(x) * _signed(y) for x, y in products))


def div(a: Any, b: Any) -> np.float32:
    return np.float32(a) / np.float32(b)


def f32_bits(value: Any) -> np.uint32:
    return np.float32(value).view(np.uint32)


def prmt(a: Any, b: Any, selector: Any) -> np.uint32:
    source = _bytes(a) + _bytes(b)
    out = 0
    for i in range(4):
        nibble = (int(selector) >> 4 * i) & 0xF
        byte = source[nibble & 7]
        if nibble & 8:
            byte = 0xFF if byte & 0x80 else 0
        out |= byte << 8 * i
    return np.uint32(out)


def fma(a: Any, b: Any, c: Any) -> np.float32:
    # The product of two float32 is exact in float64; the second rounding can differ from a true
    # fma in rare halfway cases, which the tests' tolerances cover.
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def f16_to_f32(bits: Any) -> np.float32:
    return np.float32(np.uint16(int(bits) & 0xFFFF).view(np.float16))


def pack_f16x2(low: Any, high: Any) -> np.uint32:
    halves = np.array([low, high], np.float32).astype(np.float16)
    return np.uint32(halves.view(np.uint32)[0])


def i8_to_f32(word: Any, which: Any) -> np.float32:
    return np.float32(_signed(_bytes(word)[int(which)]))


def shl(a: Any, b: Any) -> np.uint32:
    return np.uint32(int(a) << int(b) & 0xFFFFFFFF)


def shr(a: Any, b: Any) -> np.uint32:
    return np.uint32(int(a) >> int(b))


def bit_and(a: Any, b: Any) -> np.uint32:
    return np.uint32(int(a) & int(b))


def merge_bits(a: Any, b: Any, mask: Any) -> np.uint32:
    return np.uint32(int(a) | int(b) & int(mask))


def shared_address(array: Any, index: Any) -> _Pointer:
    return address(array, index)


def ld_shared_u32x4(pointer: _Pointer) -> Any:
    return tuple(pointer.load(np.uint32, 4))


def st_shared_u32x4(pointer: _Pointer, a: Any, b: Any, c: Any, d: Any) -> None:
    pointer.load(np.uint32, 4)[:] = (a, b, c, d)


def copy_async16(shared: _Pointer, source: _Pointer) -> None:
    shared.load(np.uint8, 16)[:] = source.load(np.uint8, 16)


def copy_async_wait() -> None:
    """Copies of the simulator are done at once."""


def _from_halves(values: Any) -> np.uint32:
    with np.errstate(over="ignore"):
        return np.uint32(np.asarray(values).astype(np.float16).view(np.uint32)[0])


def sub_f16x2(a: Any, b: Any) -> np.uint32:
    return _from_halves(_halves(a) - _halves(b))


def mul_f16x2(a: Any, b: Any) -> np.uint32:
    return _from_halves(_halves(a) * _halves(b))


def fma_f16x2(a: Any, b: Any, c: Any) -> np.uint32:
    product = _halves(a).astype(np.float64) * _halves(b)
    return _from_halves(product + _halves(c))


def shared_offset(pointer: _Pointer, n_bytes: Any) -> _Pointer:
    further: _Pointer = pointer + n_bytes
    return further


def ld_table(base: _Pointer, item: Any, stride: Any) -> Any:
    return (base + int(item) * int(stride)).load(np.uint32, 1)[0]


def warp_fence() -> None:
    _exchange(None)


def u32_to_i32(word: Any) -> np.int32:
    return np.uint32(word).view(np.int32)


def grid_wait() -> None:
    """Kernels of the simulator run one after another."""


def release_dependents() -> None:
    """Nothing to release; see `grid_wait`."""


def _halves(word: Any) -> np.ndarray[Any, Any]:
    return np.array([word], np.uint32).view(np.float16).astype(np.float32)


def mma_f16(
    a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any, c0: Any, c1: Any, c2: Any, c3: Any
) -> Any:
    lane, fragments = _exchange(np.array([a0, a1, a2, a3, b0, b1], np.uint32))
    g, t = divmod(lane, 4)
    halves = np.stack(fragments).view(np.float16).astype(np.float32).reshape(8, 4, 6, 2)
    # Rows g and g + 8 of A and columns 2 t and 2 t + 1 of B, both as [k half, lane, element].
    upper, lower = halves[g, :, (0, 2)], halves[g, :, (1, 3)]
    left, right = halves[2 * t, :, (4, 5)], halves[2 * t + 1, :, (4, 5)]
    return (
        np.float32(c0 + (upper * left).sum()),
        np.float32(c1 + (upper * right).sum()),
        np.float32(c2 + (lower * left).sum()),
        np.float32(c3 + (lower * right).sum()),
    )
