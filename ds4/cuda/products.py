"""Binds the matrix products of a step to launches: which kernel multiplies which storage.

This is the one place that chooses between the packed kernels (`kernels.quant_matmul`) and the
float32 ones. Every function returns launches in the order in which they must run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from ds4.cuda.device import Device, Launch
from ds4.cuda.kernels import f32_matmul
from ds4.cuda.kernels.experts_up import ExpertShape
from ds4.cuda.kernels.moe_matmul import ExpertBuffers, ExpertTables, ExpertWeights
from ds4.cuda.kernels.moe_matmul import Experts as PackedExperts
from ds4.cuda.kernels.quant_matmul import (
    Activations,
    DeviceMatrix,
    Projections,
    Q8Matvec,
    ShardedQ8Matvec,
)
from ds4.cuda.kernels.quantize import launch_quantize
from ds4.cuda.weights import Experts, Stack
from ds4.gguf import QuantType

__all__ = ["Binder", "ExpertInputs"]

Q8_0, F16, F32 = QuantType.Q8_0, QuantType.F16, QuantType.F32


@attrs.frozen(kw_only=True)
class ExpertInputs:
    """What the experts of one bucket read and write.

    Attributes:
      ids, weights: i32[B, K] and f32[B, K] of the router.
      x: f32[B, D], the sublayer's input.
      scratch: between the two kernels (`moe_matmul.ExpertBuffers`); where the layer is not packed,
        h f32[B K, F], and shared f32[B, lanes], which the router's launch has filled.
      out: f32[B, D], this rank's subtree.
    """

    ids: Any
    weights: Any
    x: Activations
    scratch: ExpertBuffers
    out: Any


@attrs.frozen
class Binder:
    """Binds products for one device, bucket and arithmetic.

    Attributes:
      device: guards operands and launches.
      batch: rows of the bucket.
      exact: float32 activations; else signed bytes where the weights are Q8_0, IQ2_XXS or Q2_K.
    """

    device: Device
    batch: int
    exact: bool

    def round_input(self, name: str, x: Activations) -> list[Launch]:
        """Fill the byte form of activations, where fast arithmetic reads it."""
        if self.exact:
            return []
        self.device.guard(name, (x.values, x.quants, x.scales))
        return [Launch(name, lambda stream: launch_quantize(stream, x.values, x.quants, x.scales))]

    def stack(
        self, name: str, stack: Stack, x: Activations, outs: Mapping[QuantType, Any]
    ) -> list[Launch]:
        """Multiply all matrices of a stack with x; outs: storage to f32[B, >= rows]."""
        launches = []
        packed = {k: m for k, m in stack.matrices.items() if k is not F32}
        if packed:
            q8, f16 = packed.get(Q8_0), packed.get(F16)
            made = Projections(self.batch, q8=q8, f16=f16, exact=self.exact)
            q8_out, f16_out = (outs[k] if k in packed else None for k in (Q8_0, F16))
            operands = [p for m in packed.values() for p in m.planes]
            self.device.guard(name, (*operands, x.values, x.quants, x.scales, q8_out, f16_out))
            launches.append(Launch(name, lambda stream: made(stream, x, q8_out, f16_out)))
        if F32 in stack.matrices:
            launches.append(self.plain(f"{name} f32", stack.matrices[F32], x.values, outs[F32]))
        return launches

    def plain(
        self, name: str, matrix: DeviceMatrix, x: Any, out: Any, *, groups: int = 1
    ) -> Launch:
        """A float32 matrix, perhaps by input groups."""
        grid = (-(-matrix.rows // f32_matmul.WARPS), self.batch)
        operands = (matrix.planes[0], matrix.rows, matrix.k, x, matrix.rows // groups, out)
        kernel = f32_matmul.product_kernel()
        return self.device.bind(name, kernel, grid, 32 * f32_matmul.WARPS, operands)

    def grouped(
        self, name: str, matrix: DeviceMatrix, groups: int, x: Activations, out: Any
    ) -> Launch:
        """Output groups: rows of group g read input columns [g k, (g + 1) k)."""
        if matrix.kind is F32:
            return self.plain(name, matrix, x.values, out, groups=groups)
        made = Q8Matvec(self.batch, matrix, exact=self.exact, groups=groups)
        self.device.guard(name, (*matrix.planes, x.values, x.quants, x.scales, out))
        return Launch(name, lambda stream: made(stream, x, out))

    def sharded(
        self,
        name: str,
        matrix: DeviceMatrix,
        x: Activations,
        out: Any,
        *,
        shards: tuple[int, int],
        total_k: int,
        bounds: Any,
    ) -> Launch:
        """A sum that a world may cut: the subtree over this rank's shards."""
        n_shards = shards[1] - shards[0]
        if matrix.kind is F32:
            grid = (-(-matrix.rows // f32_matmul.WARPS), self.batch)
            operands = (matrix.planes[0], matrix.rows, matrix.k, bounds, x.values, out)
            kernel = f32_matmul.sharded_kernel(n_shards)
            return self.device.bind(name, kernel, grid, 32 * f32_matmul.WARPS, operands)
        made = ShardedQ8Matvec(
            self.batch,
            matrix,
            total_k=total_k,
            first_shard=shards[0],
            n_shards=n_shards,
            exact=self.exact,
        )
        self.device.guard(name, (*matrix.planes, x.values, x.quants, x.scales, out))
        return Launch(name, lambda stream: made(stream, x, out))

    def experts(
        self,
        name: str,
        experts: Experts,
        inputs: ExpertInputs,
        shape: ExpertShape,
        selectors: Any,
    ) -> list[Launch]:
        """Routed experts and the shared one: the subtree over this rank's shards, into out."""
        if experts.is_packed:
            return [self._packed_experts(name, experts, inputs, shape, selectors)]
        warps, scratch = f32_matmul.WARPS, inputs.scratch
        d, f = shape.d_model, shape.d_expert
        up_operands = (
            experts.gate.planes[0], experts.up.planes[0], experts.local, inputs.ids,
            inputs.weights, inputs.x.values, f, d, np.float32(shape.clamp), scratch.h,
        )  # fmt: skip
        down_operands = (
            experts.down.planes[0], experts.local, experts.shard_of, inputs.ids, scratch.h,
            experts.shared_down.planes[0], experts.lane_bounds, scratch.shared, d, f,
            shape.d_shared, inputs.out,
        )  # fmt: skip
        up = f32_matmul.experts_up_kernel(shape.n_used)
        down = f32_matmul.experts_down_kernel(shape.n_used, shape.first_shard, shape.n_shards)
        up_grid = (-(-f // warps), self.batch * shape.n_used)
        down_grid = (-(-d // warps), self.batch)
        return [
            self.device.bind(f"{name} up", up, up_grid, 32 * warps, up_operands),
            self.device.bind(f"{name} down", down, down_grid, 32 * warps, down_operands),
        ]

    def _packed_experts(
        self,
        name: str,
        experts: Experts,
        inputs: ExpertInputs,
        shape: ExpertShape,
        selectors: Any,
    ) -> Launch:
        gate, up = experts.shared_gate, experts.shared_up
        if gate is None or up is None:
            raise AssertionError("a packed layer has its shared gate and up")
        weights = ExpertWeights(
            experts.gate, experts.up, experts.down, gate, up, experts.shared_down
        )
        tables = ExpertTables(experts.local, experts.shard_of, selectors)
        made = PackedExperts(shape, weights, tables, inputs.scratch, exact=self.exact)
        n_slots = self.batch * shape.n_used
        ids, router = inputs.ids.reshape(n_slots), inputs.weights.reshape(n_slots)
        planes = [p for m in attrs.astuple(weights, recurse=False) for p in m.planes]
        self.device.guard(
            name,
            (
                *planes, *attrs.astuple(tables, recurse=False),
                *attrs.astuple(inputs.scratch, recurse=False), inputs.x.values, ids, router,
                inputs.out,
            ),
        )  # fmt: skip
        return Launch(name, lambda stream: made(stream, inputs.x, ids, router, inputs.out))
