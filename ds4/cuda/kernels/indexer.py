"""The indexer: scores of all visible compressed rows, and the exact top-k of them.

Both kernels do nothing for a row that sees at most top_k compressed rows, since then all of them
are attended; that is decided on the device, from the row's position.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, int32, int64, uint32

from ds4.cuda.kernels.block import begin
from ds4.cuda.kernels.intrinsics import (
    address,
    bounded_kernel,
    cuda,
    device_function,
    f32_bits,
    fma,
    ld_f32x4,
)

__all__ = ["KEYS_PER_BLOCK", "SELECT_THREADS", "scores_kernel", "select_kernel"]

KEYS_PER_BLOCK = 32
SELECT_THREADS = 1024
_WARPS = 4
_HEADS_AT_ONCE = 8
_LOADS = 4  # 16-byte loads in flight
_BINS = 256
_TWICE_BINS = 2 * _BINS
_ABOVE = 1 << 32  # counts of two kinds in one 64-bit number


@functools.cache
def scores_kernel(n_heads: int, width: int, rope_dim: int, top_k: int) -> Any:
    """Kernel: scores[b, j] = sum_h weight[b, h] * relu(q[b, h] . key j) for visible j.

    q is rotated here, at the row's position; q_column and q's width are multiples of 4. A lane
    computes one key, a warp every fourth part of the heads in order; the four parts are added in
    order of the warps.

    Args: table, state, layer as in `latent`; slots, positions i32[B]; cos, sin; q f32[B, *] from
    column q_column, n_heads * width wide; weights f32[B, *] from column w_column; scale of the
    weights; scores f32[B, stride].
    Grid: (ceil(stride / KEYS_PER_BLOCK), B) blocks of 4 warps. Shared: the queries and 4 partial
    sums per key. Float32. Oracle: `ds4.cpu.kernels.attention.index_scores`.
    """
    tail = width - rope_dim
    per_warp = -(-n_heads // _WARPS)
    n_passes = -(-per_warp // _HEADS_AT_ONCE)
    heads_at_once = min(_HEADS_AT_ONCE, per_warp)
    n_query, n_sums = n_heads * width, _WARPS * KEYS_PER_BLOCK
    n_quads, n_threads, n_loaded = n_query // 4, 32 * _WARPS, 4 * _LOADS
    chunk = 16 if width % 16 == 0 else 4

    @cuda.jit
    def index_scores(
        table, state, layer, slots, positions, cosines, sines, q, q_column, weights, w_column,
        scale, scores,
    ):  # fmt: skip
        begin()
        b = cuda.blockIdx.y
        slot = slots[b]
        if slot < 0:
            return
        visible = (positions[b] + 1) // 4
        first_key = cuda.blockIdx.x * KEYS_PER_BLOCK
        if visible <= top_k or first_key >= visible:
            return
        thread = cuda.threadIdx.x
        queries = cuda.shared.array(n_query, float32)
        sums = cuda.shared.array(n_sums, float32)
        for base in range(thread, n_quads, _LOADS * n_threads):
            v = cuda.local.array(n_loaded, float32)
            for u in range(_LOADS):
                quad = min(base + u * n_threads, n_quads - 1)
                at = address(q, int64(b) * q.shape[1] + q_column + 4 * quad)
                v[4 * u], v[4 * u + 1], v[4 * u + 2], v[4 * u + 3] = ld_f32x4(at)
            for u in range(_LOADS):
                quad = base + u * n_threads
                within = 4 * quad % width
                if quad < n_quads:
                    if within >= tail:
                        for half in range(2):
                            i = (within - tail) // 2 + half
                            c, s = cosines[b, 1, i], sines[b, 1, i]
                            x, y = v[4 * u + 2 * half], v[4 * u + 2 * half + 1]
                            v[4 * u + 2 * half] = x * c - y * s
                            v[4 * u + 2 * half + 1] = x * s + y * c
                    for k in range(4):
                        queries[4 * quad + k] = v[4 * u + k]
        cuda.syncthreads()
        lane = thread & 31
        warp = thread >> 5
        key = first_key + lane
        total = float32(0)
        if key < visible:
            base = table[slot, layer, 4] + int64(key) * width
            for n in range(n_passes):
                first_head = warp * per_warp + n * heads_at_once
                acc = cuda.local.array(heads_at_once, float32)
                for h in range(heads_at_once):
                    acc[h] = float32(0)
                k = cuda.local.array(chunk, float32)
                for d in range(0, width, chunk):
                    for m in range(0, chunk, 4):
                        at = address(state, base + d + m)
                        k[m], k[m + 1], k[m + 2], k[m + 3] = ld_f32x4(at)
                    for h in range(heads_at_once):
                        at = min(first_head + h, n_heads - 1) * width + d
                        for m in range(chunk):
                            acc[h] = fma(queries[at + m], k[m], acc[h])
                for h in range(heads_at_once):
                    head = first_head + h
                    if head < n_heads and n * heads_at_once + h < per_warp and acc[h] > float32(0):
                        total = fma(weights[b, w_column + head] * scale, acc[h], total)
        sums[warp * KEYS_PER_BLOCK + lane] = total
        cuda.syncthreads()
        if warp == 0 and key < visible:
            value = sums[lane]
            for w in range(1, _WARPS):
                value = value + sums[w * KEYS_PER_BLOCK + lane]
            scores[b, key] = value

    return index_scores


@device_function
def _sortable(value):
    """Bits of a float as an unsigned integer of the same order; -0.0 counts as +0.0."""
    bits = f32_bits(value + float32(0))
    if bits & uint32(0x80000000):
        return uint32(~bits)
    return uint32(bits | uint32(0x80000000))


@functools.cache
def select_kernel(top_k: int, n_threads: int = SELECT_THREADS) -> Any:
    """Kernel (slots, positions, scores f32[B, stride], chosen i32[B, top_k]): the exact top_k.

    chosen[b] are the indices of the top_k largest of the visible scores, ascending; ties go to the
    lower index. Not written where visible <= top_k.

    Grid: B blocks of n_threads, a power of two. A radix selection finds the top_k-th largest value
    byte by byte (integer counts, so no order of addition matters), then one pass in index order
    collects. Shared: 512 counters, and two 64-bit numbers per thread. Oracle:
    `ds4.cpu.kernels.attention.index_select`.
    """
    n_levels, twice = n_threads.bit_length() - 1, 2 * n_threads

    # At 1024 threads a thread may have 64 registers, or the kernel cannot be launched.
    @bounded_kernel(n_threads, 1)
    def select(slots, positions, scores, chosen):
        begin()
        b = cuda.blockIdx.x
        if slots[b] < 0:
            return
        visible = (positions[b] + 1) // 4
        if visible <= top_k:
            return
        thread = cuda.threadIdx.x
        counts = cuda.shared.array(_TWICE_BINS, int32)
        found = cuda.shared.array(2, uint32)
        picks = cuda.shared.array(twice, int64)
        if thread == 0:
            found[0] = uint32(0)
            found[1] = uint32(top_k)
        for step in range(4):
            shift = uint32(24 - 8 * step)
            for i in range(thread, _BINS, n_threads):
                counts[i] = 0
            cuda.syncthreads()
            prefix = found[0]
            wanted = int32(found[1])
            for j in range(thread, visible, n_threads):
                key = _sortable(scores[b, j])
                if step == 0 or (key >> (shift + uint32(8))) == (prefix >> (shift + uint32(8))):
                    cuda.atomic.add(counts, int32((key >> shift) & uint32(255)), 1)
            cuda.syncthreads()
            # Sums from each bin upwards: the reach doubles from one half of the array to the other.
            source = 0
            for level in range(8):
                for i in range(thread, _BINS, n_threads):
                    value = counts[source + i]
                    if i + (1 << level) < _BINS:
                        value += counts[source + i + (1 << level)]
                    counts[_BINS - source + i] = value
                source = _BINS - source
                cuda.syncthreads()
            for i in range(thread, _BINS, n_threads):
                higher = int32(0)
                if i + 1 < _BINS:
                    higher = counts[source + i + 1]
                if higher < wanted and counts[source + i] >= wanted:
                    found[0] = prefix | (uint32(i) << shift)
                    found[1] = uint32(wanted - higher)
            cuda.syncthreads()
        threshold = found[0]
        wanted_ties = int64(found[1])
        # A thread owns adjacent indices, so counts before it place its own picks in order.
        share = (visible + n_threads - 1) // n_threads
        low = min(thread * share, visible)
        high = min(low + share, visible)
        mine = int64(0)
        for j in range(low, high):
            key = _sortable(scores[b, j])
            if key > threshold:
                mine += _ABOVE
            elif key == threshold:
                mine += 1
        picks[thread] = mine
        cuda.syncthreads()
        # Counts of this thread and all before it: those above the threshold in the upper half.
        source = 0
        for level in range(n_levels):
            value = picks[source + thread]
            if thread >= (1 << level):
                value += picks[source + thread - (1 << level)]
            picks[n_threads - source + thread] = value
            source = n_threads - source
            cuda.syncthreads()
        before = picks[source + thread] - mine
        ties_before = before & (_ABOVE - 1)
        at = (before >> 32) + min(ties_before, wanted_ties)
        for j in range(low, high):
            key = _sortable(scores[b, j])
            take = key > threshold
            if key == threshold:
                take = ties_before < wanted_ties
                ties_before += 1
            if take:
                chosen[b, at] = j
                at += 1

    return select
