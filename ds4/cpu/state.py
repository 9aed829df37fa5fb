"""State of one session on the CPU: window, compressed rows, compressor slots, and checkpoints.

Compressed rows only grow, so cutting a timeline needs just the window and the compressor slots of
the earlier position. Checkpoints keep those at the end of prompt chunks; a rewind goes back to the
newest one at or before the wanted length, and the caller feeds the tokens in between again. Since
the bits of a row do not depend on chunking, the result is as if the rest had never been.
"""

from __future__ import annotations

import hashlib
import zlib

import attrs
import msgpack
import numpy as np
from numpy.typing import NDArray

from ds4.errors import SnapshotError
from ds4.model.deepseek4.shape import DeepSeek4Shape

__all__ = ["LayerState", "SessionState"]

Floats = NDArray[np.float32]
_MAGIC = b"ds4-snapshot"
_VERSION = 1
_MAX_CHECKPOINTS = 8


def _empty() -> Floats:
    return np.zeros(0, np.float32)


@attrs.define(kw_only=True)
class LayerState:
    """Attention state of one layer. All arrays are flat and C-contiguous.

    Attributes:
      ring: f32[capacity * head_dim]; position p lives in row p % capacity.
      rows: f32[n_ctx // ratio * head_dim], compressed rows; memory is committed as it is written.
      slots_k, slots_s: f32[n_slots * c * head_dim], compressor slots (see `kernels.attention`).
      index_rows, index_slots_k, index_slots_s: the same of the indexer, ratio 4 only.
    """

    ring: Floats
    rows: Floats = attrs.Factory(_empty)
    slots_k: Floats = attrs.Factory(_empty)
    slots_s: Floats = attrs.Factory(_empty)
    index_rows: Floats = attrs.Factory(_empty)
    index_slots_k: Floats = attrs.Factory(_empty)
    index_slots_s: Floats = attrs.Factory(_empty)

    def slots(self) -> tuple[Floats, ...]:
        """The fixed-size parts a checkpoint copies."""
        return (self.slots_k, self.slots_s, self.index_slots_k, self.index_slots_s)


@attrs.frozen
class _Checkpoint:
    length: int
    windows: tuple[Floats, ...]
    slots: tuple[tuple[Floats, ...], ...]


