"""Forward pass of DeepSeek V4 on the CPU: the orchestration of the kernels for one batch of rows.

Rows of several sessions are computed together where they are independent (every matrix product);
attention runs session by session. With a world, a rank computes its own shards and joins with the
others twice a layer; alone it computes all eight shards and the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numba
import numpy as np
from numpy.typing import NDArray

from ds4.collectives import Collective
from ds4.cpu.kernels import attention, elementwise, matmul, moe
from ds4.cpu.state import SessionState
from ds4.cpu.weights import Compressor, LayerWeights, Matrix, Weights, shard_bounds
from ds4.model.deepseek4.rounding import Rounding, round_fp4_hadamard, round_fp8
from ds4.partition.ownership import Ownership
from ds4.partition.shards import N_SHARDS

__all__ = ["Forward", "Segment"]

Floats = NDArray[np.float32]
_NO_CHOICE = np.zeros(1, np.int32)
_NO_ROWS = np.zeros(1, np.float32)
_UNWEIGHTED = np.zeros(0, np.float32)


@attrs.frozen
class Segment:
    """Consecutive rows of one session.

    Attributes:
      state: the session; its length is the position of the first row.
      tokens: i32[n].
      first: index of the first row in the batch.
    """

    state: SessionState
    tokens: NDArray[np.int32]
    first: int

    @property
    def n_rows(self) -> int:
        """Rows of the segment."""
        return int(self.tokens.size)


@attrs.frozen
class _Angles:
    """cos and sin, f32[R * n_dims / 2], of every row's position."""

    cos: Floats
    sin: Floats
    back: Floats

    @classmethod
    def of(cls, frequencies: NDArray[np.float64], positions: NDArray[np.int64]) -> _Angles:
        angle = positions[:, None].astype(np.float64) * frequencies
        sin = np.sin(angle).astype(np.float32).reshape(-1)
        return cls(np.cos(angle).astype(np.float32).reshape(-1), sin, -sin)


# Below this many multiply-adds a pass has about a millisecond of work for each core, and waking
# and waiting for threads (some twenty times a layer) costs as much; on a busy machine far more.
_SMALL_MACS = 50_000_000


def _multiply_adds(weights: Weights) -> int:
    """Multiply-adds of one row: every matrix once, K of E routed experts."""
    s = weights.shape
    total = weights.output.n_out * weights.output.n_in
    for w in weights.layers:
        matrices = [w.hc_attn[0], w.hc_ffn[0], w.q_a, w.q_b, w.kv, w.output_a, w.output_b]
        matrices += [w.router, w.shared_gate, w.shared_up, w.shared_down]
        for c in (w.compressor, w.index_compressor):
            matrices += [c.kv, c.gate] if c is not None else []
        matrices += [m for m in (w.index_q, w.index_proj) if m is not None]
        total += sum(m.n_out * m.n_in for m in matrices)
        total += sum(m.n_out * m.n_in for m in (w.gate, w.up, w.down)) * s.n_used
    return total


