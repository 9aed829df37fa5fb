"""Many activation rows times a quantized matrix on tensor cores: the prefill matmuls.

The invariant: an output is the sum over K in blocks of 32, ascending, of half-precision products in
float32, whatever the number of rows; so a token's bits do not depend on the other tokens of a step.
They do differ from the decode kernels' bits, whose arithmetic is another one.
What it does not know: models, worlds (a launch covers given shards), where expert lists come from.

A block of 4 warps makes 128 tokens x 128 rows (or 64 x 128 for expert lists), each warp a half by a
half, by `mma.m16n8k16`. Per step of 32 weights it copies activations straight to shared memory and
converts packed weights in registers; both are in flight while the step before is multiplied.
Inside a step the four 8-element pieces of K are permuted alike in both operands, so that a lane's
fragments of two `mma` are one 16-byte shared load and no access has a bank conflict.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
from numba import float32, int64, uint32

from ds4.cuda.kernels.intrinsics import (
    address,
    bounded_kernel,
    copy_async16,
    copy_async_wait,
    cuda,
    device_function,
    grid_wait,
    ld_f32x4,
    ld_shared_u32x4,
    mma_f16,
    pack_f16x2,
    release_dependents,
    shared_address,
    shared_offset,
    st_shared_u32x4,
)
from ds4.cuda.kernels.quant_matmul import DeviceMatrix
from ds4.cuda.kernels.reduce import N_SHARDS, shard_blocks
from ds4.cuda.kernels.tile_weights import SCALE_BITS, eight_weights
from ds4.cuda.layout import layout_of
from ds4.errors import ConfigError
from ds4.gguf.constants import QuantType

__all__ = ["GemmPlan", "ShardedMatmul", "TiledMatmul", "launch_to_half"]

TILE_TOKENS = 128
TILE_ROWS = 128
_STEP = 32
_THREADS = 128
_ROW_WORDS = 16


@attrs.frozen
class GemmPlan:
    """What is fixed in a compiled tile kernel.

    Attributes:
      kind: weight type.
      k: weights of a matrix row on this rank.
      total_k: weights of a whole row if the sum is sharded, else k.
      first_shard, n_shards: held shards; 0 shards for an unsharded sum.
    """

    kind: QuantType
    k: int
    total_k: int
    first_shard: int = 0
    n_shards: int = 0


@functools.cache
def tile_product(mt_count: int) -> Any:
    """Device function (x_at, w_at, warp_m, warp_n, lane, acc): one K step of a warp's tile.

    x_at, w_at: shared addresses of the step's halves, 64 bytes a row. acc f32[mt_count * 8 * 4].
    """
    rows_per_warp = 16 * mt_count

    @device_function
    def columns(mt, a0, a1, a2, a3, a4, a5, a6, a7, b, acc):
        for nt in range(8):
            i = (mt * 8 + nt) * 4
            c0, c1, c2, c3 = acc[i], acc[i + 1], acc[i + 2], acc[i + 3]
            j = nt * 4
            c0, c1, c2, c3 = mma_f16(a0, a4, a1, a5, b[j], b[j + 1], c0, c1, c2, c3)
            c0, c1, c2, c3 = mma_f16(a2, a6, a3, a7, b[j + 2], b[j + 3], c0, c1, c2, c3)
            acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = c0, c1, c2, c3

    @device_function
    def band(mt, x_at, warp_m, lane, b, acc):
        row = warp_m * rows_per_warp + 16 * mt + (lane >> 2)
        at = shared_offset(x_at, row * 64 + (lane & 3) * 16)
        a0, a1, a2, a3 = ld_shared_u32x4(at)
        a4, a5, a6, a7 = ld_shared_u32x4(shared_offset(at, 512))
        columns(mt, a0, a1, a2, a3, a4, a5, a6, a7, b, acc)

    @device_function
    def product(x_at, w_at, warp_m, warp_n, lane, acc):
        b = cuda.local.array(32, uint32)
        for nt in range(8):
            row = warp_n * 64 + 8 * nt + (lane >> 2)
            b0, b1, b2, b3 = ld_shared_u32x4(shared_offset(w_at, row * 64 + (lane & 3) * 16))
            b[4 * nt], b[4 * nt + 1], b[4 * nt + 2], b[4 * nt + 3] = b0, b1, b2, b3
        band(0, x_at, warp_m, lane, b, acc)
        band(1, x_at, warp_m, lane, b, acc)
        if mt_count > 2:
            band(2, x_at, warp_m, lane, b, acc)
            band(3, x_at, warp_m, lane, b, acc)

    return product


@functools.cache
def _dense_kernel(plan: GemmPlan) -> Any:
    """Kernel: out[z][t, o] = sum of x[t, :] w[o, :] over the K of shard z (all of K unsharded).

    The kernel takes: p0 to p3 (planes of the type, missing ones repeat p0); n_rows; x u32 (halves),
    x_row (halves between tokens); group_rows: rows that share an input slice of k columns;
    n_tokens; selectors u32[258]; out f32[max(n_shards, 1), T, O] contiguous, out_row = O.

    Grid: (ceil(rows / 128), ceil(tokens / 128), max(n_shards, 1)) blocks of 128 threads; a warp
    owns 64 tokens x 64 rows of outputs. Static shared memory: two steps of 128 rows of x and w,
    32 KiB, and the IQ2_XXS selectors, 1 KiB. Accumulates in float32. Oracle: `dequantize`.
    """
    fetch, convert = eight_weights(plan.kind, plan.k)
    product = tile_product(4)
    scale = 2.0 ** -SCALE_BITS[plan.kind]
    sharded, first_shard = plan.n_shards > 0, plan.first_shard
    blocks = plan.total_k // _STEP
    origin = shard_blocks(blocks, first_shard)
    all_steps = plan.k // _STEP
    table_words = 256 if plan.kind is QuantType.IQ2_XXS else 1
    stage_bytes = TILE_ROWS * 64
    stage_words = TILE_ROWS * _ROW_WORDS * 2
    k = plan.k

    @device_function
    def fetch_step(p0, p1, p2, p3, n_rows, row0, kb, thread, w):
        for i in range(4):
            row = min(row0 + (thread >> 2) + 32 * i, n_rows - 1)
            r0, r1, r2, r3 = fetch(p0, p1, p2, p3, row, kb, thread & 3)
            w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3] = r0, r1, r2, r3

    @device_function
    def store_step(w, kb, thread, w_at, table):
        for i in range(4):
            h0, h1, h2, h3 = convert(
                w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3], kb, thread & 3, table
            )
            at = shared_offset(w_at, ((thread >> 2) + 32 * i) * 64 + (thread & 3) * 16)
            st_shared_u32x4(at, h0, h1, h2, h3)

    @device_function
    def copy_step(x, x_row, x_first, n_tokens, token0, kb, thread, x_at):
        for i in range(4):
            line = (thread >> 2) + 32 * i
            token = min(token0 + line, n_tokens - 1)
            item = (int64(token) * x_row + x_first) // 2 + 16 * kb + 4 * (thread & 3)
            copy_async16(shared_offset(x_at, line * 64 + (thread & 3) * 16), address(x, item))

    @bounded_kernel(_THREADS, 2)
    def dense(
        p0, p1, p2, p3, n_rows, x, x_row, group_rows, n_tokens, selectors, out, out_row
    ):  # fmt: skip
        release_dependents()
        x_tile = cuda.shared.array(stage_words, uint32)
        w_tile = cuda.shared.array(stage_words, uint32)
        table = cuda.shared.array(table_words, uint32)
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        warp_m, warp_n = warp >> 1, warp & 1
        row0, token0 = cuda.blockIdx.x * 128, cuda.blockIdx.y * 128
        shard = cuda.blockIdx.z
        first, steps = 0, all_steps
        if sharded:
            low = (first_shard + shard) * blocks // 8
            first = low - origin
            steps = (first_shard + shard + 1) * blocks // 8 - low
        x_first = (row0 // group_rows) * k
        for i in range(thread, table_words, 128):
            table[i] = selectors[i]
        grid_wait()
        x_at, w_at = shared_address(x_tile, 0), shared_address(w_tile, 0)
        table_at = shared_address(table, 0)
        acc = cuda.local.array(128, float32)
        for i in range(128):
            acc[i] = float32(0)
        w = cuda.local.array(16, uint32)
        cuda.syncthreads()
        if steps > 0:
            fetch_step(p0, p1, p2, p3, n_rows, row0, first, thread, w)
            copy_step(x, x_row, x_first, n_tokens, token0, first, thread, x_at)
            store_step(w, first, thread, w_at, table_at)
        copy_async_wait()
        cuda.syncthreads()
        for s in range(steps):
            here, there = (s & 1) * stage_bytes, ((s + 1) & 1) * stage_bytes
            more = s + 1 < steps
            kb = first + s + 1
            if more:
                fetch_step(p0, p1, p2, p3, n_rows, row0, kb, thread, w)
                copy_step(
                    x, x_row, x_first, n_tokens, token0, kb, thread, shared_offset(x_at, there)
                )  # fmt: skip
            product(shared_offset(x_at, here), shared_offset(w_at, here), warp_m, warp_n, lane, acc)
            if more:
                store_step(w, kb, thread, shared_offset(w_at, there), table_at)
            copy_async_wait()
            cuda.syncthreads()
        token1 = token0 + warp_m * 64 + (lane >> 2)
        row1 = row0 + warp_n * 64 + 2 * (lane & 3)
        base = int64(shard) * n_tokens * out_row
        for mt in range(4):
            for nt in range(8):
                i = (mt * 8 + nt) * 4
                token, row = token1 + 16 * mt, row1 + 8 * nt
                for half in range(2):
                    if token + 8 * half < n_tokens:
                        at = base + int64(token + 8 * half) * out_row + row
                        if row < n_rows:
                            out[at] = acc[i + 2 * half] * float32(scale)
                        if row + 1 < n_rows:
                            out[at + 1] = acc[i + 2 * half + 1] * float32(scale)

    return dense


@functools.cache
def _half_kernel() -> Any:
    """Kernel (x f32 contiguous, halves u32[n / 2], n_values): rounds to half precision.

    Grid: one thread per 8 values, 128 threads a block. n is a multiple of 8.
    """

    @cuda.jit
    def to_half(x, halves, n_values):
        release_dependents()
        first = (int64(cuda.blockIdx.x) * 128 + cuda.threadIdx.x) * 8
        grid_wait()
        if first < n_values:
            a, b, c, d = ld_f32x4(address(x, first))
            e, f, g, h = ld_f32x4(address(x, first + 4))
            at = first >> 1
            halves[at] = pack_f16x2(a, b)
            halves[at + 1] = pack_f16x2(c, d)
            halves[at + 2] = pack_f16x2(e, f)
            halves[at + 3] = pack_f16x2(g, h)

    return to_half


def launch_to_half(stream: Any, x: Any, halves: Any) -> None:
    """Enqueue rounding of f32 x (contiguous, size a multiple of 8) to u32 halves, flat."""
    _half_kernel()[-(-x.size // 1024), 128, stream](x, halves, x.size)


@functools.cache
def _tree_kernel(n_shards: int) -> Any:
    """Kernel (parts f32[n_shards n], out f32[n], n): the tree over shards, value by value.

    Grid: one thread per value, 256 a block. Oracle: `reduce.tree_reference`.
    """

    @cuda.jit
    def tree(parts, out, n):
        release_dependents()
        i = int64(cuda.blockIdx.x) * 256 + cuda.threadIdx.x
        grid_wait()
        if i < n:
            a = parts[i]
            if n_shards > 1:
                a = a + parts[n + i]
            if n_shards > 2:
                a = a + (parts[2 * n + i] + parts[3 * n + i])
            if n_shards > 4:
                b = parts[4 * n + i] + parts[5 * n + i]
                a = a + (b + (parts[6 * n + i] + parts[7 * n + i]))
            out[i] = a

    return tree


def _planes(matrix: DeviceMatrix) -> tuple[Any, ...]:
    planes = matrix.planes
    return (*planes, *(planes[0],) * (4 - len(planes)))


class TiledMatmul:
    """out[t, o] = x[t] . row o for many tokens, x in halves.

    Args:
      weight: matrix of any packed type.
      groups: input groups, as for `Projections`; rows of a group are a multiple of 128.
      selectors: u32[258], `layout.iq2_xxs_selectors` on the device.

    Raises:
      ConfigError: k is not a multiple of 32, or groups do not fit tiles.
    """

    def __init__(self, weight: DeviceMatrix, selectors: Any, *, groups: int = 1) -> None:
        layout_of(weight.kind)
        if weight.k % _STEP:
            raise ConfigError(f"k must be a multiple of {_STEP}, got {weight.k}")
        if groups > 1 and weight.rows % (groups * TILE_ROWS):
            raise ConfigError(f"{weight.rows} rows do not form {groups} groups of whole tiles")
        self._weight, self._selectors = weight, selectors
        self._group_rows = weight.rows // groups if groups > 1 else max(weight.rows, TILE_ROWS)
        self._kernel = _dense_kernel(GemmPlan(weight.kind, weight.k, weight.k))

    def __call__(self, stream: Any, x: Any, x_row: int, n_tokens: int, out: Any) -> None:
        """Enqueue. x u32, halves of [T, x_row]; out f32, flat, [T, rows]."""
        grid = (-(-self._weight.rows // TILE_ROWS), -(-n_tokens // TILE_TOKENS), 1)
        self._kernel[grid, _THREADS, stream](
            *_planes(self._weight), self._weight.rows, x, x_row, self._group_rows, n_tokens,
            self._selectors, out, self._weight.rows,
        )  # fmt: skip


class ShardedMatmul:
    """As `TiledMatmul` for a sum that a world may cut: the subtree sum of the held shards.

    Args:
      weight: held columns, as for `ShardedQ8Matvec`.
      selectors: u32[258] on the device.
      total_k: weights of a whole row.
      first_shard: first held shard.
      n_shards: 8, 4, 2 or 1.

    Raises:
      ConfigError: the shards do not fit the matrix.
    """

    def __init__(
        self,
        weight: DeviceMatrix,
        selectors: Any,
        *,
        total_k: int,
        first_shard: int = 0,
        n_shards: int = N_SHARDS,
    ) -> None:
        blocks = total_k // _STEP
        held = shard_blocks(blocks, first_shard + n_shards) - shard_blocks(blocks, first_shard)
        if held * _STEP != weight.k or n_shards not in (1, 2, 4, 8):
            raise ConfigError(f"{n_shards} shards hold {held} blocks, not {weight.k // _STEP}")
        self._weight, self._selectors, self._n_shards = weight, selectors, n_shards
        plan = GemmPlan(weight.kind, weight.k, total_k, first_shard, n_shards)
        self._kernel, self._tree = _dense_kernel(plan), _tree_kernel(n_shards)

    def parts_size(self, n_tokens: int) -> int:
        """Floats of scratch that a call needs."""
        return self._n_shards * n_tokens * self._weight.rows

    def __call__(
        self, stream: Any, x: Any, x_row: int, n_tokens: int, parts: Any, out: Any
    ) -> None:
        """Enqueue both kernels. parts f32[`parts_size`]; out f32, flat, [T, rows]."""
        rows = self._weight.rows
        grid = (-(-rows // TILE_ROWS), -(-n_tokens // TILE_TOKENS), self._n_shards)
        self._kernel[grid, _THREADS, stream](
            *_planes(self._weight), rows, x, x_row, max(rows, TILE_ROWS), n_tokens,
            self._selectors, parts, rows,
        )  # fmt: skip
        n = n_tokens * rows
        self._tree[-(-n // 256), 256, stream](parts, out, n)
