"""The mixture-of-experts block of a decode step as one launch object: two kernels, no router.

It owns no memory and knows no world: a rank gives its experts' stacks, its lanes of the shared
expert, and the tables that say which expert sits where. The output is the rank's subtree sum, ready
for the join (design "world-invariant arithmetic").
"""

from __future__ import annotations

from typing import Any

import attrs

from ds4.cuda.kernels.experts_down import experts_down_kernel
from ds4.cuda.kernels.experts_up import TILE, ExpertShape, experts_up_kernel
from ds4.cuda.kernels.quant_matmul import BUCKETS, Activations, DeviceMatrix
from ds4.cuda.kernels.reduce import N_SHARDS
from ds4.errors import ConfigError
from ds4.gguf.constants import QuantType

__all__ = ["ExpertBuffers", "ExpertTables", "ExpertWeights", "Experts", "buffer_sizes"]


@attrs.frozen
class ExpertWeights:
    """One layer's experts on this rank.

    Attributes:
      gate, up: IQ2_XXS [slots * F, D], held experts one after another.
      down: Q2_K [slots * D, F].
      shared_gate, shared_up: Q8_0 [d_shared, D], the shared expert's lanes of this rank's shards.
      shared_down: Q8_0 [D, d_shared], its columns.
    """

    gate: DeviceMatrix
    up: DeviceMatrix
    down: DeviceMatrix
    shared_gate: DeviceMatrix
    shared_up: DeviceMatrix
    shared_down: DeviceMatrix


@attrs.frozen
class ExpertTables:
    """Constant device tables.

    Attributes:
      slots: i32[E], position of an expert in this rank's stacks, negative if it is not held.
      shard_of: i32[E], shard 0..7 that an expert belongs to.
      selectors: u32[258], `layout.iq2_xxs_selectors`.
    """

    slots: Any
    shard_of: Any
    selectors: Any


@attrs.frozen
class ExpertBuffers:
    """Scratch between the two kernels; sizes in items from `buffer_sizes`.

    Attributes:
      h, h_scales, h_sums: routed activations; u32, f32, f32 (exact: h f32[B K, F], others unused).
      shared, shared_scales: shared activations; u32, f32 (exact: f32[B, d_shared], other unused).
    """

    h: Any
    h_scales: Any
    h_sums: Any
    shared: Any
    shared_scales: Any


