"""The launches of one step: the forward pass for a bucket of rows, and the output head.

A `Program` binds every kernel once to weights, static buffers and state. The same launches run
eagerly, one by one, or from a captured graph; nothing in them depends on the step's content, which
lies in the meta array (see `workspace.META_FIELDS`).

Order of a layer: mix, collapse, input projections, prepare (norms, rotation, compressors), query
projections, indexer, attention (which ends by appending to the state), output projections; mix,
collapse, router and shared projections, route, experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ds4.cuda.device import Device, Launch
from ds4.cuda.join import DeviceJoin
from ds4.cuda.kernels import attention, hyper, indexer, latent, outputs
from ds4.cuda.kernels import inputs as starts
from ds4.cuda.kernels import route as routing
from ds4.cuda.kernels.experts_up import ExpertShape
from ds4.cuda.kernels.quant_matmul import Activations
from ds4.cuda.products import Binder, ExpertInputs
from ds4.cuda.weights import DeviceLayer, DeviceWeights, Hyper, Stack
from ds4.cuda.workspace import META_FIELDS, Workspace
from ds4.gguf import QuantType

__all__ = ["Program"]

_MAX_COLLAPSE_WARPS = 16


class Program:
    """All launches of one bucket.

    Args:
      device: where they run.
      weights: of this rank.
      space: static buffers.
      state: f32[*], all sessions' state.
      batch: rows of the bucket.
      exact: float32 activations in every product.
      join: adds the ranks' partial sums.

    Attributes:
      forward: one pass over the layers for rows 0 to batch - 1.
      head: logits and greedy tokens of the rows meta[wanted], in that order.
    """

    def __init__(
        self,
        device: Device,
        weights: DeviceWeights,
        space: Workspace,
        state: Any,
        batch: int,
        *,
        exact: bool,
        join: DeviceJoin,
    ) -> None:
        self.device, self.weights, self.space, self.state = device, weights, space, state
        self.shape = weights.shape
        self.batch = batch
        self.join = join
        self.binder = Binder(device, batch, exact)
        self.exact = exact
        (
            self.tokens, self.positions, self.slots, self.firsts, self.lasts, self.wanted,
            self.every_row,
        ) = (space.meta[i, :batch] for i in range(len(META_FIELDS)))  # fmt: skip
        self.cos, self.sin = space.cosines[:batch], space.sines[:batch]
        self.forward = self._forward()
        self.head = self._head()

    # -- helpers -----------------------------------------------------------------------------

    def _bind(self, name: str, kernel: Any, grid: Any, block: int, *operands: Any) -> Launch:
        return self.device.bind(name, kernel, grid, block, operands)

    def _rounded(
        self, name: str, values: Any, *, is_done: bool = False
    ) -> tuple[Activations, list[Launch]]:
        """Activations over a buffer, and the launches that fill their byte form if it is not."""
        values = values[: self.batch]
        if self.exact:
            return Activations(values), []
        n = values.shape[0] * values.shape[1]
        x = Activations(values, self.space.quants[: n // 4], self.space.quant_scales[: n // 32])
        return x, [] if is_done else self.binder.round_input(name, x)

    def _rounds(self, width: int) -> bool:
        """Whether the kernel that makes rows of this width also makes their byte form."""
        return not self.exact and width % 128 == 0

    def _outs(self, buffers: dict[QuantType, Any]) -> dict[QuantType, Any]:
        return {storage: array[: self.batch] for storage, array in buffers.items()}

    @staticmethod
    def _place(stack: Stack, outs: dict[QuantType, Any], name: str) -> tuple[Any, int]:
        """(output buffer, first column) of a matrix; where it is absent, one that is not read."""
        if name not in stack.places:
            return next(iter(outs.values())), 0
        storage, column = stack.places[name]
        return outs[storage], column

    def _sizes(self, index: int) -> latent.LayerSizes:
        s = self.shape
        ratio = s.ratios[index]
        return latent.LayerSizes(
            q_rank=s.q_rank,
            head_dim=s.head_dim,
            rope_dim=s.rope_dim,
            window=s.window,
            ratio=ratio,
            index_dim=s.index_dim if ratio == 4 else 0,
            rms_eps=s.rms_eps,
        )

    def _hyper(
        self, name: str, hc: Hyper, norm: Any, *, has_post: bool, is_head: bool = False
    ) -> list[Launch]:
        """Mix and collapse: from streams (and the last sublayer's output) to a sublayer's input."""
        s, space, batch = self.shape, self.space, self.batch
        n_mix = hc.fn.rows
        mix = hyper.mix_kernel(
            s.d_model, n_mix, halves=hc.fn.kind is QuantType.F16, has_post=has_post
        )
        rows = self.wanted if is_head else self.every_row
        target, out = (space.head_x, space.head_u) if is_head else (space.x, space.u)
        n_parts = -(-s.d_model // hyper.MIX_COLUMNS)
        warps = max(1, min(_MAX_COLLAPSE_WARPS, s.d_model // 128))
        collapse = hyper.collapse_kernel(
            s.d_model, n_mix, warps, s.sinkhorn_iterations, s.hc_eps, s.rms_eps,
            rounds=self._rounds(s.d_model),
        )  # fmt: skip
        return [
            self._bind(
                f"{name} mix", mix, (n_parts, batch), 128, hc.fn.planes[0], space.x, space.y,
                space.post, space.comb, rows, target, space.parts,
            ),
            self._bind(
                f"{name} collapse", collapse, (1 if is_head else 2, batch), 32 * warps,
                space.parts, hc.scale, hc.base, target, norm, out, space.post, space.comb,
                space.quants, space.quant_scales,
            ),
        ]  # fmt: skip

    # -- layers ------------------------------------------------------------------------------

    def _forward(self) -> list[Launch]:
        s, space, batch = self.shape, self.space, self.batch
        half = s.rope_dim // 2
        e = self.weights.embedding
        embed = starts.embed_kernel(s.d_model, s.n_streams, halves=e.kind is QuantType.F16)
        threads = -(-starts.N_ANGLES * half // 32) * 32
        launches = [
            self._bind(
                "angles", starts.angles_kernel(half), (batch,), threads, self.positions,
                space.frequencies, self.cos, self.sin,
            ),
            self._bind(
                "embed", embed, (-(-(s.d_model // 2) // 128), batch), 128, e.planes[0],
                self.tokens, space.x[:batch],
            ),
        ]  # fmt: skip
        for index, layer in enumerate(self.weights.layers):
            launches += self._attention(index, layer)
            launches += self._moe(index, layer)
        return launches

    def _attention(self, index: int, layer: DeviceLayer) -> list[Launch]:
        s, space, batch = self.shape, self.space, self.batch
        name = f"layer {index}"
        sizes = self._sizes(index)
        launches = self._hyper(f"{name} attention", layer.hc_attn, layer.attn_norm,
                               has_post=index > 0)  # fmt: skip
        u, rounding = self._rounded(f"{name} round input", space.u, is_done=self._rounds(s.d_model))
        into = self._outs(space.into)
        launches += [*rounding, *self.binder.stack(f"{name} into", layer.into, u, into)]
        q, q_column = self._place(layer.into, into, "q_a")
        kv_in, kv_column = self._place(layer.into, into, "kv")
        gates: list[Any] = []
        for part in ("pool_kv", "pool_gate", "index_kv", "index_gate"):
            gates += self._place(layer.into, into, part)
        nothing = layer.attn_norm
        pool, index_pool = layer.pool, layer.index_pool
        ape = pool.ape if pool else nothing
        index_ape = index_pool.ape if index_pool else nothing
        rows = (space.table, self.state, np.int32(index), self.slots, self.positions)
        kv, latent_out = space.kv[:batch], space.latent[:batch]
        roles = {0: 2, 4: 4, 128: 3}[sizes.ratio]
        launches.append(
            self._bind(
                f"{name} prepare",
                latent.prepare_kernel(sizes, rounds=self._rounds(s.q_rank)),
                (roles, batch),
                latent.THREADS,
                *rows,
                self.firsts,
                self.cos,
                self.sin,
                q,
                q_column,
                kv_in,
                kv_column,
                *gates,
                layer.q_norm,
                layer.kv_norm,
                ape,
                pool.norm if pool else nothing,
                index_ape,
                index_pool.norm if index_pool else nothing,
                latent_out,
                kv,
                space.quants,
                space.quant_scales,
            )
        )
        ql, rounding = self._rounded(
            f"{name} round latent", space.latent, is_done=self._rounds(s.q_rank)
        )
        up = self._outs(space.up)
        launches += [*rounding, *self.binder.stack(f"{name} up", layer.up, ql, up)]
        if sizes.ratio == 4:
            launches += self._index(index, layer, into, up, rows)
        launches += self._attend(index, layer, up, rows, (kv, *gates, ape, index_ape))
        launches += self._project_out(index, layer)
        return launches

    def _index(
        self,
        index: int,
        layer: DeviceLayer,
        into: dict[QuantType, Any],
        up: dict[QuantType, Any],
        rows: tuple[Any, ...],
    ) -> list[Launch]:
        s, space, batch = self.shape, self.space, self.batch
        n_keys = space.scores.shape[1]
        if n_keys <= s.index_top_k:
            return []
        q, q_column = self._place(layer.up, up, "index_q")
        weights, w_column = self._place(layer.into, into, "index_weights")
        scale = np.float32((s.index_dim * s.n_index_heads) ** -0.5)
        kernel = indexer.scores_kernel(s.n_index_heads, s.index_dim, s.rope_dim, s.index_top_k)
        threads = 64 if self.device.is_simulated else indexer.SELECT_THREADS
        return [
            self._bind(
                f"layer {index} index scores", kernel,
                (-(-n_keys // indexer.KEYS_PER_BLOCK), batch), 128, *rows, self.cos, self.sin, q,
                q_column, weights, w_column, scale, space.scores,
            ),
            self._bind(
                f"layer {index} index select", indexer.select_kernel(s.index_top_k, threads),
                (batch,), threads, self.slots, self.positions, space.scores, space.chosen,
            ),
        ]  # fmt: skip

    def _attend(
        self,
        index: int,
        layer: DeviceLayer,
        up: dict[QuantType, Any],
        rows: tuple[Any, ...],
        appended: tuple[Any, ...],
    ) -> list[Launch]:
        s, space, batch = self.shape, self.space, self.batch
        h0, h1 = self.weights.heads
        sizes = attention.HeadSizes(
            layer=self._sizes(index), n_heads=h1 - h0, first_head=h0, top_k=s.index_top_k
        )
        q, column = self._place(layer.up, up, "q_b")
        if column:
            raise AssertionError("q_b must be the first matrix of its stack")
        splits = space.split_sums.shape[1]
        head_blocks = -(-sizes.n_heads // attention.HEADS_PER_BLOCK)
        threads = -(-s.head_dim // 128) * 32
        combine = attention.combine_kernel(sizes, rounds=self._rounds(s.head_dim))
        return [
            self._bind(
                f"layer {index} attend", attention.partial_kernel(sizes),
                (splits, head_blocks, batch), 32 * attention.HEADS_PER_BLOCK, *rows, self.firsts,
                self.cos, self.sin, q, space.kv, space.chosen, space.split_sums,
                space.split_stats,
            ),
            self._bind(
                f"layer {index} combine", combine,
                (sizes.n_heads + attention.APPEND_BLOCKS, batch), threads, *rows, self.lasts,
                self.cos, self.sin, space.split_sums, space.split_stats, layer.sinks, space.heads,
                *appended, space.quants, space.quant_scales,
            ),
        ]  # fmt: skip

    def _project_out(self, index: int, layer: DeviceLayer) -> list[Launch]:
        s, space = self.shape, self.space
        name = f"layer {index}"
        heads, rounding = self._rounded(
            f"{name} round heads", space.heads, is_done=self._rounds(s.head_dim)
        )
        g0, g1 = self.weights.groups
        low, y = space.low[: self.batch], space.y[: self.batch]
        launches = [
            *rounding,
            self.binder.grouped(f"{name} output a", layer.output_a, g1 - g0, heads, low),
        ]
        x, rounding = self._rounded(f"{name} round low", space.low)
        shards = self.weights.own.attention
        launches += [
            *rounding,
            self.binder.sharded(
                f"{name} output b", layer.output_b, x, y, shards=shards,
                total_k=s.n_groups * s.group_rank, bounds=layer.low_bounds,
            ),
        ]  # fmt: skip
        # Replicated attention (expert parallelism) has the whole sum already.
        return launches if shards == (0, 8) else [*launches, *self.join.bind(f"{name} join", y)]

    def _moe(self, index: int, layer: DeviceLayer) -> list[Launch]:
        s, space, batch = self.shape, self.space, self.batch
        name = f"layer {index}"
        launches = self._hyper(f"{name} experts", layer.hc_ffn, layer.ffn_norm, has_post=True)
        u, rounding = self._rounded(f"{name} round input", space.u, is_done=self._rounds(s.d_model))
        outs = self._outs(space.ffn_in)
        launches += [*rounding, *self.binder.stack(f"{name} ffn in", layer.ffn_in, u, outs)]
        logits, l_column = self._place(layer.ffn_in, outs, "router")
        gate, gate_column = self._place(layer.ffn_in, outs, "shared_gate")
        up, up_column = self._place(layer.ffn_in, outs, "shared_up")
        experts = layer.experts
        v0, v1 = self.weights.own.experts
        shape = ExpertShape(
            batch=batch, n_used=s.n_used, d_model=s.d_model, d_expert=s.d_expert,
            d_shared=experts.shared_down.k, clamp=s.clamp[index], first_shard=v0, n_shards=v1 - v0,
        )  # fmt: skip
        # Packed layers compute the shared expert's hidden lanes with the routed ones.
        lanes = 0 if experts.is_packed else shape.d_shared
        kernel = routing.route_kernel(
            s.n_experts, s.n_used, hashed=layer.is_hashed, biased=layer.is_biased
        )
        launches.append(
            self._bind(
                f"{name} route",
                kernel,
                (1 + -(-lanes // routing.LANES_PER_BLOCK), batch),
                routing.LANES_PER_BLOCK,
                logits,
                l_column,
                layer.router_bias,
                layer.hash_table,
                self.tokens,
                np.float32(s.expert_scale),
                gate,
                gate_column,
                up,
                up_column,
                lanes,
                np.float32(shape.clamp),
                space.ids,
                space.expert_weights,
                space.shared,
            )
        )
        y = space.y[:batch]
        inputs = ExpertInputs(
            ids=space.ids[:batch],
            weights=space.expert_weights[:batch],
            x=u,
            scratch=space.expert_scratch(shape, exact=self.exact or not experts.is_packed),
            out=y,
        )
        launches += self.binder.experts(
            f"{name} experts", experts, inputs, shape, self.weights.selectors
        )
        if (v0, v1) != (0, 8):
            launches += self.join.bind(f"{name} join", y)
        return launches

    # -- head --------------------------------------------------------------------------------

    def _head(self) -> list[Launch]:
        space, batch, weights = self.space, self.batch, self.weights
        launches = self._hyper(
            "head", weights.output_hc, weights.output_norm, has_post=True, is_head=True
        )
        u, rounding = self._rounded(
            "head round input", space.head_u, is_done=self._rounds(self.shape.d_model)
        )
        outs = self._outs(space.logits)
        launches += [*rounding, *self.binder.stack("logits", weights.output, u, outs)]
        logits, _ = self._place(weights.output, outs, "logits")
        n = weights.vocab_rows[1] - weights.vocab_rows[0]
        launches += [
            self._bind(
                "argmax", outputs.argmax_kernel(), (outputs.ARGMAX_BLOCKS, batch), 256, logits,
                n, space.best, space.best_at,
            ),
            self._bind(
                "argmax final", outputs.argmax_final_kernel(), (batch,), 32, space.best,
                space.best_at, space.next_tokens,
            ),
        ]  # fmt: skip
        return launches
