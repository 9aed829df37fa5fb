"""Sessions on the device: where each one's state lies, its checkpoints, its snapshots.

A session's region of the state array is [fixed | growing | checkpoints x fixed]: windows and
compressor slots of all layers, compressed rows of all layers, and copies of the fixed part at
earlier lengths. Cutting a timeline needs only the fixed part of an earlier length, since compressed
rows just grow. Snapshots have the CPU backend's form and bytes, so they travel between backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.cpu.state import LayerState, SessionState
from ds4.cuda.device import Device
from ds4.cuda.kernels.latent import N_PARTS, Part
from ds4.cuda.memory import Regions, state_elements
from ds4.errors import OutOfDeviceMemory
from ds4.model.deepseek4.shape import DeepSeek4Shape

__all__ = ["DeviceSession", "SessionPool"]

_UNIT = 64  # elements; keeps every region 256-byte aligned


def _padded(elements: int) -> int:
    return -(-elements // _UNIT) * _UNIT


@attrs.frozen
class _Run:
    """One part of one layer: where it lies in a region.

    Attributes:
      layer: index of the layer.
      part: its `Part`.
      offset, size: elements.
      width: elements of a row, for the growing parts.
    """

    layer: int
    part: int
    offset: int
    size: int
    width: int


def _runs(shape: DeepSeek4Shape, n_ctx: int) -> Iterator[_Run]:
    """All parts in the order of a region: the fixed ones of all layers, then the growing ones."""
    hd, idim = shape.head_dim, shape.index_dim
    at = 0

    def run(layer: int, part: int, rows: int, width: int) -> _Run:
        nonlocal at
        made = _Run(layer, part, at, rows * width, width)
        at += rows * width
        return made

    for i, ratio in enumerate(shape.ratios):
        yield run(i, Part.RING, shape.window, hd)
        if ratio:
            c = 2 if ratio == 4 else 1
            yield run(i, Part.SLOTS_K, c * ratio, c * hd)
            yield run(i, Part.SLOTS_S, c * ratio, c * hd)
            if ratio == 4:
                yield run(i, Part.INDEX_SLOTS_K, c * ratio, c * idim)
                yield run(i, Part.INDEX_SLOTS_S, c * ratio, c * idim)
    for i, ratio in enumerate(shape.ratios):
        if ratio:
            yield run(i, Part.ROWS, max(1, n_ctx // ratio), hd)
            if ratio == 4:
                yield run(i, Part.INDEX_ROWS, max(1, n_ctx // ratio), idim)


def _host_array(layer: LayerState, part: int) -> NDArray[np.float32]:
    """The CPU state's array of a part."""
    return {
        Part.RING: layer.ring,
        Part.ROWS: layer.rows,
        Part.SLOTS_K: layer.slots_k,
        Part.SLOTS_S: layer.slots_s,
        Part.INDEX_ROWS: layer.index_rows,
        Part.INDEX_SLOTS_K: layer.index_slots_k,
        Part.INDEX_SLOTS_S: layer.index_slots_s,
    }[part]