def buffer_sizes(shape: ExpertShape, *, exact: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each buffer of `ExpertBuffers`."""
    pairs, f, lanes = shape.batch * shape.n_used, shape.d_expert, shape.d_shared
    if exact:
        return {
            "h": ("float32", (pairs, f)),
            "h_scales": ("float32", (1,)),
            "h_sums": ("float32", (1,)),
            "shared": ("float32", (shape.batch, lanes)),
            "shared_scales": ("float32", (1,)),
        }
    return {
        "h": ("uint32", (pairs * f // 4,)),
        "h_scales": ("float32", (pairs * f // 32,)),
        "h_sums": ("float32", (pairs * f // 16,)),
        "shared": ("uint32", (shape.batch * lanes // 4,)),
        "shared_scales": ("float32", (shape.batch * lanes // 32,)),
    }


class Experts:
    """Routed and shared experts of one layer for a batch bucket.

    Args:
      shape: sizes, clamp and shards.
      weights: the rank's matrices; sizes are checked against the shape.
      tables: expert placement and codebook.
      buffers: scratch; may be shared by all layers of a stream.
      exact: float32 activations and no rounding of h; fast rounds both to bytes per 32.
      up_warps: warps of a block of the first kernel, a divisor of 32; below 8 it is for tests only.
      down_warps: warps of a block of the second.

    Raises:
      ConfigError: sizes, types, shards or the bucket do not fit.
    """

    def __init__(
        self,
        shape: ExpertShape,
        weights: ExpertWeights,
        tables: ExpertTables,
        buffers: ExpertBuffers,
        *,
        exact: bool = False,
        up_warps: int = 8,
        down_warps: int = 4,
    ) -> None:
        _check(shape, weights)
        if TILE % up_warps:
            raise ConfigError(f"up_warps must divide {TILE}, got {up_warps}")
        self._weights, self._tables, self._buffers = weights, tables, buffers
        self._up = experts_up_kernel(shape, up_warps, exact=exact)
        self._down = experts_down_kernel(shape, down_warps, exact=exact)
        tiles = shape.d_shared // TILE + shape.batch * shape.n_used * (shape.d_expert // TILE)
        self._up_grid, self._up_block = tiles, 32 * up_warps
        self._down_grid = (-(-shape.d_model // down_warps), shape.batch)
        self._down_block = 32 * down_warps
        self._exact = exact

    def __call__(self, stream: Any, x: Activations, ids: Any, weights: Any, out: Any) -> None:
        """Enqueue both kernels.

        Args:
          stream: Numba stream, or the wrapper of a foreign one.
          x: f32[B, D] and its rounded form.
          ids: i32[B K] chosen experts, flat; their order is the order of addition.
          weights: f32[B K] router weights, flat.
          out: f32[B, D], the subtree sum of this rank's shards.
        """
        self.up(stream, x, ids, weights)
        self.down(stream, ids, out)

    def up(self, stream: Any, x: Activations, ids: Any, weights: Any) -> None:
        """Enqueue the first kernel: x to the activations in the buffers."""
        quants, scales = x.form(exact=self._exact)
        w, t, s = self._weights, self._tables, self._buffers
        self._up[self._up_grid, self._up_block, stream](
            ids, weights, t.slots, *w.gate.planes, *w.up.planes, *w.shared_gate.planes,
            *w.shared_up.planes, t.selectors, quants, scales, s.h, s.h_scales, s.h_sums, s.shared,
            s.shared_scales,
        )  # fmt: skip

    def down(self, stream: Any, ids: Any, out: Any) -> None:
        """Enqueue the second kernel: the buffers to out."""
        w, t, s = self._weights, self._tables, self._buffers
        self._down[self._down_grid, self._down_block, stream](
            ids, t.slots, t.shard_of, *w.down.planes, *w.shared_down.planes, s.h, s.h_scales,
            s.h_sums, s.shared, s.shared_scales, out,
        )  # fmt: skip


def _check(shape: ExpertShape, weights: ExpertWeights) -> None:
    if shape.batch not in BUCKETS:
        raise ConfigError(f"batch bucket must be one of {BUCKETS}, got {shape.batch}")
    if shape.n_shards not in (1, 2, 4, 8) or shape.first_shard % shape.n_shards:
        raise ConfigError(f"shards {shape.first_shard} + {shape.n_shards} are not a subtree")
    if shape.first_shard >= N_SHARDS or shape.d_shared % (32 * shape.n_shards):
        raise ConfigError(f"{shape.d_shared} shared lanes do not form {shape.n_shards} shards")
    for name, size in (("d_model", shape.d_model), ("d_expert", shape.d_expert)):
        if size % 256:
            raise ConfigError(f"{name} must be a multiple of 256, got {size}")
    n_slots = weights.gate.rows // shape.d_expert
    d, f = shape.d_model, shape.d_expert
    expected = {
        "gate": (QuantType.IQ2_XXS, n_slots * f, d),
        "up": (QuantType.IQ2_XXS, n_slots * f, d),
        "down": (QuantType.Q2_K, n_slots * d, f),
        "shared_gate": (QuantType.Q8_0, shape.d_shared, d),
        "shared_up": (QuantType.Q8_0, shape.d_shared, d),
        "shared_down": (QuantType.Q8_0, d, shape.d_shared),
    }
    for name, (kind, rows, k) in expected.items():
        matrix: DeviceMatrix = getattr(weights, name)
        if (matrix.kind, matrix.rows, matrix.k) != (kind, rows, k):
            raise ConfigError(
                f"{name} must be {kind.name} [{rows}, {k}], "
                f"got {matrix.kind.name} [{matrix.rows}, {matrix.k}]"
            )
