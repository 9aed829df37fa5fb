"""Between the input projections and attention: norms, rotation, and the compressors.

State of a session lies in one f32 array `state` shared by all sessions; `table[slot, layer, part]`
is the first element of each part (see `Part`). Rows of the step are read from the step's own
buffers, older ones from the state: the row of position p <= t of row b's session is step row
b - (t - p) if that is at least firsts[b], else it is in the state. So a chunk and its tokens one by
one go through the same arithmetic, and the state is written only by `append_row`, at the end.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
from numba import float32, int64

from ds4.cuda.kernels.block import LOWEST, begin, block_sum, exp, inverse_root, quantize_quad
from ds4.cuda.kernels.intrinsics import cuda, device_function, div, fma

__all__ = ["N_PARTS", "LayerSizes", "Part", "append_row", "prepare_kernel"]

THREADS = 256
_WARPS = THREADS // 32


class Part:
    """Index of a part of a layer's state in the table."""

    RING = 0
    """f32[window, head_dim]; position p in row p % window."""
    ROWS = 1
    """f32[n, head_dim], compressed rows."""
    SLOTS_K = 2
    """f32[n_slots, c * head_dim], compressor values; position p in slot p % n_slots."""
    SLOTS_S = 3
    """The same of the gate scores, position bias included."""
    INDEX_ROWS = 4
    """f32[n, index_dim], the indexer's compressed rows."""
    INDEX_SLOTS_K = 5
    INDEX_SLOTS_S = 6


N_PARTS = 7


@attrs.frozen(kw_only=True)
class LayerSizes:
    """Constants of one kind of layer that kernels are compiled for.

    Attributes:
      q_rank: width of the query latent.
      head_dim: width of a head.
      rope_dim: rotated tail.
      window: sliding window.
      ratio: 0, 4 or 128.
      index_dim: width of indexer rows; 0 where there is no indexer.
      rms_eps: epsilon of the norms.
    """

    q_rank: int
    head_dim: int
    rope_dim: int
    window: int
    ratio: int
    index_dim: int
    rms_eps: float

    @property
    def halves(self) -> int:
        """Halves c of a compressor's channels: 2 with overlap (ratio 4), else 1."""
        return 2 if self.ratio == 4 else 1

    @property
    def n_slots(self) -> int:
        """Positions whose compressor inputs are kept."""
        return self.halves * self.ratio


@functools.cache
def _norm(width: int, eps: float) -> Any:
    """Device function (x f32[width] shared, weight, scratch): x = rms norm of x, times weight."""
    total_of = block_sum(_WARPS)
    inverse, eps_f = float32(1.0 / width), float32(eps)

    @device_function
    def norm(x, weight, scratch):
        square = float32(0)
        for i in range(cuda.threadIdx.x, width, THREADS):
            square = fma(x[i], x[i], square)
        root = inverse_root(total_of(square, scratch) * inverse + eps_f)
        for i in range(cuda.threadIdx.x, width, THREADS):
            x[i] = x[i] * root * weight[i]
        cuda.syncthreads()

    return norm


@functools.cache
def _rotate(width: int, rope_dim: int) -> Any:
    """Device function (x f32[width] shared, cos, sin, b, kind): rotate the tail; then a barrier."""
    half = rope_dim // 2
    tail = width - rope_dim

    @device_function
    def rotate(x, cosines, sines, b, kind):
        for i in range(cuda.threadIdx.x, half, THREADS):
            p, q = x[tail + 2 * i], x[tail + 2 * i + 1]
            c, s = cosines[b, kind, i], sines[b, kind, i]
            x[tail + 2 * i] = p * c - q * s
            x[tail + 2 * i + 1] = p * s + q * c
        cuda.syncthreads()

    return rotate


@functools.cache
def _pool(width: int, ratio: int) -> Any:
    """Device function that pools the window ending at t into buffer[width]; ends with a barrier.

    Per channel a softmax over the window's positions; with ratio 4 also over the window before,
    whose tokens count with their first half of channels and this window's with their second.
    """
    c = 2 if ratio == 4 else 1
    cw = c * width
    n_slots = c * ratio

    @device_function
    def pool(k_in, k_column, s_in, s_column, ape, state, k_base, s_base, b, t, first, buffer):
        row = t // ratio
        start = max(0, ratio * (row - (c - 1)))
        for d in range(cuda.threadIdx.x, width, THREADS):
            top = LOWEST
            total = float32(0)
            value = float32(0)
            for p in range(start, t + 1):
                column = d
                if c == 2 and p >= ratio * row:
                    column = width + d
                r = b - (t - p)
                if r >= first:
                    score = s_in[r, s_column + column] + ape[(p % ratio) * cw + column]
                    k = k_in[r, k_column + column]
                else:
                    at = int64((p % n_slots) * cw + column)
                    score = state[s_base + at]
                    k = state[k_base + at]
                if score > top:
                    shrink = exp(top - score)
                    total = total * shrink
                    value = value * shrink
                    top = score
                e = exp(score - top)
                total = total + e
                value = fma(e, k, value)
            buffer[d] = div(value, total)
        cuda.syncthreads()

    return pool


