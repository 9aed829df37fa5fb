"""Hyper-connections: four residual streams, mixed before and after every sublayer.

`mix` applies the post step of the sublayer before and takes the control projection of the result
in the same pass over the streams; `collapse` turns the projection into the sublayer's normalised
input and the weights of its post step. A row is computed from that row alone, in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, int64, uint32

from ds4.cuda.kernels.block import begin, block_sum, exp, inverse_root, quantize_quad, sigmoid
from ds4.cuda.kernels.intrinsics import (
    address,
    cuda,
    device_function,
    div,
    f16_to_f32,
    fma,
    ld_f32x4,
    ld_u32x2_stream,
    shfl_xor,
)
from ds4.cuda.kernels.reduce import warp_sum

__all__ = ["MIX_COLUMNS", "N_STREAMS", "collapse_kernel", "mix_kernel"]

N_STREAMS = 4
MIX_COLUMNS = 128
"""Model dimensions per block of `mix`."""

_WARPS = 4


@functools.cache
def mix_kernel(d: int, n_mix: int, *, halves: bool, has_post: bool) -> Any:
    """Kernel (fn, x, y, post, comb, rows, x_out, parts): post step, then partial projections.

    x' [c] = post[c] y + sum_i comb[i, c] x[i] if has_post, else x; then, of row rows[b],
    parts[b, s, o] = sum over columns of split s of fn[o] . x' and parts[b, s, n_mix] that of x'^2.

    Args: fn of [n_mix, 4 d], u32 pairs of halves or f32; x f32[R, 4 d]; y f32[R, d]; post
    f32[R, 4]; comb f32[R, 16]; rows i32[B]; x_out f32[B, 4 d] (may be x where rows[b] = b).
    Grid: (ceil(d / MIX_COLUMNS), B) blocks of 4 warps; a warp computes every fourth part of the
    outputs, a lane four columns of each stream. Float32. Oracle: the formula in float64.
    """
    per_warp = -(-n_mix // _WARPS)
    width = N_STREAMS * d

    @cuda.jit
    def mix(fn, x, y, post, comb, rows, x_out, parts):
        begin()
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        split = cuda.blockIdx.x
        b = cuda.blockIdx.y
        source = rows[b]
        column = split * MIX_COLUMNS + 4 * lane
        inside = column < d
        v = cuda.local.array(16, float32)
        for i in range(16):
            v[i] = float32(0)
        if inside:
            for s in range(4):
                at = address(x, int64(source) * width + s * d + column)
                v[4 * s], v[4 * s + 1], v[4 * s + 2], v[4 * s + 3] = ld_f32x4(at)
            if has_post:
                y0, y1, y2, y3 = ld_f32x4(address(y, int64(source) * d + column))
                new = cuda.local.array(16, float32)
                for s in range(4):
                    p = post[source, s]
                    n0, n1, n2, n3 = p * y0, p * y1, p * y2, p * y3
                    for i in range(4):
                        c = comb[source, 4 * i + s]
                        n0 = fma(c, v[4 * i], n0)
                        n1 = fma(c, v[4 * i + 1], n1)
                        n2 = fma(c, v[4 * i + 2], n2)
                        n3 = fma(c, v[4 * i + 3], n3)
                    new[4 * s], new[4 * s + 1], new[4 * s + 2], new[4 * s + 3] = n0, n1, n2, n3
                for i in range(16):
                    v[i] = new[i]
        if has_post:
            # In place: every warp has read these columns before the first one writes them.
            cuda.syncthreads()
            if inside and warp == 0:
                for s in range(4):
                    for k in range(4):
                        x_out[b, s * d + column + k] = v[4 * s + k]
        acc = cuda.local.array(per_warp, float32)
        for i in range(per_warp):
            acc[i] = float32(0)
            o = warp * per_warp + i
            if inside and o < n_mix:
                for s in range(4):
                    first = int64(o) * width + s * d + column
                    if halves:
                        w0, w1 = ld_u32x2_stream(address(fn, first >> 1))
                        f0, f1 = f16_to_f32(w0), f16_to_f32(w0 >> uint32(16))
                        f2, f3 = f16_to_f32(w1), f16_to_f32(w1 >> uint32(16))
                    else:
                        f0, f1, f2, f3 = ld_f32x4(address(fn, first))
                    acc[i] = fma(f0, v[4 * s], acc[i])
                    acc[i] = fma(f1, v[4 * s + 1], acc[i])
                    acc[i] = fma(f2, v[4 * s + 2], acc[i])
                    acc[i] = fma(f3, v[4 * s + 3], acc[i])
        for i in range(per_warp):
            total = warp_sum(acc[i])
            o = warp * per_warp + i
            if lane == 0 and o < n_mix:
                parts[b, split, o] = total
        if warp == 0:
            square = float32(0)
            for i in range(16):
                square = fma(v[i], v[i], square)
            square = warp_sum(square)
            if lane == 0:
                parts[b, split, n_mix] = square

    return mix


@device_function
def _sinkhorn(value, iterations, eps):
    """Element C[i, j] in lane 4 i + j (lanes repeat every 16): softmax, then normalisations."""
    top = max(value, shfl_xor(value, 1))
    top = max(top, shfl_xor(top, 2))
    value = exp(value - top)
    total = value + shfl_xor(value, 1)
    total = total + shfl_xor(total, 2)
    value = div(value, total) + eps
    for it in range(iterations):
        if it > 0:
            total = value + shfl_xor(value, 1)
            total = total + shfl_xor(total, 2)
            value = div(value, total + eps)
        total = value + shfl_xor(value, 4)
        total = total + shfl_xor(total, 8)
        value = div(value, total + eps)
    return value


@functools.cache
def collapse_kernel(
    d: int,
    n_mix: int,
    n_warps: int,
    iterations: int,
    hc_eps: float,
    rms_eps: float,
    *,
    rounds: bool = False,
) -> Any:
    """Kernel (parts, scale, base, x, norm, out, post, comb, quants, scales).

    m = (sum of parts over splits) * rms scale of the streams; out[b] = rms norm of
    sum_i pre[i] x[b, i], times norm. With n_mix 24 also post f32[B, 4] and comb f32[B, 16] of the
    sublayer; with n_mix 4 (the output head) those are not written. With rounds also the byte form
    of out (see `quantize`); d must then be a multiple of 128.

    Args: parts f32[B, splits, n_mix + 1]; scale f32[3 or 1]; base f32[n_mix]; x f32[B, 4 d].
    Grid: (2, B) blocks of n_warps warps; (1, B) for the head. Block (0, b) makes out, a thread four
    adjacent columns at a time; block (1, b) makes post and comb with its first warp. Float32.
    Oracle: the formula in float64.
    """
    n_threads = 32 * n_warps
    total_of = block_sum(n_warps)
    width = N_STREAMS * d
    splits = -(-d // MIX_COLUMNS)
    quads = d // 4
    n_turns = -(-quads // n_threads)
    n_values = 4 * n_turns
    eps_hc, eps_rms = float32(hc_eps), float32(rms_eps)
    inverse_width, inverse_d = float32(1.0 / width), float32(1.0 / d)

    @cuda.jit
    def collapse(parts, scale, base, x, norm, out, post, comb, quants, scales):
        begin()
        b = cuda.blockIdx.y
        thread = cuda.threadIdx.x
        m = cuda.shared.array(32, float32)
        scratch = cuda.shared.array(32, float32)
        if thread <= n_mix:
            total = float32(0)
            for s in range(splits):
                total = total + parts[b, s, thread]
            m[thread] = total
        cuda.syncthreads()
        root = inverse_root(m[n_mix] * inverse_width + eps_rms)
        if cuda.blockIdx.x > 0:
            if thread < 32:
                k = thread & 15
                value = m[8 + k] * root * scale[2] + base[8 + k]
                value = _sinkhorn(value, iterations, eps_hc)
                if thread < 16:
                    comb[b, thread] = value
                if thread < 4:
                    weight = sigmoid(m[4 + thread] * root * scale[1] + base[4 + thread])
                    post[b, thread] = float32(2) * weight
            return
        pre = cuda.local.array(4, float32)
        for i in range(4):
            pre[i] = sigmoid(m[i] * root * scale[0] + base[i]) + eps_hc
        u = cuda.local.array(n_values, float32)
        weight = cuda.local.array(n_values, float32)
        square = float32(0)
        for turn in range(n_turns):
            quad = turn * n_threads + thread
            v = 4 * turn
            u[v] = u[v + 1] = u[v + 2] = u[v + 3] = float32(0)
            if quad < quads:
                for i in range(4):
                    x0, x1, x2, x3 = ld_f32x4(address(x, int64(b) * width + i * d + 4 * quad))
                    u[v] = fma(pre[i], x0, u[v])
                    u[v + 1] = fma(pre[i], x1, u[v + 1])
                    u[v + 2] = fma(pre[i], x2, u[v + 2])
                    u[v + 3] = fma(pre[i], x3, u[v + 3])
                n0, n1, n2, n3 = ld_f32x4(address(norm, 4 * quad))
                weight[v], weight[v + 1], weight[v + 2], weight[v + 3] = n0, n1, n2, n3
            for k in range(4):
                square = fma(u[v + k], u[v + k], square)
        square = total_of(square, scratch)
        root = inverse_root(square * inverse_d + eps_rms)
        for turn in range(n_turns):
            quad = turn * n_threads + thread
            v = 4 * turn
            if quad < quads:
                for k in range(4):
                    u[v + k] = u[v + k] * root * weight[v + k]
                    out[b, 4 * quad + k] = u[v + k]
                if rounds:
                    at = int64(b) * quads + quad
                    quantize_quad(u[v], u[v + 1], u[v + 2], u[v + 3], at, quants, scales)

    return collapse
