"""Sparse attention of every (row, head): sliding window, compressed rows, sink.

The keys of a row stand in one logical order: window positions ascending, then compressed rows
ascending (all visible ones, or the indexer's choice). They are cut into splits of SPLIT_KEYS; each
split is computed alone with a running maximum, and `combine` adds the splits in order. Split and
order depend on the row's position alone, never on the bucket, so neither do the bits.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
from numba import float32, int64

from ds4.cuda.kernels.block import LOWEST, begin, exp, inverse_root, quantize_quad
from ds4.cuda.kernels.intrinsics import (
    address,
    bounded_kernel,
    cuda,
    device_function,
    div,
    fma,
    ld_f32x4,
)
from ds4.cuda.kernels.latent import LayerSizes, append_row
from ds4.cuda.kernels.reduce import warp_sum

__all__ = [
    "APPEND_BLOCKS",
    "HEADS_PER_BLOCK",
    "SPLIT_KEYS",
    "HeadSizes",
    "combine_kernel",
    "partial_kernel",
]

SPLIT_KEYS = 16
HEADS_PER_BLOCK = 4
APPEND_BLOCKS = 4
_GROUP = 4  # keys whose loads are in flight together
_PIECE = 32  # splits whose weights are in shared memory together


@attrs.frozen(kw_only=True)
class HeadSizes:
    """Constants of a rank's query heads.

    Attributes:
      layer: constants of the kind of layer.
      n_heads: heads of this rank.
      first_head: global index of its first head, for the sinks.
      top_k: compressed rows the indexer keeps; used with ratio 4.
    """

    layer: LayerSizes
    n_heads: int
    first_head: int
    top_k: int


@functools.cache
def _counts(window: int, ratio: int, top_k: int) -> Any:
    """Device function t -> (first window position, window keys, further keys)."""

    @device_function
    def counts(t):
        first = max(0, t - (window - 1))
        more = 0
        if ratio > 0:
            more = (t + 1) // (ratio or 1)
        if ratio == 4:
            more = min(more, top_k)
        return first, t - first + 1, more

    return counts


@functools.cache
def partial_kernel(sizes: HeadSizes) -> Any:
    """Kernel: one split of one row for up to HEADS_PER_BLOCK heads, a warp each.

    Rotates and norms its query first: q = rms(q_b output), tail rotated at t.

    Args: table, state, layer, slots, positions, firsts, cos, sin as in `latent`; q f32[B, *] from
    column 0; kv f32[B, head_dim], this step's rows; chosen i32[B, top_k]; out f32[B, splits, H,
    head_dim], the unnormalised sum of the split; stats f32[B, splits, H, 2], its maximum and its
    sum of exponentials.
    Grid: (splits, ceil(H / HEADS_PER_BLOCK), B) blocks of HEADS_PER_BLOCK warps; splits that the
    row does not reach end at once. No shared memory. Float32. Oracle: softmax in float64.
    """
    layer_sizes = sizes.layer
    hd, window, ratio = layer_sizes.head_dim, layer_sizes.window, layer_sizes.ratio
    n_quads = -(-hd // 128)
    n_values = 4 * n_quads
    tail = hd - layer_sizes.rope_dim
    n_heads, top_k = sizes.n_heads, sizes.top_k
    counts = _counts(window, ratio, top_k)
    angle = 1 if ratio else 0
    inverse, eps = float32(1.0 / hd), float32(layer_sizes.rms_eps)
    scale = float32(hd**-0.5)
    n_keys = _GROUP * n_values

    @bounded_kernel(32 * HEADS_PER_BLOCK, 4)
    def attend(
        table, state, layer, slots, positions, firsts, cosines, sines, q, kv, chosen, out, stats
    ):
        begin()
        split = cuda.blockIdx.x
        b = cuda.blockIdx.z
        slot = slots[b]
        if slot < 0:
            return
        t = positions[b]
        first, n_window, n_more = counts(t)
        n = n_window + n_more
        lane = cuda.threadIdx.x & 31
        head = cuda.blockIdx.y * HEADS_PER_BLOCK + (cuda.threadIdx.x >> 5)
        if split * SPLIT_KEYS >= n or head >= n_heads:
            return
        query = cuda.local.array(n_values, float32)
        square = float32(0)
        for i in range(n_quads):
            e = 4 * (lane + 32 * i)
            query[4 * i] = query[4 * i + 1] = query[4 * i + 2] = query[4 * i + 3] = float32(0)
            if e < hd:
                at = address(q, int64(b) * q.shape[1] + head * hd + e)
                query[4 * i], query[4 * i + 1], query[4 * i + 2], query[4 * i + 3] = ld_f32x4(at)
            for k in range(4):
                square = fma(query[4 * i + k], query[4 * i + k], square)
        root = inverse_root(warp_sum(square) * inverse + eps)
        for i in range(n_quads):
            e = 4 * (lane + 32 * i)
            for k in range(4):
                query[4 * i + k] = query[4 * i + k] * root
            if e >= tail and e < hd:
                for k in range(2):
                    c = cosines[b, angle, (e - tail) // 2 + k]
                    s = sines[b, angle, (e - tail) // 2 + k]
                    x, y = query[4 * i + 2 * k], query[4 * i + 2 * k + 1]
                    query[4 * i + 2 * k] = x * c - y * s
                    query[4 * i + 2 * k + 1] = x * s + y * c
        value = cuda.local.array(n_values, float32)
        for i in range(n_values):
            value[i] = float32(0)
        key = cuda.local.array(n_keys, float32)
        score = cuda.local.array(_GROUP, float32)
        top = LOWEST
        total = float32(0)
        ring = table[slot, layer, 0]
        rows = table[slot, layer, 1]
        segment = firsts[b]
        for group in range(SPLIT_KEYS // _GROUP):
            at = split * SPLIT_KEYS + group * _GROUP
            if at < n:
                for u in range(_GROUP):
                    index = min(at + u, n - 1)
                    if index < n_window:
                        p = first + index
                        r = b - (t - p)
                        if r >= segment:
                            base = address(kv, int64(r) * hd + 4 * lane)
                        else:
                            base = address(state, ring + int64(p % window) * hd + 4 * lane)
                    else:
                        j = index - n_window
                        if ratio == 4 and (t + 1) // 4 > top_k:
                            j = chosen[b, j]
                        base = address(state, rows + int64(j) * hd + 4 * lane)
                    for i in range(n_quads):
                        m = u * n_values + 4 * i
                        if 4 * (lane + 32 * i) < hd:
                            key[m], key[m + 1], key[m + 2], key[m + 3] = ld_f32x4(base + 512 * i)
                        else:
                            key[m] = key[m + 1] = key[m + 2] = key[m + 3] = float32(0)
                higher = top
                for u in range(_GROUP):
                    dot = float32(0)
                    for i in range(n_values):
                        dot = fma(query[i], key[u * n_values + i], dot)
                    score[u] = warp_sum(dot) * scale
                    if at + u < n:
                        higher = max(higher, score[u])
                shrink = exp(top - higher)
                top = higher
                total = total * shrink
                for i in range(n_values):
                    value[i] = value[i] * shrink
                for u in range(_GROUP):
                    weight = float32(0)
                    if at + u < n:
                        weight = exp(score[u] - top)
                    total = total + weight
                    for i in range(n_values):
                        value[i] = fma(weight, key[u * n_values + i], value[i])
        for i in range(n_quads):
            e = 4 * (lane + 32 * i)
            if e < hd:
                for k in range(4):
                    out[b, split, head, e + k] = value[4 * i + k]
        if lane == 0:
            stats[b, split, head, 0] = top
            stats[b, split, head, 1] = total

    return attend


@functools.cache
def combine_kernel(sizes: HeadSizes, *, rounds: bool = False) -> Any:
    """Kernel: join a row's splits and its sink, rotate the tail back; append the row to the state.

    With rounds also the byte form of out; head_dim must then be a multiple of 128.

    Args: table, state, layer, slots, positions as in `latent`; lasts i32[B]; cos, sin; parts and
    stats as `partial_kernel` wrote them; sinks f32[all heads]; out f32[B, H * head_dim]; kv and
    the compressors' inputs as `latent.append_row` takes them.
    Grid: (H + APPEND_BLOCKS, B) blocks of ceil(head_dim / 128) warps. Block h joins head h, a
    thread four elements; the last blocks append, which nothing else here reads. Shared: two
    numbers per split of a piece of 32. Float32. Oracle: softmax in float64, then rotation by -t.
    """
    layer_sizes = sizes.layer
    hd, ratio = layer_sizes.head_dim, layer_sizes.ratio
    tail = hd - layer_sizes.rope_dim
    first_head, n_heads = sizes.first_head, sizes.n_heads
    counts = _counts(layer_sizes.window, ratio, sizes.top_k)
    angle = 1 if ratio else 0
    append = append_row(layer_sizes)

    @cuda.jit
    def combine(
        table, state, layer, slots, positions, lasts, cosines, sines, parts, stats, sinks, out, kv,
        k_in, k_column, s_in, s_column, ik_in, ik_column, is_in, is_column, ape, index_ape, quants,
        scales,
    ):  # fmt: skip
        begin()
        head = cuda.blockIdx.x
        b = cuda.blockIdx.y
        thread = cuda.threadIdx.x
        slot = slots[b]
        if slot < 0:
            return
        if head >= n_heads:
            append(
                table, state, layer, slot, positions[b], lasts[b] - b, b, kv, k_in, k_column,
                s_in, s_column, ik_in, ik_column, is_in, is_column, ape, index_ape,
                (head - n_heads) * cuda.blockDim.x + thread, APPEND_BLOCKS * cuda.blockDim.x,
            )  # fmt: skip
            return
        tops = cuda.shared.array(_PIECE, float32)
        sums = cuda.shared.array(_PIECE, float32)
        _, n_window, n_more = counts(positions[b])
        n_splits = (n_window + n_more + SPLIT_KEYS - 1) // SPLIT_KEYS
        sink = sinks[first_head + head]
        top = sink
        for piece in range(0, n_splits, _PIECE):
            count = min(_PIECE, n_splits - piece)
            if thread < count:
                tops[thread] = stats[b, piece + thread, head, 0]
            cuda.syncthreads()
            for s in range(count):
                top = max(top, tops[s])
            cuda.syncthreads()
        total = exp(sink - top)
        e = min(4 * thread, hd - 4)
        v0 = v1 = v2 = v3 = float32(0)
        for piece in range(0, n_splits, _PIECE):
            count = min(_PIECE, n_splits - piece)
            if thread < _PIECE:
                tops[thread] = float32(0)
                sums[thread] = float32(0)
                if thread < count:
                    weight = exp(stats[b, piece + thread, head, 0] - top)
                    tops[thread] = weight
                    sums[thread] = weight * stats[b, piece + thread, head, 1]
            cuda.syncthreads()
            first = (int64(b) * parts.shape[1] + piece) * n_heads + head
            for s in range(0, count, 4):
                # Four loads in flight; those past the end repeat the last split with weight 0.
                last = count - 1
                a = address(parts, (first + min(s, last) * n_heads) * hd + e)
                a0, a1, a2, a3 = ld_f32x4(a)
                a = address(parts, (first + min(s + 1, last) * n_heads) * hd + e)
                b0, b1, b2, b3 = ld_f32x4(a)
                a = address(parts, (first + min(s + 2, last) * n_heads) * hd + e)
                c0, c1, c2, c3 = ld_f32x4(a)
                a = address(parts, (first + min(s + 3, last) * n_heads) * hd + e)
                d0, d1, d2, d3 = ld_f32x4(a)
                w0, w1, w2, w3 = tops[s], tops[s + 1], tops[s + 2], tops[s + 3]
                total = total + sums[s]
                total = total + sums[s + 1]
                total = total + sums[s + 2]
                total = total + sums[s + 3]
                v0 = fma(w3, d0, fma(w2, c0, fma(w1, b0, fma(w0, a0, v0))))
                v1 = fma(w3, d1, fma(w2, c1, fma(w1, b1, fma(w0, a1, v1))))
                v2 = fma(w3, d2, fma(w2, c2, fma(w1, b2, fma(w0, a2, v2))))
                v3 = fma(w3, d3, fma(w2, c3, fma(w1, b3, fma(w0, a3, v3))))
            cuda.syncthreads()
        if 4 * thread < hd:
            inverse = div(float32(1), total)
            v0, v1, v2, v3 = v0 * inverse, v1 * inverse, v2 * inverse, v3 * inverse
            if e >= tail:
                i = (e - tail) // 2
                c, s = cosines[b, angle, i], -sines[b, angle, i]
                v0, v1 = v0 * c - v1 * s, v0 * s + v1 * c
                c, s = cosines[b, angle, i + 1], -sines[b, angle, i + 1]
                v2, v3 = v2 * c - v3 * s, v2 * s + v3 * c
            at = head * hd + e
            out[b, at] = v0
            out[b, at + 1] = v1
            out[b, at + 2] = v2
            out[b, at + 3] = v3
            if rounds:
                quad = (int64(b) * n_heads * hd + at) >> 2
                quantize_quad(v0, v1, v2, v3, quad, quants, scales)

    return combine
