"""Matrix times a few activation rows: the decode matmuls of Q8_0 and F16 weights.

The invariant is that of `rows.py`: an output's bits depend on its weight row, its activation row
and the shard count, never on the batch bucket, the row slice or the launch shape. What a launch
object does not know: models, layers, allocation. It enqueues one kernel and may be captured.

Three launches cover a decode step: `Q8Matvec` (plain, or by input groups), `ShardedQ8Matvec` (a sum
that a world may cut, design "world-invariant arithmetic") and `Projections` (all Q8_0 and all F16
matrices that read the same input, stacked by rows, in one launch).
"""

from __future__ import annotations

import functools
from typing import Any, Self

import attrs
from numba import float32

from ds4.cuda.kernels.intrinsics import cuda, device_function, release_dependents, shfl_xor
from ds4.cuda.kernels.reduce import N_SHARDS, shard_blocks, shard_sum, warp_sum
from ds4.cuda.kernels.rows import RowPlan, f16_rows, q8_0_rows
from ds4.cuda.layout import layout_of
from ds4.errors import ConfigError
from ds4.gguf.constants import QuantType

__all__ = [
    "BUCKETS",
    "Activations",
    "DeviceMatrix",
    "Projections",
    "Q8Matvec",
    "ShardedQ8Matvec",
]

BUCKETS = (1, 2, 4, 8)
_WARPS = 4


@attrs.frozen
class DeviceMatrix:
    """A [rows, k] weight matrix in its packed layout on a device.

    Attributes:
      kind: quant type; fixes what the planes are.
      rows: output rows.
      k: weights per row.
      planes: flat device arrays, as `layout.repack` gives them; each 16-byte aligned.
    """

    kind: QuantType
    rows: int
    k: int
    planes: tuple[Any, ...]

    def row_range(self, first: int, count: int) -> Self:
        """View of some rows; no copy."""
        layout = layout_of(self.kind)
        cut = tuple(
            array[first * plane.row_items(self.k) : (first + count) * plane.row_items(self.k)]
            for plane, array in zip(layout.planes, self.planes, strict=True)
        )
        return attrs.evolve(self, rows=count, planes=cut)


@attrs.frozen
class Activations:
    """B activation rows on a device, in the forms that kernels read.

    Attributes:
      values: f32[B, K], contiguous.
      quants: u32[B K / 4] and
      scales: f32[B K / 32], as `quantize.launch_quantize` writes them; None if exact.
    """

    values: Any
    quants: Any = None
    scales: Any = None

    def form(self, *, exact: bool) -> tuple[Any, Any]:
        """(x, xs) arguments of a kernel."""
        if exact:
            return self.values, self.values
        if self.quants is None or self.scales is None:
            raise ConfigError("fast arithmetic needs quantized activations: quants and scales")
        return self.quants, self.scales


def _check_bucket(batch: int) -> None:
    if batch not in BUCKETS:
        raise ConfigError(f"batch bucket must be one of {BUCKETS}, got {batch}")


def _q8_plan(batch: int, k: int, *, exact: bool, rows: int = 8192) -> RowPlan:
    """Rows per warp and pieces in flight: eight 16-byte loads a lane where registers allow.

    More rows per warp reuse activations from L1; fewer give more warps for small matrices.
    """
    if k <= 1024:
        return RowPlan(batch, k, 2 if batch == 8 and exact else 4, 2)
    if batch == 1:
        return RowPlan(batch, k, 2 if k <= 2048 else 1, 4 if k <= 2048 else 8)
    if exact:
        return RowPlan(batch, k, 2, 2)
    return RowPlan(batch, k, 1, 8) if rows < 8192 else RowPlan(batch, k, 2, 4)


def _f16_plan(batch: int, k: int, *, rows: int = 8192) -> RowPlan:
    """As `_q8_plan`, for F16 rows."""
    if batch == 1 or rows < 2048:
        return RowPlan(batch, k, 1, 8)
    return RowPlan(batch, k, 2, 4)


