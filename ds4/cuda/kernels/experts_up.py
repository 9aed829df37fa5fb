"""First half of a mixture-of-experts block for a few rows: gate, up, clamp, SwiGLU, rounding.

h = weight * silu(min(W1 x, c)) * clamp(W3 x, -c, c) for every chosen routed expert that this rank
holds (IQ2_XXS), and the same with weight 1 for this rank's lanes of the shared expert (Q8_0).
The invariant: an h depends on its expert row, its x and its router weight only. What the second
half reads is described in `experts_down.py`; the router, and who holds an expert, are the caller's.

A block makes one tile of 32 consecutive h of one (batch row, chosen expert) pair, or of the shared
expert for all batch rows; 32 is a rounding block of the activations, so the tile's owner rounds it.
Tiles of experts that live elsewhere end at once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import attrs
import numpy as np
from numba import float32, int32, int64, uint32

from ds4.cuda.kernels.intrinsics import (
    address,
    bounded_kernel,
    cuda,
    device_function,
    div,
    grid_wait,
    ld_f32x4,
    release_dependents,
    shared_address,
    shared_offset,
    shfl_xor,
    st_shared_u32x4,
    u32_to_i32,
    warp_fence,
)
from ds4.cuda.kernels.iq2_xxs import (
    PIECE_WEIGHTS,
    PIECE_WORDS,
    iq2_xxs_piece,
)
from ds4.cuda.kernels.quantize import signed_byte
from ds4.cuda.kernels.reduce import group_sum, warp_sum
from ds4.cuda.kernels.rows import RowPlan, q8_0_rows

__all__ = ["TILE", "ExpertShape", "experts_up_kernel", "piece_order"]

TILE = 32
_LEVELS = np.float32(127.0)


@attrs.frozen
class ExpertShape:
    """What a rank computes of one expert block.

    Attributes:
      batch: rows B.
      n_used: chosen experts K of a row.
      d_model: D, a multiple of 256.
      d_expert: width F of a routed expert, a multiple of 256.
      d_shared: lanes of the shared expert on this rank, a multiple of 32.
      clamp: c above.
      first_shard: first shard of this rank, and
      n_shards: how many it has.
    """

    batch: int
    n_used: int
    d_model: int
    d_expert: int
    d_shared: int
    clamp: float
    first_shard: int = 0
    n_shards: int = 8


def piece_order(f: int) -> Any:
    """Word position of each 4-byte word of a rounded h row, i64[f / 4].

    A piece of the second half is 64 weights of Q2_K: 16 bytes from each of four blocks of 32. So h
    is stored with the four 16-byte parts of all pieces apart, part j of piece p at word
    `j f / 16 + 4 p`; piece 4 blk + 2 n + h has elements 256 blk + 128 n + 32 j + 16 h + (0..15).
    """
    element = np.arange(0, f, 4)
    block, half, part = element // 256, element // 128 % 2, element // 32 % 4
    piece = 4 * block + 2 * half + element // 16 % 2
    return part * (f // 16) + 4 * piece + element % 16 // 4


@device_function
def _swiglu(gate, up, weight, clamp):
    """One h."""
    gate = min(gate, clamp)
    up = max(min(up, clamp), -clamp)
    return weight * (div(gate, float32(1) + math.exp(-gate)) * up)


@device_function
def _round_tile(value, lane):
    """Round a warp's 32 values: (word of 4 bytes in each fourth lane, scale, byte sum of 16)."""
    amax = abs(value)
    amax = max(amax, shfl_xor(amax, 16))
    amax = max(amax, shfl_xor(amax, 8))
    amax = max(amax, shfl_xor(amax, 4))
    amax = max(amax, shfl_xor(amax, 2))
    amax = max(amax, shfl_xor(amax, 1))
    inverse = float32(0)
    if amax > float32(0):
        inverse = div(_LEVELS, amax)
    byte = signed_byte(value, inverse)
    # Numba widens 32-bit operations to 64 bits; the casts keep exchanges to one register.
    total = int32(u32_to_i32(uint32(byte << uint32(24))) >> int32(24))
    total = int32(total + shfl_xor(total, 1))
    total = int32(total + shfl_xor(total, 2))
    total = int32(total + shfl_xor(total, 4))
    total = int32(total + shfl_xor(total, 8))
    word = uint32(byte << uint32(8 * (lane & 3)))
    word = uint32(word | shfl_xor(word, 1))
    word = uint32(word | shfl_xor(word, 2))
    return word, div(amax, _LEVELS), total