class DeviceSession:
    """One timeline. Made by `SessionPool.open`.

    Attributes:
      slot: index into the state table.
      n_ctx: tokens it can hold.
      tokens: i32[n_ctx]; the first `length` are the timeline.
      length: tokens so far.
    """

    def __init__(self, pool: SessionPool, slot: int, n_ctx: int, base: int, size: int) -> None:
        self.pool = pool
        self.slot = slot
        self.n_ctx = n_ctx
        self.base, self.size = base, size
        self.tokens = np.zeros(n_ctx, np.int32)
        self.length = 0
        # (length, place of the copy), oldest first; places are numbers below pool.checkpoints.
        self._checkpoints: list[tuple[int, int]] = []

    def append(self, tokens: NDArray[np.int32]) -> None:
        """Record tokens whose rows have been enqueued."""
        self.tokens[self.length : self.length + tokens.size] = tokens
        self.length += int(tokens.size)

    def digest(self) -> bytes:
        """As `SessionState.digest`."""
        host = SessionState.__new__(SessionState)
        host.tokens, host.length = self.tokens, self.length
        return host.digest()

    def _fixed(self, copy: int | None = None) -> Any:
        fixed, growing = state_elements(self.pool.shape, self.n_ctx)
        start = self.base
        if copy is not None:
            start += _padded(fixed + growing) + copy * _padded(fixed)
        return self.pool.state[start : start + fixed]

    def checkpoint(self) -> None:
        """Enqueue a copy of the present state for `rewind`; of too many, the densest is dropped."""
        if self.pool.checkpoints == 0:
            return
        if self._checkpoints and self._checkpoints[-1][0] == self.length:
            return
        if len(self._checkpoints) == self.pool.checkpoints:
            # Drop the one whose neighbours are closest: short and long reuse both stay possible.
            lengths = [0, *(length for length, _ in self._checkpoints), self.length]
            gaps = [lengths[i + 2] - lengths[i] for i in range(len(lengths) - 2)]
            del self._checkpoints[int(np.argmin(gaps))]
        used = {copy for _, copy in self._checkpoints}
        copy = next(i for i in range(self.pool.checkpoints) if i not in used)
        self.pool.device.copy(self._fixed(copy), self._fixed())
        self._checkpoints.append((self.length, copy))

    def rewind(self, length: int) -> int:
        """Go back to the newest exact state at or before `length`; return its length."""
        if length >= self.length:
            return self.length
        while self._checkpoints and self._checkpoints[-1][0] > length:
            self._checkpoints.pop()
        if not self._checkpoints:
            self.length = 0
            return 0
        self.length, copy = self._checkpoints[-1]
        self.pool.device.copy(self._fixed(), self._fixed(copy))
        return self.length

    # -- snapshots ---------------------------------------------------------------------------

    def _used(self, run: _Run) -> int:
        """Elements of a part that hold something at the present length."""
        if run.part not in (Part.ROWS, Part.INDEX_ROWS):
            return run.size
        return self.length // self.pool.shape.ratios[run.layer] * run.width

    def snapshot(self, identity: bytes) -> bytes:
        """As `SessionState.snapshot`."""
        pool = self.pool
        host = SessionState(pool.shape, self.n_ctx, 0)
        host.tokens[:], host.length = self.tokens, self.length
        for run in _runs(pool.shape, self.n_ctx):
            used = self._used(run)
            if used:
                target = _host_array(host.layers[run.layer], run.part)[:used]
                start = self.base + run.offset
                pool.device.download(target, pool.state[start : start + used])
        pool.device.synchronize()
        return host.snapshot(identity)

    def restore(self, identity: bytes, data: bytes) -> None:
        """As `SessionState.restore`."""
        pool = self.pool
        host = SessionState(pool.shape, self.n_ctx, 0)
        host.restore(identity, data)
        self.tokens[:], self.length = host.tokens, host.length
        for run in _runs(pool.shape, self.n_ctx):
            used = self._used(run)
            if used:
                source = _host_array(host.layers[run.layer], run.part)[:used]
                start = self.base + run.offset
                pool.device.upload(pool.state[start : start + used], source)
        pool.device.synchronize()
        self._checkpoints.clear()
        self.checkpoint()


class SessionPool:
    """Gives sessions their place in the state array and their row of the state table.

    Args:
      device: for copies.
      shape: of the model.
      state: f32[*] on the device.
      table: i64[slots, L, N_PARTS] on the device.
      checkpoints: copies of earlier states each session keeps.
    """

    def __init__(
        self, device: Device, shape: DeepSeek4Shape, state: Any, table: Any, checkpoints: int
    ) -> None:
        self.device, self.shape, self.state, self.table = device, shape, state, table
        self.checkpoints = checkpoints
        self._regions = Regions(int(state.shape[0]))
        self._free_slots = list(range(int(table.shape[0])))[::-1]

    @staticmethod
    def session_elements(shape: DeepSeek4Shape, n_ctx: int, checkpoints: int) -> int:
        """State elements of one session, its checkpoints included."""
        fixed, growing = state_elements(shape, n_ctx)
        return _padded(fixed + growing) + checkpoints * _padded(fixed)

    def open(self, n_ctx: int) -> DeviceSession:
        """Make an empty session.

        Raises:
          OutOfDeviceMemory: no slot or no region is left; the text says which, with the numbers.
        """
        size = self.session_elements(self.shape, n_ctx, self.checkpoints)
        if not self._free_slots:
            raise OutOfDeviceMemory(
                f"all {self.table.shape[0]} sessions of this rank are open; close one first"
            )
        base = self._regions.take(size)
        if base is None:
            raise OutOfDeviceMemory(
                f"a session of {n_ctx} tokens needs {4 * size / 2**20:.1f} MiB of state; "
                f"{4 * self._regions.free_elements / 2**20:.1f} MiB are free"
            )
        session = DeviceSession(self, self._free_slots.pop(), n_ctx, base, size)
        row = np.zeros((self.shape.n_layers, N_PARTS), np.int64)
        for run in _runs(self.shape, n_ctx):
            row[run.layer, run.part] = base + run.offset
        self.device.upload(self.table[session.slot], row)
        self.device.synchronize()
        return session

    def close(self, session: DeviceSession) -> None:
        """Free a session's slot and region."""
        self._regions.give_back(session.base, session.size)
        self._free_slots.append(session.slot)
