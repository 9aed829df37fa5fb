"""The mixture-of-experts block of a prefill step on tensor cores, by lists of tokens per expert.

The invariant is that of `gemm.py`: a token's products do not depend on the other tokens; sums over
experts go by shard in the order of the router's list, then by the tree. The shared expert is two
ordinary tiled products and a sharded one, which the caller launches; `launch_join` adds everything.

Three kernels: up (gate, up, SwiGLU, router weight, rounded to halves), down, join. Between them the
rows of h are in list order, those of y by choice.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import attrs
import numpy as np
from numba import float32, int32, int64, uint32

from ds4.cuda.kernels.expert_lists import LIST_TILE
from ds4.cuda.kernels.gemm import tile_product
from ds4.cuda.kernels.intrinsics import (
    address,
    bounded_kernel,
    copy_async16,
    copy_async_wait,
    cuda,
    device_function,
    div,
    grid_wait,
    pack_f16x2,
    release_dependents,
    shared_address,
    shared_offset,
    st_shared_u32x4,
)
from ds4.cuda.kernels.quant_matmul import DeviceMatrix
from ds4.cuda.kernels.tile_weights import SCALE_BITS, eight_weights
from ds4.gguf.constants import QuantType

__all__ = ["TiledExpertShape", "TiledExperts", "launch_join"]

_THREADS = 128
_STEP = 32
_IQ2, _Q2K = QuantType.IQ2_XXS, QuantType.Q2_K


@attrs.frozen
class TiledExpertShape:
    """Sizes of the routed experts: D, F, K chosen per token, and the clamp of SwiGLU."""

    d_model: int
    d_expert: int
    n_used: int
    clamp: float


@functools.cache
def _tile_steps(kind: QuantType, k: int) -> tuple[Any, Any]:
    """Device functions (fetch, store) of 32 weight rows per call, quarter `i` of a tile of 128.

    fetch(i, p0, p1, p2, p3, row0, kb, thread, w): rows row0 to row0 + 31 into w[4 i : 4 i + 4].
    store(i, w, kb, thread, w_at, table): converted, at rows 32 i of the tile at w_at.
    """
    fetch_eight, convert = eight_weights(kind, k)

    @device_function
    def fetch(i, p0, p1, p2, p3, row0, kb, thread, w):
        row = row0 + (thread >> 2)
        r0, r1, r2, r3 = fetch_eight(p0, p1, p2, p3, row, kb, thread & 3)
        w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3] = r0, r1, r2, r3

    @device_function
    def store(i, w, kb, thread, w_at, table):
        h0, h1, h2, h3 = convert(
            w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3], kb, thread & 3, table
        )
        at = shared_offset(w_at, ((thread >> 2) + 32 * i) * 64 + (thread & 3) * 16)
        st_shared_u32x4(at, h0, h1, h2, h3)

    return fetch, store


@device_function
def _copy_row(x, row, x_row, kb, line, thread, x_at):
    """Start the copy of this thread's 16 bytes of a row's step to tile line `line`."""
    item = int64(row) * (x_row // 2) + 16 * kb + 4 * (thread & 3)
    copy_async16(shared_offset(x_at, line * 64 + (thread & 3) * 16), address(x, item))


@functools.cache
def _up_kernel(shape: TiledExpertShape) -> Any:
    """Kernel: h[p] = weight * silu(min(W1 x, c)) * clamp(W3 x, -c, c) in halves, list order.

    The kernel takes: g0 to g3, u0 to u3 (IQ2_XXS planes of gate and up, [slots * F, D]); tiles,
    order (`expert_lists`); x u32 halves [T, D]; weights f32[T K]; selectors u32[258];
    h u32 halves [T K, F].

    Grid: (F / 64, tiles) blocks of 128 threads: 64 positions x 64 h, gate rows in the left half of
    the weight tile and up rows in the right one, so warps 0 and 2 hold gate and warps 1 and 3 up.
    Static shared memory: x 8 KiB, weights 16 KiB (then gate sums), selectors 1 KiB. Accumulates in
    float32. Oracle: `dequantize` and float64.
    """
    d, f, n_used, clamp = shape.d_model, shape.d_expert, shape.n_used, np.float32(shape.clamp)
    fetch, store = _tile_steps(_IQ2, d)
    product = tile_product(2)
    steps = d // _STEP
    scale = np.float32(2.0 ** -SCALE_BITS[_IQ2])

    @device_function
    def fetch_all(g0, g1, g2, g3, u0, u1, u2, u3, row, kb, thread, w):
        fetch(0, g0, g1, g2, g3, row, kb, thread, w)
        fetch(1, g0, g1, g2, g3, row + 32, kb, thread, w)
        fetch(2, u0, u1, u2, u3, row, kb, thread, w)
        fetch(3, u0, u1, u2, u3, row + 32, kb, thread, w)

    @device_function
    def clamped(value):
        return max(min(value, clamp), -clamp)

    @bounded_kernel(_THREADS, 3)
    def up(g0, g1, g2, g3, u0, u1, u2, u3, tiles, order, x, weights, selectors, h):
        release_dependents()
        x_tile = cuda.shared.array(2048, uint32)
        w_tile = cuda.shared.array(4096, uint32)
        table = cuda.shared.array(258, uint32)
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        warp_m, warp_n = warp >> 1, warp & 1
        for i in range(thread, 258, 128):
            table[i] = selectors[i]
        grid_wait()
        tile = cuda.blockIdx.y
        count = tiles[3 * tile + 2]
        if count > 0:
            first = tiles[3 * tile + 1]
            row = int64(tiles[3 * tile]) * f + cuda.blockIdx.x * 64
            line0, line1 = thread >> 2, (thread >> 2) + 32
            token0 = order[first + min(line0, count - 1)] // n_used
            token1 = order[first + min(line1, count - 1)] // n_used
            x_at, w_at = shared_address(x_tile, 0), shared_address(w_tile, 0)
            table_at = shared_address(table, 0)
            acc = cuda.local.array(64, float32)
            for i in range(64):
                acc[i] = float32(0)
            w = cuda.local.array(16, uint32)
            cuda.syncthreads()
            fetch_all(g0, g1, g2, g3, u0, u1, u2, u3, row, 0, thread, w)
            _copy_row(x, token0, d, 0, line0, thread, x_at)
            _copy_row(x, token1, d, 0, line1, thread, x_at)
            store(0, w, 0, thread, w_at, table_at)
            store(1, w, 0, thread, w_at, table_at)
            store(2, w, 0, thread, w_at, table_at)
            store(3, w, 0, thread, w_at, table_at)
            copy_async_wait()
            cuda.syncthreads()
            for s in range(steps):
                here, there = s & 1, (s + 1) & 1
                more = s + 1 < steps
                next_w = shared_offset(w_at, there * 8192)
                if more:
                    next_x = shared_offset(x_at, there * 4096)
                    fetch_all(g0, g1, g2, g3, u0, u1, u2, u3, row, s + 1, thread, w)
                    _copy_row(x, token0, d, s + 1, line0, thread, next_x)
                    _copy_row(x, token1, d, s + 1, line1, thread, next_x)
                product(
                    shared_offset(x_at, here * 4096), shared_offset(w_at, here * 8192), warp_m,
                    warp_n, lane, acc,
                )  # fmt: skip
                if more:
                    store(0, w, s + 1, thread, next_w, table_at)
                    store(1, w, s + 1, thread, next_w, table_at)
                    store(2, w, s + 1, thread, next_w, table_at)
                    store(3, w, s + 1, thread, next_w, table_at)
                copy_async_wait()
                cuda.syncthreads()
            # Gate sums cross to the up warps as 64 x 64 float32 in the weight tile. SwiGLU runs
            # over shared memory: unrolled over registers it would be too large to stay in them.
            gates = w_tile.view(np.float32)
            line = warp_m * 32 + (lane >> 2)
            column = 2 * (lane & 3)
            if warp_n == 0:
                for mt in range(2):
                    for nt in range(8):
                        i = (mt * 8 + nt) * 4
                        at = (line + 16 * mt) * 64 + column + 8 * nt
                        gates[at], gates[at + 1] = acc[i], acc[i + 1]
                        gates[at + 512], gates[at + 513] = acc[i + 2], acc[i + 3]
            cuda.syncthreads()
            for at in range(thread, 4096, 128):
                gate = min(gates[at] * scale, clamp)
                gates[at] = div(gate, float32(1) + math.exp(-gate))
            cuda.syncthreads()
            if warp_n == 1:
                for mt in range(2):
                    for half in range(2):
                        position = line + 16 * mt + 8 * half
                        if position < count:
                            weight = weights[order[first + position]]
                            base = int64(first + position) * (f // 2) + cuda.blockIdx.x * 32
                            for nt in range(8):
                                i = (mt * 8 + nt) * 4 + 2 * half
                                at = position * 64 + column + 8 * nt
                                low = gates[at] * clamped(acc[i] * scale)
                                high = gates[at + 1] * clamped(acc[i + 1] * scale)
                                word = pack_f16x2(weight * low, weight * high)
                                h[base + (column + 8 * nt) // 2] = word

    return up


@functools.cache
def _down_kernel(shape: TiledExpertShape) -> Any:
    """Kernel: y[order[p]] = W2 h[p] in float32, by choice.

    The kernel takes: p0 to p3 (Q2_K planes, [slots * D, F]); tiles, order; h u32 halves [T K, F];
    y f32[T K, D] flat.

    Grid: (D / 128, tiles) blocks of 128 threads: 64 positions x 128 outputs. Static shared memory:
    24 KiB. Accumulates in float32. Oracle: `dequantize` and float64.
    """
    d, f = shape.d_model, shape.d_expert
    fetch, store = _tile_steps(_Q2K, f)
    product = tile_product(2)
    steps = f // _STEP
    scale = np.float32(2.0 ** -SCALE_BITS[_Q2K])

    @device_function
    def fetch_all(p0, p1, p2, p3, row, kb, thread, w):
        fetch(0, p0, p1, p2, p3, row, kb, thread, w)
        fetch(1, p0, p1, p2, p3, row + 32, kb, thread, w)
        fetch(2, p0, p1, p2, p3, row + 64, kb, thread, w)
        fetch(3, p0, p1, p2, p3, row + 96, kb, thread, w)

    @device_function
    def store_all(w, kb, thread, w_at):
        store(0, w, kb, thread, w_at, w_at)
        store(1, w, kb, thread, w_at, w_at)
        store(2, w, kb, thread, w_at, w_at)
        store(3, w, kb, thread, w_at, w_at)

    @bounded_kernel(_THREADS, 3)
    def down(p0, p1, p2, p3, tiles, order, h, y):
        release_dependents()
        x_tile = cuda.shared.array(2048, uint32)
        w_tile = cuda.shared.array(4096, uint32)
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        warp_m, warp_n = warp >> 1, warp & 1
        grid_wait()
        tile = cuda.blockIdx.y
        count = tiles[3 * tile + 2]
        if count > 0:
            first = tiles[3 * tile + 1]
            row = int64(tiles[3 * tile]) * d + cuda.blockIdx.x * 128
            line0, line1 = thread >> 2, (thread >> 2) + 32
            source0 = first + min(line0, count - 1)
            source1 = first + min(line1, count - 1)
            x_at, w_at = shared_address(x_tile, 0), shared_address(w_tile, 0)
            acc = cuda.local.array(64, float32)
            for i in range(64):
                acc[i] = float32(0)
            w = cuda.local.array(16, uint32)
            fetch_all(p0, p1, p2, p3, row, 0, thread, w)
            _copy_row(h, source0, f, 0, line0, thread, x_at)
            _copy_row(h, source1, f, 0, line1, thread, x_at)
            store_all(w, 0, thread, w_at)
            copy_async_wait()
            cuda.syncthreads()
            for s in range(steps):
                here, there = s & 1, (s + 1) & 1
                more = s + 1 < steps
                if more:
                    next_x = shared_offset(x_at, there * 4096)
                    fetch_all(p0, p1, p2, p3, row, s + 1, thread, w)
                    _copy_row(h, source0, f, s + 1, line0, thread, next_x)
                    _copy_row(h, source1, f, s + 1, line1, thread, next_x)
                product(
                    shared_offset(x_at, here * 4096), shared_offset(w_at, here * 8192), warp_m,
                    warp_n, lane, acc,
                )  # fmt: skip
                if more:
                    store_all(w, s + 1, thread, shared_offset(w_at, there * 8192))
                copy_async_wait()
                cuda.syncthreads()
            line = warp_m * 32 + (lane >> 2)
            column = cuda.blockIdx.x * 128 + warp_n * 64 + 2 * (lane & 3)
            for mt in range(2):
                for half in range(2):
                    position = line + 16 * mt + 8 * half
                    if position < count:
                        base = int64(order[first + position]) * d + column
                        for nt in range(8):
                            i = (mt * 8 + nt) * 4 + 2 * half
                            y[base + 8 * nt] = acc[i] * scale
                            y[base + 8 * nt + 1] = acc[i + 1] * scale

    return down


@functools.cache
def _join_kernel(n_used: int, first_shard: int, n_shards: int) -> Any:
    """Kernel: out[t] = tree over shards v of (sum of y of the choices of shard v + shared_v[t]).

    The kernel takes: ids i32[T K], slots, shard_of i32[E]; y f32[T K, D] flat; shared
    f32[n_shards, T, D] flat; out f32[T, D] flat; n_tokens, d.

    Grid: (ceil(D / 128), T) blocks of 128 threads, an output each. Shared memory: 4 bytes a choice.
    Oracle: `reduce.tree_reference`.
    """

    @cuda.jit
    def join(ids, slots, shard_of, y, shared, out, n_tokens, d):
        release_dependents()
        shards = cuda.shared.array(n_used, int32)
        thread = cuda.threadIdx.x
        column = cuda.blockIdx.x * 128 + thread
        token = cuda.blockIdx.y
        first_choice = int64(token) * n_used
        grid_wait()
        for k in range(thread, n_used, 128):
            expert = ids[first_choice + k]
            shards[k] = shard_of[expert] - first_shard if slots[expert] >= 0 else -1
        cuda.syncthreads()
        if column < d:
            at = int64(token) * d + column
            plane = int64(n_tokens) * d
            # The tree as a binary counter: a level holds a left half that waits for its right one.
            level_0 = level_1 = level_2 = total = float32(0)
            for v in range(n_shards):
                total = float32(0)
                for k in range(n_used):
                    if shards[k] == v:
                        total = total + y[(first_choice + k) * d + column]
                total = total + shared[v * plane + at]
                if v & 1 == 0:
                    level_0 = total
                else:
                    total = level_0 + total
                    if v & 2 == 0:
                        level_1 = total
                    else:
                        total = level_1 + total
                        if v & 4 == 0:
                            level_2 = total
                        else:
                            total = level_2 + total
            out[at] = total

    return join


def launch_join(
    stream: Any,
    shape: TiledExpertShape,
    tables: tuple[Any, Any, Any],
    parts: tuple[Any, Any],
    out: Any,
    n_tokens: int,
    *,
    first_shard: int = 0,
    n_shards: int = 8,
) -> None:
    """Enqueue the join.

    Args:
      stream: Numba stream.
      shape: sizes.
      tables: ids i32[T K], slots i32[E], shard_of i32[E].
      parts: y f32[T K, D] and the shared expert's shard sums f32[n_shards, T, D], both flat.
      out: f32[T, D] flat, the subtree sum of this rank's shards.
      n_tokens: T.
      first_shard: first held shard.
      n_shards: held shards.
    """
    grid = (-(-shape.d_model // 128), n_tokens)
    kernel = _join_kernel(shape.n_used, first_shard, n_shards)
    kernel[grid, 128, stream](*tables, *parts, out, n_tokens, shape.d_model)


class TiledExperts:
    """Routed experts of one layer for the tokens of a prefill step.

    Args:
      shape: sizes; D a multiple of 256, F of 256.
      gate, up: IQ2_XXS [slots * F, D]; down: Q2_K [slots * D, F].
      selectors: u32[258], `layout.iq2_xxs_selectors` on the device.
    """

    def __init__(
        self,
        shape: TiledExpertShape,
        gate: DeviceMatrix,
        up: DeviceMatrix,
        down: DeviceMatrix,
        selectors: Any,
    ) -> None:
        self._shape, self._selectors = shape, selectors
        self._gate, self._up, self._down = gate, up, down
        self._up_kernel, self._down_kernel = _up_kernel(shape), _down_kernel(shape)

    def __call__(
        self, stream: Any, x: Any, lists: tuple[Any, Any, int], weights: Any, h: Any, y: Any
    ) -> None:
        """Enqueue up and down.

        Args:
          stream: Numba stream.
          x: u32 halves [T, D].
          lists: tiles, order and the number of tiles, as `expert_lists.launch_lists` fills them.
          weights: f32[T K] router weights.
          h: u32 halves [T K, F] scratch.
          y: f32[T K, D] flat: products by choice; those of experts elsewhere are left alone.
        """
        tiles, order, n_tiles = lists
        shape, down = self._shape, self._down.planes
        self._up_kernel[(shape.d_expert // LIST_TILE, n_tiles), _THREADS, stream](
            *self._gate.planes, *self._up.planes, tiles, order, x, weights, self._selectors, h
        )
        self._down_kernel[(shape.d_model // 128, n_tiles), _THREADS, stream](
            *down, down[0], tiles, order, h, y
        )