class Forward:
    """Computes batches; owns no session.

    Args:
      weights: the model.
      own: this rank's shards.
      collective: how parts are joined.
      rounding: activation rounding switch.
      threads: most worker threads; small batches use one.
    """

    def __init__(
        self,
        weights: Weights,
        own: Ownership,
        collective: Collective,
        rounding: Rounding = Rounding.NONE,
        threads: int = 1,
    ) -> None:
        self.weights = weights
        self.threads = threads
        self._row_macs = _multiply_adds(weights)
        self._tasks = 1
        self._is_warm = False
        self.own = own
        self.collective = collective
        self.rounding = rounding
        s = self.shape = weights.shape
        groups = shard_bounds(s.n_groups)
        self.groups = (int(groups[own.attention[0]]), int(groups[own.attention[1]]))
        self.heads = (
            self.groups[0] * s.n_heads // s.n_groups,
            self.groups[1] * s.n_heads // s.n_groups,
        )
        self.low_bounds = groups * s.group_rank
        # Lanes follow the quant blocks of the down projection, whose type may differ by layer.
        self.lane_bounds = [
            shard_bounds(s.d_expert // w.shared_down.block_elements) * w.shared_down.block_elements
            for w in weights.layers
        ]
        owned = (own.shard_of >= own.experts[0]) & (own.shard_of < own.experts[1])
        self.local = np.where(owned, np.arange(s.n_experts, dtype=np.int32), np.int32(-1))
        rows = shard_bounds(s.n_vocab)
        self.vocab_rows = (int(rows[own.vocabulary[0]]), int(rows[own.vocabulary[1]]))
        self.frequencies = (s.rope_window.frequencies(), s.rope_compressed.frequencies())

    # -- pieces ------------------------------------------------------------------------------

    def _product(
        self, m: Matrix, x: Floats, n_rows: int, rows: tuple[int, int] | None = None
    ) -> Floats:
        """X @ W[rows].T as f32[n_rows * n]."""
        first, last = rows if rows is not None else (0, m.n_out)
        n = last - first
        out = np.empty(n_rows * n, np.float32)
        tasks = max(1, min(n, self._tasks))
        matmul.matmul(
            m.kind, m.data, m.row_bytes, first, n, m.n_in, x, m.n_in, 0, n_rows, out, tasks
        )
        return out

    def _hc_pre(
        self, hyper: tuple[Matrix, Floats, Floats], x: Floats, n_rows: int, norm: Floats
    ) -> tuple[Floats, Floats, Floats]:
        s = self.shape
        fn, scale, base = hyper
        n, d = s.n_streams, s.d_model
        flat = np.empty_like(x)
        elementwise.rms_norm(x, n_rows, n * d, _UNWEIGHTED, np.float32(s.rms_eps), flat)
        m = self._product(fn, flat, n_rows)
        u = np.empty(n_rows * d, np.float32)
        post = np.empty(n_rows * n, np.float32)
        comb = np.empty(n_rows * n * n, np.float32)
        elementwise.hc_pre(
            m, scale, base, x, n_rows, n, d, s.sinkhorn_iterations, np.float32(s.hc_eps),
            norm, np.float32(s.rms_eps), u, post, comb,
        )  # fmt: skip
        return u, post, comb

    def _norm(self, x: Floats, n_rows: int, length: int, weight: Floats = _UNWEIGHTED) -> None:
        eps = np.float32(self.shape.rms_eps)
        elementwise.rms_norm(x, n_rows, length, weight, eps, x)

    # -- attention ---------------------------------------------------------------------------

    def _attention(
        self, index: int, u: Floats, n_rows: int, segments: Sequence[Segment], angles: _Angles
    ) -> Floats:
        s = self.shape
        w = self.weights.layers[index]
        ratio = s.ratios[index]
        hd = s.head_dim
        h0, h1 = self.heads
        n_heads = h1 - h0
        latent = self._product(w.q_a, u, n_rows)
        self._norm(latent, n_rows, s.q_rank, w.q_a_norm)
        q = self._product(w.q_b, latent, n_rows, (h0 * hd, h1 * hd))
        self._norm(q, n_rows * n_heads, hd)
        elementwise.rope(q, n_rows, n_heads, hd, s.rope_dim, angles.cos, angles.sin)
        kv = self._product(w.kv, u, n_rows)
        self._norm(kv, n_rows, hd, w.kv_norm)
        elementwise.rope(kv, n_rows, 1, hd, s.rope_dim, angles.cos, angles.sin)
        if self.rounding is Rounding.VENDOR:
            kv = round_fp8(kv.reshape(n_rows, hd), s.rope_dim).reshape(-1)
        pooled = self._pool_inputs(w.compressor, u, n_rows)
        index_pooled = self._pool_inputs(w.index_compressor, u, n_rows)
        index_q, index_weights = self._index_query(w, u, latent, n_rows, angles)
        out = np.empty(n_rows * n_heads * hd, np.float32)
        for segment in segments:
            state = segment.state
            layer = state.layers[index]
            lo, n = segment.first, segment.n_rows
            ring = layer.ring.reshape(state.capacity, hd)
            at = np.arange(state.length, state.length + n) % state.capacity
            ring[at] = kv.reshape(n_rows, hd)[lo : lo + n]
            chosen, n_chosen, stride = _NO_CHOICE, _NO_CHOICE, 0
            if w.compressor is not None and pooled is not None:
                rows = (layer.rows, layer.slots_k, layer.slots_s)
                new = self._compress(w.compressor, pooled, segment, ratio, rows, n_rows)
                if self.rounding is Rounding.VENDOR:
                    new[:] = round_fp8(new, s.rope_dim)
            if w.index_compressor is not None and index_pooled is not None:
                rows = (layer.index_rows, layer.index_slots_k, layer.index_slots_s)
                new = self._compress(w.index_compressor, index_pooled, segment, ratio, rows, n_rows)
                if self.rounding is Rounding.VENDOR:
                    new[:] = round_fp4_hadamard(new)
                if (state.length + n) // ratio > s.index_top_k:
                    chosen, n_chosen = self._select(
                        index_q, index_weights, segment, layer.index_rows, ratio, n_rows
                    )
                    stride = s.index_top_k
            attention.attend(
                _rows(q, n_rows, lo, n), layer.ring, state.capacity, s.window, state.length, n,
                n_heads, h0, hd, w.sinks, np.float32(hd**-0.5),
                layer.rows if ratio else _NO_ROWS, chosen, n_chosen, stride, ratio,
                _rows(out, n_rows, lo, n),
            )  # fmt: skip
        elementwise.rope(out, n_rows, n_heads, hd, s.rope_dim, angles.cos, angles.back)
        return self._project_out(w, out, n_rows)

    def _project_out(self, w: LayerWeights, heads: Floats, n_rows: int) -> Floats:
        """Grouped low-rank projection and the joined sum over output groups, f32[R * D]."""
        s = self.shape
        g0, g1 = self.groups
        n_groups = g1 - g0
        a, b = w.output_a, w.output_b
        low = np.empty(n_rows * n_groups * s.group_rank, np.float32)
        matmul.matmul_grouped(
            a.kind, a.data, a.row_bytes, n_groups, g0, s.group_rank, s.group_width,
            heads, n_groups * s.group_width, n_rows, low,
        )  # fmt: skip
        v0, v1 = self.own.attention
        parts = np.empty((v1 - v0) * n_rows * s.d_model, np.float32)
        matmul.matmul_shards(
            b.kind, b.data, b.row_bytes, b.block_elements, b.block_bytes, self.low_bounds, v0, v1,
            s.d_model, low, n_groups * s.group_rank, n_rows, parts,
        )  # fmt: skip
        y = np.empty(n_rows * s.d_model, np.float32)
        matmul.tree_join(parts, v1 - v0, y.size, y)
        # Replicated attention (expert parallelism) has the whole sum already.
        return y if v1 - v0 == N_SHARDS else self.collective.join(y)

    def _pool_inputs(
        self, c: Compressor | None, u: Floats, n_rows: int
    ) -> tuple[Floats, Floats] | None:
        if c is None:
            return None
        return self._product(c.kv, u, n_rows), self._product(c.gate, u, n_rows)

    def _compress(
        self,
        c: Compressor,
        pooled: tuple[Floats, Floats],
        segment: Segment,
        ratio: int,
        target: tuple[Floats, Floats, Floats],
        n_rows: int,
    ) -> Floats:
        """Append the rows the segment completes to `target` (rows, slots_k, slots_s).

        Returns a view of the new rows, f32[n_new, width].
        """
        s = self.shape
        state, n = segment.state, segment.n_rows
        rows, slots_k, slots_s = target
        first, last = state.length // ratio, (state.length + n) // ratio
        new = _Angles.of(self.frequencies[1], np.arange(first, last) * ratio)
        k, gate = (_rows(part, n_rows, segment.first, n) for part in pooled)
        attention.compress(
            k, gate, c.ape, state.length, n, ratio, c.width, slots_k, slots_s, c.norm,
            np.float32(s.rms_eps), new.cos, new.sin, s.rope_dim, rows,
        )  # fmt: skip
        return rows[first * c.width : last * c.width].reshape(-1, c.width)

    def _index_query(
        self, w: LayerWeights, u: Floats, latent: Floats, n_rows: int, angles: _Angles
    ) -> tuple[Floats, Floats]:
        """Rotated indexer queries f32[R * heads * width] and scaled head weights f32[R * heads]."""
        if w.index_q is None or w.index_proj is None:
            return _NO_ROWS, _NO_ROWS
        s = self.shape
        q = self._product(w.index_q, latent, n_rows)
        elementwise.rope(
            q, n_rows, s.n_index_heads, s.index_dim, s.rope_dim, angles.cos, angles.sin
        )
        if self.rounding is Rounding.VENDOR:
            q = round_fp4_hadamard(q.reshape(-1, s.index_dim)).reshape(-1)
        weights = self._product(w.index_proj, u, n_rows)
        weights *= np.float32((s.index_dim * s.n_index_heads) ** -0.5)
        return q, weights

    def _select(
        self,
        index_q: Floats,
        index_weights: Floats,
        segment: Segment,
        rows: Floats,
        ratio: int,
        n_rows: int,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The indexer's choice: i32[n * top_k] and its counts i32[n]."""
        s = self.shape
        n, position = segment.n_rows, segment.state.length
        stride = (position + n) // ratio
        scores = np.empty(n * stride, np.float32)
        attention.index_scores(
            _rows(index_q, n_rows, segment.first, n),
            _rows(index_weights, n_rows, segment.first, n),
            rows, position, n, s.n_index_heads, s.index_dim, ratio, stride, scores,
        )  # fmt: skip
        chosen = np.empty(n * s.index_top_k, np.int32)
        n_chosen = np.empty(n, np.int32)
        attention.index_select(scores, position, n, ratio, stride, s.index_top_k, chosen, n_chosen)
        return chosen, n_chosen

    # -- mixture of experts ------------------------------------------------------------------

    def _moe(self, index: int, u: Floats, tokens: NDArray[np.int32], n_rows: int) -> Floats:
        s = self.shape
        w = self.weights.layers[index]
        clamp = np.float32(s.clamp[index])
        logits = self._product(w.router, u, n_rows)
        n_slots = n_rows * s.n_used
        ids = np.empty(n_slots, np.int32)
        weights = np.empty(n_slots, np.float32)
        moe.route(
            logits, w.router_bias, w.hash_table, tokens, n_rows, s.n_experts, s.n_used,
            np.float32(s.expert_scale), ids, weights,
        )  # fmt: skip
        offsets = np.empty(s.n_experts + 1, np.int64)
        slots = np.empty(n_slots, np.int32)
        moe.group_slots(ids, n_slots, self.local[index], s.n_experts, offsets, slots)
        h = np.empty(n_slots * s.d_expert, np.float32)
        moe.experts_up(
            w.gate.kind, w.gate.data, w.up.data, w.gate.row_bytes, s.n_experts, s.d_model,
            s.d_expert, u, s.n_used, weights, offsets, slots, clamp, h,
        )  # fmt: skip
        y = np.empty(n_slots * s.d_model, np.float32)
        moe.experts_down(
            w.down.kind, w.down.data, w.down.row_bytes, s.n_experts, s.d_model, s.d_expert,
            h, offsets, slots, y,
        )  # fmt: skip
        v0, v1 = self.own.experts
        shared = self._shared(index, u, n_rows, clamp)
        out = np.empty(n_rows * s.d_model, np.float32)
        moe.combine(
            y, ids, self.own.shard_of[index], shared, n_rows, s.n_used, s.d_model, v0, v1, out
        )
        return self.collective.join(out)

    def _shared(self, index: int, u: Floats, n_rows: int, clamp: np.float32) -> Floats:
        """Partial sums of the shared expert over this rank's lanes, f32[shards * R * D]."""
        w = self.weights.layers[index]
        bounds = self.lane_bounds[index]
        v0, v1 = self.own.experts
        lanes = (int(bounds[v0]), int(bounds[v1]))
        a = self._product(w.shared_gate, u, n_rows, lanes)
        b = self._product(w.shared_up, u, n_rows, lanes)
        moe.swiglu_rows(a, b, a.size, clamp, a)
        down = w.shared_down
        parts = np.empty((v1 - v0) * n_rows * down.n_out, np.float32)
        matmul.matmul_shards(
            down.kind, down.data, down.row_bytes, down.block_elements, down.block_bytes,
            bounds, v0, v1, down.n_out, a, lanes[1] - lanes[0], n_rows, parts,
        )  # fmt: skip
        return parts

    # -- whole pass --------------------------------------------------------------------------

    def _warm_selection(self) -> None:
        """Compile or load the kernels that only a long context reaches, with the first pass.

        Otherwise a first long conversation would stand still in its middle for as long as they
        compile.
        """
        self._is_warm = True
        row, n = np.zeros(1, np.float32), np.zeros(1, np.int32)
        attention.index_scores(row, row, row, 3, 1, 1, 1, 4, 1, row)
        attention.index_select(row, 3, 1, 4, 1, 1, n.copy(), n)

    def run(self, segments: Sequence[Segment], wanted: NDArray[np.int64]) -> Floats:
        """Compute a batch and advance every session in it.

        Args:
          segments: in row order; each session at most once.
          wanted: i64[n], rows of the batch whose logits are needed, ascending.

        Returns:
          Logits f32[n, V] of the wanted rows, whole on every rank.
        """
        s = self.shape
        tokens = np.concatenate([segment.tokens for segment in segments])
        n_rows = int(tokens.size)
        threads = 1 if n_rows * self._row_macs < _SMALL_MACS else self.threads
        numba.set_num_threads(threads)
        self._tasks = threads if threads == 1 else 4 * threads
        if not self._is_warm and 4 in s.ratios:
            self._warm_selection()
        positions = np.concatenate(
            [segment.state.length + np.arange(segment.n_rows) for segment in segments]
        )
        angles = [_Angles.of(f, positions) for f in self.frequencies]
        e = self.weights.embedding
        x = np.empty(n_rows * s.n_streams * s.d_model, np.float32)
        matmul.embed(e.kind, e.data, e.row_bytes, e.n_in, tokens, n_rows, s.n_streams, x)
        for index, w in enumerate(self.weights.layers):
            angle = angles[1 if s.ratios[index] else 0]
            u, post, comb = self._hc_pre(w.hc_attn, x, n_rows, w.attn_norm)
            y = self._attention(index, u, n_rows, segments, angle)
            elementwise.hc_post(y, x, n_rows, s.n_streams, s.d_model, post, comb)
            u, post, comb = self._hc_pre(w.hc_ffn, x, n_rows, w.ffn_norm)
            y = self._moe(index, u, tokens, n_rows)
            elementwise.hc_post(y, x, n_rows, s.n_streams, s.d_model, post, comb)
        for segment in segments:
            segment.state.append(segment.tokens)
        return self._head(x, wanted)

    def _head(self, x: Floats, wanted: NDArray[np.int64]) -> Floats:
        s = self.shape
        n = int(wanted.size)
        if n == 0:
            return np.empty((0, s.n_vocab), np.float32)
        width = s.n_streams * s.d_model
        x = np.ascontiguousarray(x.reshape(-1, width)[wanted]).reshape(-1)
        fn, scale, base = self.weights.output_hc
        flat = np.empty_like(x)
        elementwise.rms_norm(x, n, width, _UNWEIGHTED, np.float32(s.rms_eps), flat)
        m = self._product(fn, flat, n)
        u = np.empty(n * s.d_model, np.float32)
        elementwise.hc_head(
            m, scale, base, x, n, s.n_streams, s.d_model, np.float32(s.hc_eps),
            self.weights.output_norm, np.float32(s.rms_eps), u,
        )  # fmt: skip
        logits = self._product(self.weights.output, u, n, self.vocab_rows)
        if self.vocab_rows == (0, s.n_vocab):
            return logits.reshape(n, s.n_vocab)
        slices = self.collective.all_gather(logits)
        return np.concatenate([part.reshape(n, -1) for part in slices], axis=1)


def _rows(x: Floats, n_rows: int, first: int, count: int) -> Floats:
    """Flat view of rows [first, first + count) of a flat array of n_rows rows."""
    width = x.size // n_rows
    return x[first * width : (first + count) * width]