@functools.cache
def prepare_kernel(sizes: LayerSizes, *, rounds: bool = False) -> Any:
    """Kernel: query latent, KV row, and the compressed rows that this step's tokens complete.

    With rounds also the byte form of the latent; q_rank must then be a multiple of 128.

    Grid: (roles, B) blocks of THREADS. Role 0: latent[b] = rms norm of the q_a output. Role 1:
    kv[b] = rms norm of the KV output, rotated. Role 2 (ratio > 0): if position t ends a window,
    pool it into compressed row t // ratio. Role 3 (ratio 4): the same of the indexer.

    Args: table i64[slots, L, N_PARTS]; state f32[*]; layer; slots, positions, firsts i32[B]; cos,
    sin f32[B, N_ANGLES, rope_dim / 2]; projections f32[B, *], each with its first column: q, kv_in,
    the compressor's k and s, the indexer's ik and is; norms, ape.
    Shared: the widest row. Float32. Oracle: `ds4.cpu.kernels.attention.compress`.
    """
    hd, ratio, idim = sizes.head_dim, sizes.ratio, sizes.index_dim
    q_rank = sizes.q_rank
    widest = max(q_rank, hd, idim)
    norm_q, norm_kv = _norm(q_rank, sizes.rms_eps), _norm(hd, sizes.rms_eps)
    rotate_kv = _rotate(hd, sizes.rope_dim)
    pool_kv = _pool(hd, ratio or 1)
    norm_index = _norm(idim or hd, sizes.rms_eps)
    rotate_index = _rotate(idim or hd, sizes.rope_dim)
    pool_index = _pool(idim or hd, ratio or 1)
    angle = 1 if ratio else 0
    window_angle = 2 if ratio == 4 else 3

    @cuda.jit
    def prepare(
        table, state, layer, slots, positions, firsts, cosines, sines, q, q_column, kv_in,
        kv_column, k_in, k_column, s_in, s_column, ik_in, ik_column, is_in, is_column, q_norm,
        kv_norm, ape, row_norm, index_ape, index_norm, latent, kv, quants, scales,
    ):  # fmt: skip
        begin()
        role = cuda.blockIdx.x
        b = cuda.blockIdx.y
        slot = slots[b]
        if slot < 0:
            return
        t = positions[b]
        row = cuda.shared.array(widest, float32)
        scratch = cuda.shared.array(32, float32)
        if role == 0:
            for i in range(cuda.threadIdx.x, q_rank, THREADS):
                row[i] = q[b, q_column + i]
            cuda.syncthreads()
            norm_q(row, q_norm, scratch)
            for i in range(cuda.threadIdx.x, q_rank, THREADS):
                latent[b, i] = row[i]
            if rounds:
                for i in range(cuda.threadIdx.x, q_rank // 4, THREADS):
                    at = int64(b) * (q_rank // 4) + i
                    v = 4 * i
                    quantize_quad(row[v], row[v + 1], row[v + 2], row[v + 3], at, quants, scales)
        elif role == 1:
            for i in range(cuda.threadIdx.x, hd, THREADS):
                row[i] = kv_in[b, kv_column + i]
            cuda.syncthreads()
            norm_kv(row, kv_norm, scratch)
            rotate_kv(row, cosines, sines, b, angle)
            for i in range(cuda.threadIdx.x, hd, THREADS):
                kv[b, i] = row[i]
        elif ratio > 0 and (t + 1) % (ratio or 1) == 0:
            j = int64(t // (ratio or 1))
            first = firsts[b]
            if role == 2:
                pool_kv(
                    k_in, k_column, s_in, s_column, ape, state, table[slot, layer, 2],
                    table[slot, layer, 3], b, t, first, row,
                )  # fmt: skip
                norm_kv(row, row_norm, scratch)
                rotate_kv(row, cosines, sines, b, window_angle)
                base = table[slot, layer, 1] + j * hd
                for i in range(cuda.threadIdx.x, hd, THREADS):
                    state[base + i] = row[i]
            elif idim > 0:
                pool_index(
                    ik_in, ik_column, is_in, is_column, index_ape, state,
                    table[slot, layer, 5], table[slot, layer, 6], b, t, first, row,
                )  # fmt: skip
                norm_index(row, index_norm, scratch)
                rotate_index(row, cosines, sines, b, window_angle)
                base = table[slot, layer, 4] + j * idim
                for i in range(cuda.threadIdx.x, idim, THREADS):
                    state[base + i] = row[i]

    return prepare


@functools.cache
def append_row(sizes: LayerSizes) -> Any:
    """Device function that carries row b of the step into its session's state, as one of n threads.

    The last `window` rows of a session's step write the ring, its last n_slots rows the compressor
    slots. Must run after everything of the layer that reads either.
    """
    hd, ratio, idim, window = sizes.head_dim, sizes.ratio, sizes.index_dim, sizes.window
    n_slots = sizes.n_slots
    cw, icw = sizes.halves * hd, sizes.halves * idim

    @device_function
    def append(
        table, state, layer, slot, t, later, b, kv, k_in, k_column, s_in, s_column, ik_in,
        ik_column, is_in, is_column, ape, index_ape, thread, n_threads,
    ):  # fmt: skip
        if later < window:
            base = table[slot, layer, 0] + int64(t % window) * hd
            for i in range(thread, hd, n_threads):
                state[base + i] = kv[b, i]
        if ratio > 0 and later < n_slots:
            place = int64(t % (n_slots or 1))
            bias = (t % (ratio or 1)) * cw
            k_base = table[slot, layer, 2] + place * cw
            s_base = table[slot, layer, 3] + place * cw
            for i in range(thread, cw, n_threads):
                state[k_base + i] = k_in[b, k_column + i]
                state[s_base + i] = s_in[b, s_column + i] + ape[bias + i]
            if idim > 0:
                bias = (t % (ratio or 1)) * icw
                k_base = table[slot, layer, 5] + place * icw
                s_base = table[slot, layer, 6] + place * icw
                for i in range(thread, icw, n_threads):
                    state[k_base + i] = ik_in[b, ik_column + i]
                    state[s_base + i] = is_in[b, is_column + i] + index_ape[bias + i]

    return append