@functools.cache
def _writer(rows: int, batch: int) -> Any:
    """Device function (acc f32[rows * batch], row, n_rows, column, lane, out): warp sums to out."""

    @device_function
    def write_row(r, acc, row, n_rows, column, lane, out):
        for b in range(batch):
            total = warp_sum(acc[r * batch + b])
            if lane == 0 and row + r < n_rows:
                out[b, column + row + r] = total

    @device_function
    def write(acc, row, n_rows, column, lane, out):
        write_row(0, acc, row, n_rows, column, lane, out)
        if rows > 1:
            write_row(1, acc, row, n_rows, column, lane, out)
        if rows > 2:
            write_row(2, acc, row, n_rows, column, lane, out)
            write_row(3, acc, row, n_rows, column, lane, out)

    return write


@functools.cache
def _projection_kernel(
    q8_plan: RowPlan | None, f16_plan: RowPlan | None, warps: int, *, exact: bool
) -> Any:
    """Kernel: rows of one Q8_0 matrix, then rows of one F16 matrix, times B activation rows.

    Grid: (Q8_0 blocks + F16 blocks, splits) of `warps` warps; a warp owns plan.rows rows and lane 0
    writes them. `splits` cuts the F16 columns: part y writes its sum to columns y * rows of out.
    No shared memory. Accumulates in float32. Oracle: `ds4.gguf.quants.dequantize`.
    """
    n_batch = (q8_plan or f16_plan or RowPlan(1, 32, 1, 1)).batch
    q_plan = q8_plan or RowPlan(n_batch, 32, 1, 1)
    f_plan = f16_plan or RowPlan(n_batch, 8, 1, 1)
    q_multiply, f_multiply = q8_0_rows(q_plan, exact=exact), f16_rows(f_plan)
    q_rows, f_rows, f_k = q_plan.rows, f_plan.rows, f_plan.k
    q_write, f_write = _writer(q_rows, n_batch), _writer(f_rows, n_batch)
    n_q_acc, n_f_acc = q_rows * n_batch, f_rows * n_batch
    has_q8, has_f16 = q8_plan is not None, f16_plan is not None

    @cuda.jit
    def projections(
        quants, scales, n_q_rows, q_blocks, values, n_f_rows, f_row_k, x, xs, xf, x_row, group_rows,
        q_out, f_out,
    ):  # fmt: skip
        release_dependents()
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        block = cuda.blockIdx.x
        if has_q8 and (not has_f16 or block < q_blocks):
            row = (block * warps + warp) * q_rows
            if row < n_q_rows:
                q_acc = cuda.local.array(n_q_acc, float32)
                x_first = (row // group_rows) * q_plan_k
                q_multiply(
                    quants,
                    scales,
                    row,
                    n_q_rows - 1,
                    0,
                    q_plan_k // 16,
                    lane,
                    x,
                    xs,
                    x_row,
                    x_first,
                    q_acc,
                )
                q_write(q_acc, row, n_q_rows, 0, lane, q_out)
        if has_f16 and (not has_q8 or block >= q_blocks):
            row = ((block - q_blocks) * warps + warp) * f_rows
            split = cuda.blockIdx.y
            if row < n_f_rows:
                f_acc = cuda.local.array(n_f_acc, float32)
                f_multiply(
                    values, row, n_f_rows - 1, f_row_k, split * f_k, lane, xf, x_row, 0, f_acc
                )
                f_write(f_acc, row, n_f_rows, split * n_f_rows, lane, f_out)

    q_plan_k = q_plan.k
    return projections


@functools.cache
def _sharded_kernel(
    batch: int, k: int, total_k: int, first_shard: int, n_shards: int, warps: int, *, exact: bool
) -> tuple[int, Any]:
    """Rows per warp and kernel: a Q8_0 matrix whose sum is the tree over this rank's shards.

    Grid: ceil(rows / (warps * rows per warp)) blocks; lane 0 writes a warp's rows. No shared
    memory. Accumulates in float32. Oracle: `reduce.tree_reference` over shard sums.

    Up to two batch rows, a lane keeps all shards' partial sums in registers and they are summed
    together; from four on it takes shard after shard, and lanes 4 v to 4 v + 3 keep the sum of
    shard v. Both are the same additions.
    """
    blocks = total_k // 32
    origin = shard_blocks(blocks, first_shard)
    together = batch <= 2
    if together:
        plan = RowPlan(batch, k, 1, 8 // batch, first_shard, n_shards, total_k)
    else:
        longest = -(-blocks // N_SHARDS) * 32
        plan = RowPlan(batch, longest, 1 if exact else 2, 2, row_k=k)
    multiply, combine = q8_0_rows(plan, exact=exact), shard_sum(n_shards)
    n_rows, n_sums = plan.rows, plan.n_sums
    n_acc, n_kept = n_rows * batch * n_sums, n_rows * batch
    n_tree = n_shards.bit_length() - 1

    @cuda.jit
    def sharded(quants, scales, n_rows_total, x, xs, x_row, out):
        release_dependents()
        lane = cuda.threadIdx.x & 31
        row = (cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5)) * n_rows
        last = n_rows_total - 1
        if row < n_rows_total:
            acc = cuda.local.array(n_acc, float32)
            kept = cuda.local.array(n_kept, float32)
            if together:
                multiply(quants, scales, row, last, 0, 0, lane, x, xs, x_row, 0, acc)
                for i in range(n_kept):
                    kept[i] = combine(acc, i * n_sums, lane)
            else:
                mine = (lane >> 2) & (n_shards - 1)
                for i in range(n_kept):
                    kept[i] = float32(0)
                for v in range(n_shards):
                    low = (first_shard + v) * blocks // 8
                    first = (low - origin) * 2
                    length = ((first_shard + v + 1) * blocks // 8 - low) * 2
                    multiply(quants, scales, row, last, first, length, lane, x, xs, x_row, 0, acc)
                    for i in range(n_kept):
                        total = warp_sum(acc[i])
                        kept[i] = total if mine == v else kept[i]
                for i in range(n_kept):
                    for bit in range(n_tree):
                        kept[i] = kept[i] + shfl_xor(kept[i], 4 << bit)
            for r in range(n_rows):
                for b in range(batch):
                    if lane == 0 and row + r < n_rows_total:
                        out[b, row + r] = kept[r * batch + b]

    return n_rows, sharded


def _require(matrix: DeviceMatrix, kind: QuantType, block: int) -> None:
    if matrix.kind is not kind or matrix.k % block:
        raise ConfigError(
            f"expected a {kind.name} matrix with k a multiple of {block}, "
            f"got {matrix.kind.name} with k = {matrix.k}"
        )


class Projections:
    """All matrices that read one input: stacked Q8_0 rows and stacked F16 rows, one launch.

    Args:
      batch: bucket, 1, 2, 4 or 8.
      q8: Q8_0 matrix of the stacked rows, or None.
      f16: F16 matrix of the stacked rows, or None. F16 rows use float32 activations in any mode.
      exact: float32 activations for Q8_0 as well.
      groups: input groups of the Q8_0 matrix: row o reads input columns `[g k, (g + 1) k)` with
        g = o // (rows / groups); 1 for an ordinary matrix.
      splits: parts into which F16 columns are cut, for few long rows; part p of row o goes to
        column `p rows + o` of the F16 output and the reader adds the parts in order.

    Raises:
      ConfigError: types, sizes or the bucket do not fit.
    """

    def __init__(
        self,
        batch: int,
        *,
        q8: DeviceMatrix | None = None,
        f16: DeviceMatrix | None = None,
        exact: bool = False,
        groups: int = 1,
        splits: int = 1,
        warps: int = _WARPS,
    ) -> None:
        _check_bucket(batch)
        if q8 is None and f16 is None:
            raise ConfigError("a projection launch needs at least one matrix")
        q8_plan = f16_plan = None
        self._q8, self._f16, self._exact, self._splits = q8, f16, exact, splits
        self._group_rows, self._q_blocks, blocks = 1, 0, 0
        if q8 is not None:
            _require(q8, QuantType.Q8_0, 32)
            q8_plan = _q8_plan(batch, q8.k, exact=exact, rows=q8.rows)
            self._group_rows = q8.rows // groups
            if q8.rows % groups or (self._group_rows % q8_plan.rows and groups > 1):
                raise ConfigError(f"{q8.rows} rows do not form {groups} groups of whole warps")
            self._q_blocks = blocks = -(-q8.rows // (warps * q8_plan.rows))
        if f16 is not None:
            _require(f16, QuantType.F16, 8 * splits)
            if q8 is not None and (f16.k != q8.k or splits > 1 or groups > 1):
                raise ConfigError("stacked Q8_0 and F16 rows must read the same whole input")
            f16_plan = _f16_plan(batch, f16.k // splits, rows=f16.rows)
            blocks += -(-f16.rows // (warps * f16_plan.rows))
        self._grid, self._block = (blocks, splits), 32 * warps
        self._kernel = _projection_kernel(q8_plan, f16_plan, warps, exact=exact)

    def __call__(self, stream: Any, x: Activations, q8_out: Any, f16_out: Any = None) -> None:
        """Enqueue. x.values f32[B, X]; q8_out f32[B, Q8 rows]; f16_out f32[B, splits * rows]."""
        quants, scales = x.form(exact=self._exact or self._q8 is None)
        q8, f16 = self._q8, self._f16
        # An absent matrix is never read: any array of the right type stands in for it.
        values = quants_plane = f16.planes[0] if f16 else q8.planes[0] if q8 else None
        scales_plane = None
        if q8 is not None:
            quants_plane, scales_plane = q8.planes
        q8_out = f16_out if q8_out is None else q8_out
        self._kernel[self._grid, self._block, stream](
            quants_plane,
            quants_plane if scales_plane is None else scales_plane,
            0 if q8 is None else q8.rows,
            self._q_blocks,
            values,
            0 if f16 is None else f16.rows,
            0 if f16 is None else f16.k,
            quants,
            scales,
            x.values,
            x.values.shape[1],
            self._group_rows,
            q8_out,
            q8_out if f16_out is None else f16_out,
        )


class Q8Matvec:
    """One Q8_0 matrix: out[b, o] = row o . x[b] (or its input group). See `Projections`."""

    def __init__(
        self,
        batch: int,
        weight: DeviceMatrix,
        *,
        exact: bool = False,
        groups: int = 1,
        warps: int = _WARPS,
    ) -> None:
        self._launch = Projections(batch, q8=weight, exact=exact, groups=groups, warps=warps)

    def __call__(self, stream: Any, x: Activations, out: Any) -> None:
        """Enqueue. x.values f32[B, groups k]; out f32[B, >= rows]."""
        self._launch(stream, x, out)


class ShardedQ8Matvec:
    """A Q8_0 matrix whose columns are cut by shards: the subtree sum of this rank's shards.

    Args:
      batch: bucket.
      weight: the held columns of every row: blocks of shards first_shard to + n_shards - 1.
      total_k: weights of a whole row; shard v is quant blocks `[v B // 8, (v + 1) B // 8)`.
      first_shard: first held shard.
      n_shards: 8, 4, 2 or 1; first_shard is a multiple of it.
      exact: float32 activations.

    Raises:
      ConfigError: the shards do not fit the matrix.
    """

    def __init__(
        self,
        batch: int,
        weight: DeviceMatrix,
        *,
        total_k: int,
        first_shard: int = 0,
        n_shards: int = N_SHARDS,
        exact: bool = False,
        warps: int = _WARPS,
    ) -> None:
        _check_bucket(batch)
        _require(weight, QuantType.Q8_0, 32)
        if n_shards not in (1, 2, 4, 8) or first_shard % n_shards or first_shard >= N_SHARDS:
            raise ConfigError(f"shards {first_shard} + {n_shards} are not a subtree of {N_SHARDS}")
        blocks = total_k // 32
        held = shard_blocks(blocks, first_shard + n_shards) - shard_blocks(blocks, first_shard)
        if held * 32 != weight.k:
            raise ConfigError(f"shards hold {held} blocks of a row, the matrix {weight.k // 32}")
        self._weight, self._exact = weight, exact
        rows_per_warp, self._kernel = _sharded_kernel(
            batch, weight.k, total_k, first_shard, n_shards, warps, exact=exact
        )
        self._grid, self._block = -(-weight.rows // (warps * rows_per_warp)), 32 * warps

    def __call__(self, stream: Any, x: Activations, out: Any) -> None:
        """Enqueue. x.values f32[B, k] (the held columns); out f32[B, >= rows]."""
        quants, scales = x.form(exact=self._exact)
        self._kernel[self._grid, self._block, stream](
            *self._weight.planes, self._weight.rows, quants, scales, x.values.shape[1], out
        )
