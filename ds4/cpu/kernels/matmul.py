"""Matrix products with packed weights: `y = W x`, W in any supported quantization.

A weight row is decoded block by block into a scratch row that fits the L1 cache and multiplied
with every input row; no tensor is ever expanded whole. An output element is one `dot` (see
`simd.py`), so its bits depend on its weight row and its input row alone: not on the number of
input rows, not on which thread computed it.

Where a world may cut a sum (`docs/ARCHITECTURE.md`, exact sums), the kernel returns the partial
sum of each canonical shard; `tree_join` adds them in the one order that every world uses.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ds4.cpu.kernels import simd
from ds4.gguf.constants import QuantType
from ds4.gguf.tables import IQ2_XXS_GRID, IQ2_XXS_SIGNS, MXFP4_VALUES

F32 = int(QuantType.F32)
F16 = int(QuantType.F16)
BF16 = int(QuantType.BF16)
Q8_0 = int(QuantType.Q8_0)
Q2_K = int(QuantType.Q2_K)
Q4_K = int(QuantType.Q4_K)
IQ2_XXS = int(QuantType.IQ2_XXS)
MXFP4 = int(QuantType.MXFP4)

_GRID = np.ascontiguousarray(IQ2_XXS_GRID, dtype=np.int8).reshape(-1)
_SIGN_BYTES = np.asarray(IQ2_XXS_SIGNS, dtype=np.uint8).reshape(-1)
_SIGNS = np.where(_SIGN_BYTES[:, None] >> np.arange(8) & 1, -1, 1).astype(np.int8).reshape(-1)
_FP4 = np.asarray(MXFP4_VALUES).astype(np.float32)


@njit(nogil=True)
def _decode_q2_k(w, at, out, o):
    d = simd.load_f16(w, at + 80)
    dmin = simd.load_f16(w, at + 82)
    for half in range(2):
        for j in range(4):
            for side in range(2):
                s = w[at + 8 * half + 2 * j + side]
                simd.decode_2bit_x16(
                    w,
                    at + 16 + 32 * half + 16 * side,
                    2 * j,
                    d * np.float32(s & 15),
                    dmin * np.float32(s >> 4),
                    out,
                    o + 128 * half + 32 * j + 16 * side,
                )


@njit(nogil=True)
def _decode_iq2_xxs(w, at, out, o):
    d = simd.load_f16(w, at)
    for k in range(8):
        tail = simd.load_u32(w, at + 2 + 8 * k + 4)
        db = d * (np.float32(0.5) + np.float32(tail >> 28)) * np.float32(0.25)
        for part in range(4):
            index = np.int64(w[at + 2 + 8 * k + part])
            sign = (tail >> (7 * part)) & 127
            simd.decode_grid_x8(_GRID, index, _SIGNS, sign, db, out, o + 32 * k + 8 * part)


@njit(nogil=True)
def _decode_q4_k(w, at, out, o):
    d = simd.load_f16(w, at)
    dmin = simd.load_f16(w, at + 2)
    for j in range(8):
        if j < 4:
            sc = w[at + 4 + j] & 63
            m = w[at + 8 + j] & 63
        else:
            sc = (w[at + 8 + j] & 15) | ((w[at + j] >> 6) << 4)
            m = (w[at + 8 + j] >> 4) | ((w[at + 4 + j] >> 6) << 4)
        scale = d * np.float32(sc)
        minimum = dmin * np.float32(m)
        base = at + 16 + 32 * (j // 2)
        shift = 4 * (j & 1)
        for i in range(32):
            q = (w[base + i] >> shift) & 15
            out[o + 32 * j + i] = scale * np.float32(q) - minimum


@njit(nogil=True)
def _decode_mxfp4(w, at, out, o):
    # The table holds twice the values, so the scale is 2 ** (e - 128); below 2 it is subnormal.
    e = np.int64(w[at])
    scale = simd.bits_to_f32((e - 1) << 23 if e >= 2 else np.int64(0x00200000) << e)
    for i in range(16):
        byte = w[at + 1 + i]
        out[o + i] = _FP4[byte & 15] * scale
        out[o + 16 + i] = _FP4[byte >> 4] * scale


@njit(nogil=True)
def decode_span(kind, w, at, length, out, o):
    """Decode `length` weights that start at byte `at` of u8 array w into out[o : o + length].

    `length` is a multiple of the block size. Oracle: `ds4.gguf.quants.dequantize`.
    """
    if kind == Q8_0:
        for b in range(length // 32):
            scale = simd.load_f16(w, at + 34 * b)
            simd.decode_i8x32(w, at + 34 * b + 2, scale, out, o + 32 * b)
    elif kind == IQ2_XXS:
        for b in range(length // 256):
            _decode_iq2_xxs(w, at + 66 * b, out, o + 256 * b)
    elif kind == Q2_K:
        for b in range(length // 256):
            _decode_q2_k(w, at + 84 * b, out, o + 256 * b)
    elif kind == F16:
        whole = length // 16
        for b in range(whole):
            simd.decode_f16_x16(w, at + 32 * b, out, o + 16 * b)
        for i in range(16 * whole, length):
            out[o + i] = simd.load_f16(w, at + 2 * i)
    elif kind == F32:
        whole = length // 16
        for b in range(whole):
            simd.decode_f32_x16(w, at + 64 * b, out, o + 16 * b)
        for i in range(16 * whole, length):
            out[o + i] = simd.bits_to_f32(simd.load_u32(w, at + 4 * i))
    elif kind == BF16:
        whole = length // 16
        for b in range(whole):
            simd.decode_bf16_x16(w, at + 32 * b, out, o + 16 * b)
        for i in range(16 * whole, length):
            low, high = np.int64(w[at + 2 * i]), np.int64(w[at + 2 * i + 1])
            out[o + i] = simd.bits_to_f32((high << 24) | (low << 16))
    elif kind == Q4_K:
        for b in range(length // 256):
            _decode_q4_k(w, at + 144 * b, out, o + 256 * b)
    elif kind == MXFP4:
        for b in range(length // 32):
            _decode_mxfp4(w, at + 17 * b, out, o + 32 * b)
    else:
        raise ValueError("unknown quantization type")


@njit(nogil=True)
def _row_products(scratch, s_at, length, x, x_at, x_stride, n_rows, out, out_at, out_stride):
    """out[out_at + r * out_stride] = dot(scratch, x row r) for n_rows rows."""
    r = 0
    while r + 4 <= n_rows:
        a = x_at + r * x_stride
        y = simd.dot4(scratch, s_at, x, a, a + x_stride, a + 2 * x_stride, a + 3 * x_stride, length)
        out[out_at + r * out_stride] = y[0]
        out[out_at + (r + 1) * out_stride] = y[1]
        out[out_at + (r + 2) * out_stride] = y[2]
        out[out_at + (r + 3) * out_stride] = y[3]
        r += 4
    while r < n_rows:
        y0 = simd.dot(scratch, s_at, x, x_at + r * x_stride, length)
        out[out_at + r * out_stride] = y0
        r += 1


@njit(nogil=True, parallel=True, cache=True)
def matmul(kind, w, row_bytes, row0, n_out, n_in, x, x_stride, x_col, n_rows, out, n_tasks):
    """out[r, o] = sum_i W[row0 + o, i] * x[r, x_col + i].

    Args:
      kind: `QuantType` as int.
      w: u8[*], the tensor's bytes; a row is `row_bytes` long.
      row0: first weight row used.
      n_out, n_in: rows used, weights per row.
      x: f32[*], row r starts at r * x_stride + x_col.
      n_rows: input rows.
      out: f32[n_rows * n_out], row-major.
      n_tasks: pieces the output rows are cut into; no influence on the result.
    """
    for task in prange(n_tasks):
        first, last = n_out * task // n_tasks, n_out * (task + 1) // n_tasks
        scratch = np.empty(n_in, np.float32)
        for o in range(first, last):
            decode_span(kind, w, (row0 + o) * row_bytes, n_in, scratch, 0)
            _row_products(scratch, 0, n_in, x, x_col, x_stride, n_rows, out, o, n_out)


@njit(nogil=True, parallel=True, cache=True)
def matmul_grouped(kind, w, row_bytes, n_groups, group0, n_out, n_in, x, x_stride, n_rows, out):
    """Block-diagonal product: output rows of group g see the columns of group g only.

    out[r, g * n_out + o] = sum_i W[(group0 + g) * n_out + o, i] * x[r, g * n_in + i]

    x is f32 with rows of x_stride, whose column 0 belongs to `group0`; out is
    f32[n_rows * n_groups * n_out].
    """
    total = n_groups * n_out
    for o in prange(total):
        scratch = np.empty(n_in, np.float32)
        decode_span(kind, w, (group0 * n_out + o) * row_bytes, n_in, scratch, 0)
        _row_products(scratch, 0, n_in, x, o // n_out * n_in, x_stride, n_rows, out, o, total)


@njit(nogil=True, parallel=True, cache=True)
def matmul_shards(
    kind, w, row_bytes, block_elements, block_bytes, bounds, v0, v1, n_out, x, x_stride, n_rows, out
):
    """Partial sums of the canonical shards v0 .. v1 - 1 of a product along its inner dimension.

    out[v - v0, r, o] = sum over i in [bounds[v], bounds[v + 1]) of W[o, i] * x[r, i - bounds[v0]]

    Args:
      w: u8[*], whole rows of the tensor (all columns).
      bounds: i64[9], shard boundaries in elements, on block boundaries.
      x: f32 with rows of x_stride; column 0 is element bounds[v0].
      out: f32[(v1 - v0) * n_rows * n_out]; an empty shard gives +0.0.
    """
    base = bounds[v0]
    width = bounds[v1] - base
    for o in prange(n_out):
        scratch = np.empty(max(width, 1), np.float32)
        at = o * row_bytes + base // block_elements * block_bytes
        decode_span(kind, w, at, width, scratch, 0)
        for v in range(v0, v1):
            lo = bounds[v] - base
            _row_products(
                scratch,
                lo,
                bounds[v + 1] - bounds[v],
                x,
                lo,
                x_stride,
                n_rows,
                out,
                (v - v0) * n_rows * n_out + o,
                n_out,
            )


@njit(nogil=True)
def tree_sum(s, n):
    """Sum s[0:n] as the fixed binary tree over neighbours; n is 1, 2, 4 or 8."""
    while n > 1:
        n //= 2
        for i in range(n):
            s[i] = s[2 * i] + s[2 * i + 1]
    return s[0]


@njit(nogil=True, cache=True)
def tree_join(parts, n_parts, length, out):
    """out[i] = fixed tree over parts[p * length + i], p in 0 .. n_parts - 1; f32."""
    s = np.empty(8, np.float32)
    for i in range(length):
        for p in range(n_parts):
            s[p] = parts[p * length + i]
        out[i] = tree_sum(s, n_parts)


@njit(nogil=True, cache=True)
def embed(kind, w, row_bytes, d, tokens, n_rows, n_streams, x):
    """x[r, s, :] = row tokens[r] of the embedding, for every stream s; x is f32[R * S * d]."""
    for r in range(n_rows):
        at = r * n_streams * d
        decode_span(kind, w, np.int64(tokens[r]) * row_bytes, d, x, at)
        for s in range(1, n_streams):
            x[at + s * d : at + (s + 1) * d] = x[at : at + d]