class SessionState:
    """One timeline: tokens, per-layer state, running digest, checkpoints.

    Args:
      shape: the model's shape.
      n_ctx: tokens the session can hold.
      max_rows: most rows of this session in one forward pass.
    """

    def __init__(self, shape: DeepSeek4Shape, n_ctx: int, max_rows: int) -> None:
        self.shape = shape
        self.n_ctx = n_ctx
        self.capacity = shape.window + max_rows
        self.tokens = np.zeros(n_ctx, np.int32)
        self.length = 0
        self.layers = [self._new_layer(ratio) for ratio in shape.ratios]
        self._checkpoints: list[_Checkpoint] = []

    def _new_layer(self, ratio: int) -> LayerState:
        hd, idim = self.shape.head_dim, self.shape.index_dim
        layer = LayerState(ring=np.zeros(self.capacity * hd, np.float32))
        if ratio:
            slots = ratio * (4 if ratio == 4 else 1)
            layer.rows = np.zeros(max(1, self.n_ctx // ratio) * hd, np.float32)
            layer.slots_k = np.zeros(slots * hd, np.float32)
            layer.slots_s = np.zeros(slots * hd, np.float32)
        if ratio == 4:
            layer.index_rows = np.zeros(max(1, self.n_ctx // ratio) * idim, np.float32)
            layer.index_slots_k = np.zeros(slots * idim, np.float32)
            layer.index_slots_s = np.zeros(slots * idim, np.float32)
        return layer

    def append(self, tokens: NDArray[np.int32]) -> None:
        """Record tokens whose rows have been computed."""
        self.tokens[self.length : self.length + tokens.size] = tokens
        self.length += int(tokens.size)

    def digest(self) -> bytes:
        """BLAKE2b-128 of the tokens: equal on all ranks that hold the same timeline."""
        return hashlib.blake2b(self.tokens[: self.length].tobytes(), digest_size=16).digest()

    # -- window in logical order -------------------------------------------------------------

    def _window_positions(self) -> NDArray[np.int64]:
        return np.arange(max(0, self.length - self.shape.window), self.length)

    def _window(self, layer: LayerState) -> Floats:
        ring = layer.ring.reshape(self.capacity, -1)
        window: Floats = ring[self._window_positions() % self.capacity].reshape(-1)
        return window

    def _set_window(self, layer: LayerState, window: Floats) -> None:
        ring = layer.ring.reshape(self.capacity, -1)
        positions = self._window_positions()
        # No -1 here: it cannot be inferred for the empty window of an empty timeline.
        ring[positions % self.capacity] = window.reshape(positions.size, ring.shape[1])

    # -- checkpoints -------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Remember the present state for `rewind`; the oldest of too many is thinned out."""
        if self._checkpoints and self._checkpoints[-1].length == self.length:
            return
        self._checkpoints.append(
            _Checkpoint(
                self.length,
                tuple(self._window(layer) for layer in self.layers),
                tuple(tuple(part.copy() for part in layer.slots()) for layer in self.layers),
            )
        )
        if len(self._checkpoints) > _MAX_CHECKPOINTS:
            # Drop the one whose neighbours are closest: short and long reuse both stay possible.
            lengths = [0, *(c.length for c in self._checkpoints)]
            gaps = [lengths[i + 2] - lengths[i] for i in range(len(lengths) - 2)]
            del self._checkpoints[int(np.argmin(gaps))]

    def rewind(self, length: int) -> int:
        """Go back to the newest exact state at or before `length`; return its length."""
        if length >= self.length:
            return self.length
        while self._checkpoints and self._checkpoints[-1].length > length:
            self._checkpoints.pop()
        if not self._checkpoints:
            self.length = 0
            return 0
        checkpoint = self._checkpoints[-1]
        self.length = checkpoint.length
        for layer, window, slots in zip(
            self.layers, checkpoint.windows, checkpoint.slots, strict=True
        ):
            self._set_window(layer, window)
            for part, saved in zip(layer.slots(), slots, strict=True):
                part[:] = saved
        return self.length

    # -- snapshots ---------------------------------------------------------------------------

    def _arrays(self) -> list[Floats]:
        out: list[Floats] = []
        hd, idim = self.shape.head_dim, self.shape.index_dim
        for ratio, layer in zip(self.shape.ratios, self.layers, strict=True):
            out.append(self._window(layer))
            if ratio:
                out.append(layer.rows[: self.length // ratio * hd])
            if ratio == 4:
                out.append(layer.index_rows[: self.length // ratio * idim])
            out.extend(part for part in layer.slots() if part.size)
        return out

    def snapshot(self, identity: bytes) -> bytes:
        """Serialize the timeline.

        Layout: magic, u32 header length, msgpack header [version, identity, length, sizes, crc32],
        tokens i32, then per layer window, compressed rows, indexer rows, slots, all little-endian.
        """
        arrays = self._arrays()
        body = b"".join([self.tokens[: self.length].tobytes(), *(a.tobytes() for a in arrays)])
        sizes = [int(a.size) for a in arrays]
        header = msgpack.packb([_VERSION, identity, self.length, sizes, zlib.crc32(body)])
        return b"".join([_MAGIC, len(header).to_bytes(4, "little"), header, body])

    def restore(self, identity: bytes, data: bytes) -> None:
        """Replace this timeline by a snapshot; unchanged when the snapshot is refused.

        Raises:
          SnapshotError: damaged, of another model or switch, or longer than this session.
        """
        body, length, sizes = _parse(identity, data)
        if length > self.n_ctx:
            raise SnapshotError(f"snapshot of {length} tokens, session holds {self.n_ctx}")
        fresh = SessionState(self.shape, self.n_ctx, self.capacity - self.shape.window)
        fresh.tokens[:length] = np.frombuffer(body, np.int32, length)
        fresh.length = length
        if [int(a.size) for a in fresh._arrays()] != sizes:
            raise SnapshotError("snapshot has other array sizes than this model")
        values = np.frombuffer(body, np.float32, offset=4 * length)
        ends = np.cumsum(sizes)
        pieces = iter(np.split(values, ends[:-1]))
        for ratio, layer in zip(self.shape.ratios, fresh.layers, strict=True):
            fresh._set_window(layer, next(pieces))
            for used, rows in ((ratio > 0, layer.rows), (ratio == 4, layer.index_rows)):
                if used:
                    piece = next(pieces)
                    rows[: piece.size] = piece
            for part in layer.slots():
                if part.size:
                    part[:] = next(pieces)
        fresh.checkpoint()
        self.tokens, self.length = fresh.tokens, fresh.length
        self.layers, self._checkpoints = fresh.layers, fresh._checkpoints


def _parse(identity: bytes, data: bytes) -> tuple[memoryview, int, list[int]]:
    """Check a snapshot's frame; return its body, length in tokens, and array sizes."""
    start = len(_MAGIC) + 4
    if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
        raise SnapshotError("not a ds4 snapshot")
    n = int.from_bytes(data[len(_MAGIC) : start], "little")
    try:
        header = msgpack.unpackb(data[start : start + n])
        version, owner, length, sizes, crc = header
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise SnapshotError(f"snapshot header is damaged: {error}") from error
    if version != _VERSION:
        raise SnapshotError(f"snapshot version {version!r}, this build reads {_VERSION}")
    if owner != identity:
        raise SnapshotError("snapshot of another model or another activation rounding")
    counts = [length, crc, *sizes] if isinstance(sizes, list) else [None]
    if not all(type(n) is int and n >= 0 for n in counts):
        raise SnapshotError("snapshot header holds a field of the wrong type")
    body = memoryview(data)[start + n :]
    if len(body) != 4 * (length + sum(sizes)) or zlib.crc32(body) != crc:
        raise SnapshotError("snapshot body is truncated or damaged")
    return body, length, sizes