@functools.cache
def experts_up_kernel(
    shape: ExpertShape, warps: int, *, exact: bool, blocks_per_sm: int = 2
) -> Any:
    """Kernel of the module's first paragraph.

    The kernel takes:
      ids i32[B K], weights f32[B K]: chosen experts and their router weights.
      slots i32[E]: where an expert's rows start in the stacks, in experts; negative if elsewhere.
      gate_* and up_*: IQ2_XXS planes of the stacked experts, [slots * F, D].
      sg_* and su_*: Q8_0 planes of the shared expert's lanes, [d_shared, D].
      selectors u32[258]: `layout.iq2_xxs_selectors`.
      x, xs: u32[B D / 4] and f32[B D / 32], or f32[B, D] twice when exact.
      h, hs, hm: routed, row p = b K + k. Fast: u32[B K F / 4] in `piece_order`, f32[B K F / 32]
        scales, f32[B K F / 16] scale times byte sum of 16, in step order; exact: h f32[B K, F].
      sh, ss: shared. Fast: u32[B d_shared / 4], f32[B d_shared / 32]; exact: f32[B, d_shared].

    Grid: d_shared / 32 + B K F / 32 blocks of `warps` warps, shared tiles first; a warp owns
    32 / warps of a tile's h; 8, 16 or 32 warps are fast. Static shared memory: the codebook
    (32 KiB, exact 16), the tile, and a row of x in padded pieces (4.2 KiB at D = 4096, exact 16.5).
    Accumulates in float32. Oracle: `ds4.model.deepseek4.reference`.
    """
    n_batch, n_used = shape.batch, shape.n_used
    k, f, d_shared = shape.d_model, shape.d_expert, shape.d_shared
    clamp = np.float32(shape.clamp)
    load, dot = iq2_xxs_piece(k, exact=exact)
    gather = group_sum(8)
    shared_rows = q8_0_rows(
        RowPlan(n_batch, k, 1, 8 if n_batch == 1 else 4 if n_batch < 8 else 2), exact=exact
    )
    threads = 32 * warps
    per_warp = TILE // warps
    pieces = k // PIECE_WEIGHTS
    chunks = -(-pieces // 32)
    full = pieces % 32 == 0
    shared_tiles, pair_tiles = d_shared // TILE, f // TILE
    n_tile = n_batch * TILE
    # Odd, so that lanes reading the same word of their pieces are in different banks.
    stride = 129 if exact else 33
    x_type = float32 if exact else uint32
    n_x = pieces * stride
    n_w = 2 * per_warp * PIECE_WORDS
    n_acc = 2 * per_warp
    copies = 16 if exact else 32
    codebook_words = 256 * copies
    written_out = per_warp <= 4

    @device_function
    def fetch(u, row, piece, w, gi, gn, gt, gc, ui, un, ut, uc):
        load(gi, gn, gt, gc, row + u, piece, w, 2 * PIECE_WORDS * u)
        load(ui, un, ut, uc, row + u, piece, w, 2 * PIECE_WORDS * u + PIECE_WORDS)

    @device_function
    def multiply(u, w, xw, xs, x, x_at, table, plus, minus, acc):
        at = 2 * PIECE_WORDS * u
        acc[u] = dot(w, at, xw, xs, x, x_at, table, plus, minus, acc[u])
        at = at + PIECE_WORDS
        i = per_warp + u
        acc[i] = dot(w, at, xw, xs, x, x_at, table, plus, minus, acc[i])

    @bounded_kernel(threads, 1 if exact else blocks_per_sm)
    def experts_up(
        ids, weights, slots, gi, gn, gt, gc, ui, un, ut, uc, sg, sgd, su, sud, selectors,
        x, xs, h, hs, hm, sh, ss,
    ):  # fmt: skip
        release_dependents()
        codebook = cuda.shared.array(codebook_words, uint32)
        tile = cuda.shared.array(n_tile, float32)
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        block = cuda.blockIdx.x
        if block < shared_tiles:
            first = block * TILE
            gate_acc = cuda.local.array(n_batch, float32)
            up_acc = cuda.local.array(n_batch, float32)
            for i in range(per_warp):
                row = first + warp * per_warp + i
                shared_rows(sg, sgd, row, row, 0, k // 16, lane, x, xs, k, 0, gate_acc)
                shared_rows(su, sud, row, row, 0, k // 16, lane, x, xs, k, 0, up_acc)
                for b in range(n_batch):
                    gate, up = warp_sum(gate_acc[b]), warp_sum(up_acc[b])
                    value = _swiglu(gate, up, float32(1), clamp)
                    if lane == 0:
                        tile[b * TILE + warp * per_warp + i] = value
            cuda.syncthreads()
            for b in range(warp, n_batch, warps):
                value = tile[b * TILE + lane]
                if exact:
                    sh[b, first + lane] = value
                else:
                    word, scale, _total = _round_tile(value, lane)
                    if lane & 3 == 0:
                        sh[b * (d_shared // 4) + ((first + lane) >> 2)] = word
                    if lane == 0:
                        ss[b * (d_shared // 32) + (first >> 5)] = scale
        else:
            pair = (block - shared_tiles) // pair_tiles
            first = ((block - shared_tiles) % pair_tiles) * TILE
            x_shared = cuda.shared.array(n_x, x_type)
            # Each store starts at another bank for each of eight neighbouring lanes.
            book = shared_address(codebook, 0)
            for entry in range(thread, 256, threads):
                word = selectors[entry]
                for j in range(copies // 4):
                    item = entry * copies + 4 * ((j + entry) & (copies // 4 - 1))
                    st_shared_u32x4(shared_offset(book, 4 * item), word, word, word, word)
            plus, minus = selectors[256], selectors[257]
            grid_wait()
            slot = slots[ids[pair]]
            b = pair // n_used
            if slot >= 0:
                if exact:
                    for i in range(thread, k, threads):
                        x_shared[(i >> 7) * stride + (i & 127)] = x[b, i]
                else:
                    for i in range(thread, k // 4, threads):
                        x_shared[(i >> 5) * stride + (i & 31)] = x[b * (k // 4) + i]
                row = int64(slot) * f + first + warp * per_warp
                w = cuda.local.array(n_w, uint32)
                acc = cuda.local.array(n_acc, float32)
                xw = cuda.local.array(32, uint32)
                x_scale = cuda.local.array(4, float32)
                for i in range(n_acc):
                    acc[i] = float32(0)
                table = shared_address(codebook, lane & (copies - 1))
                for c in range(chunks):
                    piece = 32 * c + lane
                    inside = full or piece < pieces
                    if inside:
                        fetch(0, row, piece, w, gi, gn, gt, gc, ui, un, ut, uc)
                        if per_warp > 1:
                            fetch(1, row, piece, w, gi, gn, gt, gc, ui, un, ut, uc)
                    if c == 0:
                        cuda.syncthreads()
                    else:
                        warp_fence()
                    at = piece * stride
                    if inside and not exact:
                        for i in range(32):
                            xw[i] = x_shared[at + i]
                        s0, s1, s2, s3 = ld_f32x4(address(xs, b * (k // 32) + piece * 4))
                        x_scale[0], x_scale[1], x_scale[2], x_scale[3] = s0, s1, s2, s3
                    if inside:
                        multiply(0, w, xw, x_scale, x_shared, at, table, plus, minus, acc)
                        if per_warp > 2:
                            fetch(2, row, piece, w, gi, gn, gt, gc, ui, un, ut, uc)
                    warp_fence()
                    if inside and per_warp > 1:
                        multiply(1, w, xw, x_scale, x_shared, at, table, plus, minus, acc)
                        if per_warp > 2:
                            fetch(3, row, piece, w, gi, gn, gt, gc, ui, un, ut, uc)
                    warp_fence()
                    if inside and per_warp > 2:
                        multiply(2, w, xw, x_scale, x_shared, at, table, plus, minus, acc)
                        multiply(3, w, xw, x_scale, x_shared, at, table, plus, minus, acc)
                    if inside and not written_out:
                        for u in range(4, per_warp):
                            fetch(u, row, piece, w, gi, gn, gt, gc, ui, un, ut, uc)
                            multiply(u, w, xw, x_scale, x_shared, at, table, plus, minus, acc)
                weight = weights[pair]
                if per_warp == 4:
                    # Lanes 4 u to 4 u + 3 hold gate u, those 16 above them up u.
                    gate = gather(acc, 0, lane)
                    up = shfl_xor(gate, 16)
                    if lane < 16 and lane & 3 == 0:
                        tile[warp * 4 + (lane >> 2)] = _swiglu(gate, up, weight, clamp)
                else:
                    for u in range(per_warp):
                        gate, up = warp_sum(acc[u]), warp_sum(acc[per_warp + u])
                        value = _swiglu(gate, up, weight, clamp)
                        if lane == 0:
                            tile[warp * per_warp + u] = value
                cuda.syncthreads()
                if warp == 0:
                    value = tile[lane]
                    if exact:
                        h[pair, first + lane] = value
                    else:
                        word, scale, total = _round_tile(value, lane)
                        block_256, half, part = first >> 8, (first >> 7) & 1, (first >> 5) & 3
                        base = int64(pair) * (f // 4)
                        if lane & 3 == 0:
                            at = part * (f // 16) + 4 * (4 * block_256 + 2 * half) + (lane >> 2)
                            h[base + at] = word
                        if lane == 0:
                            hs[int64(pair) * (f // 32) + (first >> 5)] = scale
                        if lane & 15 == 0:
                            at = block_256 * 16 + half * 8 + (lane >> 4) * 4 + part
                            hm[int64(pair) * (f // 16) + at] = float32(total) * scale

    return experts_up
