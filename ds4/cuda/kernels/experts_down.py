"""Second half of a mixture-of-experts block for a few rows: down, sums by shard, and their tree.

out[b] = tree over this rank's shards v of (routed_v + shared_v), where routed_v adds W2 h of the
chosen experts of shard v in the order of the router's list, and shared_v is the shared expert's
down projection of shard v's lanes.
The invariant: shard sums, and so every world's join, have the same bits on any number of ranks. An
expert's product is summed over the warp by itself, then added in list order to its shard's sum.

A lane's piece of a Q2_K row is 64 weights: 16 bytes of quants, which hold 16 weights of each of
four steps. The minima need only sums of 16 activations, which the first half made.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, int32, int64, uint32

from ds4.cuda.kernels.experts_up import ExpertShape
from ds4.cuda.kernels.intrinsics import (
    address,
    bit_and,
    bounded_kernel,
    cuda,
    device_function,
    dp4a,
    f16_to_f32,
    fma,
    grid_wait,
    i8_to_f32,
    ld_f32,
    ld_f32x4,
    ld_u16_stream,
    ld_u32_stream,
    ld_u32x4,
    ld_u32x4_stream,
    release_dependents,
    shfl_from,
    shfl_xor,
    shr,
    u32_to_i32,
    warp_fence,
)
from ds4.cuda.kernels.reduce import group_sum

__all__ = ["experts_down_kernel"]

_PIECE_WEIGHTS = 64
_TWO_BITS = 0x03030303


@functools.cache
def _q2_k_piece(f: int, *, exact: bool) -> tuple[Any, Any]:
    """Device functions (load, dot) of a lane's piece of 64 weights of a Q2_K row of f.

    load(quants, steps, scales, row, piece, w, at): six registers into w[at : at + 6].
    dot(w, at, x..., acc) -> acc plus the piece's products, with
      fast: dot(w, at, h, hs, hm, pair, piece, acc), the first half's rounded forms;
      exact: the same call, h f32[pairs, f] contiguous.

    Numerics: fast: int32 dots of 16; acc + (d (sum of step dot x scale) - dmin (sum of min hm)).
    Exact: per 16 weights a chain of q x and one of x; both are scaled and added by fma.
    """
    quarter = f // 16

    @device_function
    def load(quants, steps, scales, row, piece, w, at):
        w0, w1, w2, w3 = ld_u32x4_stream(address(quants, int64(row) * (f // 16) + 4 * piece))
        w[at], w[at + 1], w[at + 2], w[at + 3] = w0, w1, w2, w3
        w[at + 4] = ld_u32_stream(address(steps, int64(row) * (f // 64) + piece))
        w[at + 5] = ld_u32_stream(address(scales, int64(row) * (f // 256) + (piece >> 2)))

    @device_function
    def two_bits(word, j):
        """Four quants of step j, one per byte."""
        return bit_and(shr(word, uint32(2 * j)), uint32(_TWO_BITS))

    @device_function
    def nibble(word, shift):
        return u32_to_i32(bit_and(shr(word, uint32(shift)), uint32(15)))

    @device_function
    def four(word, x0, x1, x2, x3, dot, total):
        dot = fma(i8_to_f32(word, int32(0)), x0, dot)
        dot = fma(i8_to_f32(word, int32(1)), x1, dot)
        dot = fma(i8_to_f32(word, int32(2)), x2, dot)
        dot = fma(i8_to_f32(word, int32(3)), x3, dot)
        return dot, (((total + x0) + x1) + x2) + x3

    @device_function
    def dot(w, at, h, hs, hm, pair, piece, acc):
        steps = w[at + 4]
        d = f16_to_f32(w[at + 5])
        d_min = f16_to_f32(shr(w[at + 5], uint32(16)))
        if exact:
            first = (piece >> 2) * 256 + ((piece >> 1) & 1) * 128 + (piece & 1) * 16
            for j in range(4):
                step = float32(nibble(steps, 8 * j))
                minimum = float32(nibble(steps, 8 * j + 4))
                chain, total = float32(0), float32(0)
                for i in range(4):
                    word = two_bits(w[at + i], j)
                    x0, x1, x2, x3 = ld_f32x4(address(h, int64(pair) * f + first + 32 * j + 4 * i))
                    chain, total = four(word, x0, x1, x2, x3, chain, total)
                acc = fma(chain, d * step, acc)
                acc = fma(total, -(d_min * minimum), acc)
            return acc
        words = address(h, int64(pair) * (f // 4) + 4 * piece)
        s0, s1, s2, s3 = ld_f32x4(address(hs, int64(pair) * (f // 32) + 4 * (piece >> 1)))
        m0, m1, m2, m3 = ld_f32x4(address(hm, int64(pair) * (f // 16) + 4 * piece))
        total = float32(0)
        minima = float32(0)
        for j in range(4):
            x0, x1, x2, x3 = ld_u32x4(words + 4 * quarter * j)
            part = dp4a(two_bits(w[at], j), x0, int32(0))
            part = dp4a(two_bits(w[at + 1], j), x1, part)
            part = dp4a(two_bits(w[at + 2], j), x2, part)
            part = dp4a(two_bits(w[at + 3], j), x3, part)
            step = nibble(steps, 8 * j)
            minimum = float32(nibble(steps, 8 * j + 4))
            scale = s0 if j == 0 else s1 if j == 1 else s2 if j == 2 else s3
            x_sum = m0 if j == 0 else m1 if j == 1 else m2 if j == 2 else m3
            total = fma(float32(int32(part * step)), scale, total)
            minima = fma(minimum, x_sum, minima)
        return fma(d, total, fma(-d_min, minima, acc))

    return load, dot


@functools.cache
def experts_down_kernel(shape: ExpertShape, warps: int, *, exact: bool) -> Any:
    """Kernel of the module's first paragraph.

    The kernel takes:
      ids i32[B K], slots i32[E]: as in `experts_up_kernel`; shard_of i32[E]: an expert's shard.
      quants, steps, scales: Q2_K planes of the stacked experts, [slots * D, F].
      sd, sdd: Q8_0 planes of the shared expert's columns on this rank, [D, d_shared].
      h, hs, hm, sh, ss: as the first half wrote them.
      out f32[B, D].

    Grid: (ceil(D / warps), B) blocks of `warps` warps; a warp makes one output. No shared memory.
    Accumulates in float32. Oracle: `ds4.model.deepseek4.reference` and `reduce.tree_reference`.
    """
    n_used, d_model, f, d_shared = shape.n_used, shape.d_model, shape.d_expert, shape.d_shared
    n_shards, first_shard = shape.n_shards, shape.first_shard
    load, dot = _q2_k_piece(f, exact=exact)
    gather = group_sum(8)
    n_tree = n_shards.bit_length() - 1
    pieces = f // _PIECE_WEIGHTS
    chunks = -(-pieces // 32)
    full = pieces % 32 == 0
    at_once = 6
    n_w = 6 * at_once
    shard_pieces = d_shared // n_shards // 16
    half_steps = -(-shard_pieces // 16)
    half_full = shard_pieces % 16 == 0
    n_pairs = -(-n_shards // 2)
    n_sw, n_sd = 4 * n_pairs * half_steps, n_pairs * half_steps

    @device_function
    def fetch(i, slot, row, c, lane, quants, steps, scales, w):
        """Load the row of a chosen expert, if it is here, into place i of w."""
        piece = 32 * c + lane
        if slot >= 0 and (full or piece < pieces):
            load(quants, steps, scales, int64(slot) * d_model + row, piece, w, 6 * i)

    @device_function
    def multiply(i, slot, pair, c, lane, w, h, hs, hm, parts):
        piece = 32 * c + lane
        if slot >= 0 and (full or piece < pieces):
            parts[i] = dot(w, 6 * i, h, hs, hm, pair, piece, parts[i])

    @device_function
    def several(k, my_slot, b, row, c, lane, quants, steps, scales, w, h, hs, hm, parts):
        """The chosen experts k to k + 5, into six lane partial sums: all loads first."""
        s0, s1 = shfl_from(my_slot, k), shfl_from(my_slot, k + 1)
        s2, s3 = shfl_from(my_slot, k + 2), shfl_from(my_slot, k + 3)
        s4, s5 = shfl_from(my_slot, k + 4), shfl_from(my_slot, k + 5)
        fetch(0, s0, row, c, lane, quants, steps, scales, w)
        fetch(1, s1, row, c, lane, quants, steps, scales, w)
        fetch(2, s2, row, c, lane, quants, steps, scales, w)
        fetch(3, s3, row, c, lane, quants, steps, scales, w)
        fetch(4, s4, row, c, lane, quants, steps, scales, w)
        fetch(5, s5, row, c, lane, quants, steps, scales, w)
        warp_fence()
        pair = b * n_used + k
        multiply(0, s0, pair, c, lane, w, h, hs, hm, parts)
        multiply(1, s1, pair + 1, c, lane, w, h, hs, hm, parts)
        multiply(2, s2, pair + 2, c, lane, w, h, hs, hm, parts)
        multiply(3, s3, pair + 3, c, lane, w, h, hs, hm, parts)
        multiply(4, s4, pair + 4, c, lane, w, h, hs, hm, parts)
        multiply(5, s5, pair + 5, c, lane, w, h, hs, hm, parts)

    @device_function
    def shared_piece(j, offset, b, sh, ss, sw, sd_bits, total):
        """Products of one 16-weight piece of the shared expert's row."""
        column = 16 * offset
        if exact:
            chain = float32(0)
            for i in range(4):
                x0, x1, x2, x3 = ld_f32x4(address(sh, int64(b) * d_shared + column + 4 * i))
                chain = fma(i8_to_f32(sw[4 * j + i], int32(0)), x0, chain)
                chain = fma(i8_to_f32(sw[4 * j + i], int32(1)), x1, chain)
                chain = fma(i8_to_f32(sw[4 * j + i], int32(2)), x2, chain)
                chain = fma(i8_to_f32(sw[4 * j + i], int32(3)), x3, chain)
            return fma(chain, f16_to_f32(sd_bits[j]), total)
        x0, x1, x2, x3 = ld_u32x4(address(sh, int64(b) * (d_shared // 4) + 4 * offset))
        scale = ld_f32(address(ss, int64(b) * (d_shared // 32) + (offset >> 1)))
        part = dp4a(sw[4 * j], x0, int32(0))
        part = dp4a(sw[4 * j + 1], x1, part)
        part = dp4a(sw[4 * j + 2], x2, part)
        part = dp4a(sw[4 * j + 3], x3, part)
        return fma(float32(part), f16_to_f32(sd_bits[j]) * scale, total)

    @bounded_kernel(32 * warps, max(1, 24 // warps))
    def experts_down(
        ids, slots, shard_of, quants, steps, scales, sd, sdd, h, hs, hm, sh, ss, out
    ):  # fmt: skip
        release_dependents()
        lane = cuda.threadIdx.x & 31
        row = cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5)
        b = cuda.blockIdx.y
        if row < d_model:
            # The shared expert first: its addresses do not wait for the router.
            half, half_lane = lane >> 4, lane & 15
            sw = cuda.local.array(n_sw, uint32)
            sd_bits = cuda.local.array(n_sd, uint32)
            for u in range(n_pairs):
                for c in range(half_steps):
                    j = u * half_steps + c
                    in_shard = half_lane + 16 * c
                    offset = (2 * u + half) * shard_pieces + in_shard
                    if (half_full or in_shard < shard_pieces) and 2 * u + half < n_shards:
                        items = int64(row) * (d_shared // 4) + 4 * offset
                        w0, w1, w2, w3 = ld_u32x4_stream(address(sd, items))
                        sw[4 * j], sw[4 * j + 1], sw[4 * j + 2], sw[4 * j + 3] = w0, w1, w2, w3
                        sd_bits[j] = ld_u16_stream(
                            address(sdd, int64(row) * (d_shared // 32) + (offset >> 1))
                        )
            grid_wait()
            parts = cuda.local.array(8, float32)
            w = cuda.local.array(n_w, uint32)
            # Lane k looks up the k-th chosen expert; lanes past the last one find none.
            my_slot, my_shard = int32(-1), int32(0)
            if lane < n_used:
                expert = ids[b * n_used + lane]
                my_slot = int32(slots[expert])
                my_shard = int32(shard_of[expert] - first_shard)
            # Lanes 4 v to 4 v + 3 add up shard v; with fewer shards, so do those above them.
            mine = (lane >> 2) & (n_shards - 1)
            routed = float32(0)
            for k in range(0, n_used, at_once):
                for i in range(8):
                    parts[i] = float32(0)
                for c in range(chunks):
                    several(k, my_slot, b, row, c, lane, quants, steps, scales, w, h, hs, hm, parts)
                total = gather(parts, 0, lane)
                for i in range(at_once):
                    here = shfl_from(my_slot, k + i) >= 0
                    shard = shfl_from(my_shard, k + i)
                    more = routed + shfl_from(total, 4 * i)
                    routed = more if here and shard == mine else routed
            extra = cuda.local.array(n_shards, float32)
            for u in range(n_pairs):
                total = float32(0)
                for c in range(half_steps):
                    j = u * half_steps + c
                    in_shard = half_lane + 16 * c
                    offset = (2 * u + half) * shard_pieces + in_shard
                    if (half_full or in_shard < shard_pieces) and 2 * u + half < n_shards:
                        total = shared_piece(j, offset, b, sh, ss, sw, sd_bits, total)
                total = total + shfl_xor(total, 8)
                total = total + shfl_xor(total, 4)
                total = total + shfl_xor(total, 2)
                total = total + shfl_xor(total, 1)
                other = shfl_xor(total, 16)
                extra[2 * u] = total if half == 0 else other
                if 2 * u + 1 < n_shards:
                    extra[2 * u + 1] = other if half == 0 else total
            result = routed + extra[0]
            for v in range(1, n_shards):
                result = routed + extra[v] if mine == v else result
            for bit in range(n_tree):
                result = result + shfl_xor(result, 4 << bit)
            if lane == 0:
                out[b, row] = result

    return experts_down
