"""Sparse attention on the CPU: compressor, indexer, and attention over selected rows.

Keys and values are one vector per position. A query sees the raw rows of its window and compressed
rows: all visible ones (ratio 128) or the indexer's choice (ratio 4). Rows are visited in ascending
order, so the bits of a result do not depend on how the prompt was cut into chunks.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ds4.cpu.kernels import simd
from ds4.cpu.kernels.elementwise import exp_f32, rms_scale

_NEG_INF = np.float32(-np.inf)
_ZERO = np.float32(0.0)


@njit(nogil=True, parallel=True, cache=True)
def compress(
    k, s, ape, position, n_rows, ratio, w, slots_k, slots_s, norm, eps, cos, sin, n_dims, rows
):
    """Pool finished windows of a chunk into compressed rows and carry the rest.

    Row j pools positions ratio*j .. ratio*j + ratio - 1 by a softmax per channel. With ratio 4 a
    token has two halves of w channels: the first counts for the next row, the second for its own.

    Args:
      k: f32[n_rows * c*w], values of the chunk; c is 2 for ratio 4, else 1.
      s: f32[n_rows * c*w], gate scores without the position bias, which is added here in place.
      ape: f32[ratio * c*w], bias by position within the window.
      position: absolute position of the chunk's first token.
      slots_k, slots_s: f32[n_slots * c*w], scores with bias, of the last n_slots = c * ratio
        positions; position p lives in slot p % n_slots. Updated at the end.
      norm: f32[w]; eps: of the RMS norm.
      cos, sin: f32[n_new * n_dims / 2] of the new rows' positions ratio * j.
      rows: f32[*], compressed rows; row j at j * w. New rows are written.
    """
    c = 2 if ratio == 4 else 1
    cw = c * w
    n_slots = c * ratio
    for i in range(n_rows):
        base = (position + i) % ratio * cw
        for d in range(cw):
            s[i * cw + d] += ape[base + d]
    first = position // ratio
    n_new = (position + n_rows) // ratio - first
    half = n_dims // 2
    for index in prange(n_new):
        j = first + index
        start = max(0, ratio * (j - (c - 1)))
        end = ratio * (j + 1)
        at = j * w
        for d in range(w):
            top = _NEG_INF
            for p in range(start, end):
                column = w + d if c == 2 and p >= ratio * j else d
                if p >= position:
                    score = s[(p - position) * cw + column]
                else:
                    score = slots_s[p % n_slots * cw + column]
                top = max(top, score)
            total = _ZERO
            value = _ZERO
            for p in range(start, end):
                column = w + d if c == 2 and p >= ratio * j else d
                if p >= position:
                    e = exp_f32(s[(p - position) * cw + column] - top)
                    value += e * k[(p - position) * cw + column]
                else:
                    e = exp_f32(slots_s[p % n_slots * cw + column] - top)
                    value += e * slots_k[p % n_slots * cw + column]
                total += e
            rows[at + d] = value / total
        scale = rms_scale(rows, at, w, eps)
        for d in range(w):
            rows[at + d] = rows[at + d] * scale * norm[d]
        tail = at + w - n_dims
        for i in range(half):
            a, b = rows[tail + 2 * i], rows[tail + 2 * i + 1]
            co, si = cos[index * half + i], sin[index * half + i]
            rows[tail + 2 * i] = a * co - b * si
            rows[tail + 2 * i + 1] = a * si + b * co
    for i in range(max(0, n_rows - n_slots), n_rows):
        slot = (position + i) % n_slots * cw
        for d in range(cw):
            slots_k[slot + d] = k[i * cw + d]
            slots_s[slot + d] = s[i * cw + d]


@njit(nogil=True, parallel=True, cache=True)
def index_scores(q, weights, keys, position, n_rows, n_heads, width, ratio, stride, scores):
    """Indexer score of every visible compressed row.

    scores[r, j] = sum_h weights[r, h] * relu(q[r, h] . keys[j]) for j < (position + r + 1) // ratio

    q is f32[n_rows * n_heads * width], weights f32[n_rows * n_heads] (scaled), keys f32[* width],
    scores out f32[n_rows * stride].
    """
    block = 64
    n_blocks = (stride + block - 1) // block
    for task in prange(n_rows * n_blocks):
        r = task // n_blocks
        visible = (position + r + 1) // ratio
        lo = task % n_blocks * block
        for j in range(lo, min(lo + block, visible)):
            total = _ZERO
            for h in range(n_heads):
                d = simd.dot(q, (r * n_heads + h) * width, keys, j * width, width)
                if d > _ZERO:
                    total += weights[r * n_heads + h] * d
            scores[r * stride + j] = total


@njit(nogil=True, parallel=True, cache=True)
def index_select(scores, position, n_rows, ratio, stride, top_k, chosen, n_chosen):
    """The top_k visible rows of each query, ascending; ties go to the lower index.

    chosen is out i32[n_rows * top_k], n_chosen out i32[n_rows].
    """
    for r in prange(n_rows):
        visible = (position + r + 1) // ratio
        if visible <= top_k:
            for j in range(visible):
                chosen[r * top_k + j] = j
            n_chosen[r] = visible
        else:
            row = scores[r * stride : r * stride + visible]
            threshold = np.partition(row, visible - top_k)[visible - top_k]
            above = 0
            for j in range(visible):
                if row[j] > threshold:
                    above += 1
            ties = top_k - above
            n = 0
            for j in range(visible):
                take = row[j] > threshold
                if row[j] == threshold and ties > 0:
                    ties -= 1
                    take = True
                if take:
                    chosen[r * top_k + n] = j
                    n += 1
            n_chosen[r] = n


@njit(nogil=True, parallel=True, cache=True)
def attend(
    q, ring, capacity, window, position, n_rows, n_heads, head0, width, sinks, scale,
    rows, chosen, n_chosen, chosen_stride, ratio, out,
):  # fmt: skip
    """Attention of every (row, head) over its window, its compressed rows and its sink.

    Args:
      q: f32[n_rows * n_heads * width], rotated.
      ring: f32[capacity * width]; position p lives in row p % capacity, chunk included.
      position: absolute position of row 0.
      head0: global index of head 0, for the sinks.
      sinks: f32[H]; joins the denominator only.
      scale: factor on q . k.
      rows: f32[* width], compressed rows (unused when ratio is 0).
      chosen, n_chosen: the indexer's choice, i32[n_rows * chosen_stride] and i32[n_rows]; with
        chosen_stride 0 all (position + r + 1) // ratio visible rows count.
      out: f32[n_rows * n_heads * width], still rotated to the query's position.
    """
    for task in prange(n_rows * n_heads):
        r = task // n_heads
        t = position + r
        first = max(0, t - window + 1)
        n_raw = t - first + 1
        n_more = 0
        if ratio > 0:
            n_more = n_chosen[r] if chosen_stride > 0 else (t + 1) // ratio
        q_at = task * width
        weights = np.empty(n_raw + n_more, np.float32)
        top = sinks[head0 + task % n_heads]
        sink = top
        for i in range(n_raw):
            a = simd.dot(q, q_at, ring, (first + i) % capacity * width, width) * scale
            weights[i] = a
            top = max(top, a)
        for i in range(n_more):
            j = chosen[r * chosen_stride + i] if chosen_stride > 0 else i
            a = simd.dot(q, q_at, rows, j * width, width) * scale
            weights[n_raw + i] = a
            top = max(top, a)
        total = np.float64(exp_f32(sink - top))
        for i in range(n_raw + n_more):
            e = exp_f32(weights[i] - top)
            weights[i] = e
            total += np.float64(e)
        for d in range(width):
            out[q_at + d] = _ZERO
        for i in range(n_raw):
            simd.axpy(weights[i], ring, (first + i) % capacity * width, out, q_at, width)
        for i in range(n_more):
            j = chosen[r * chosen_stride + i] if chosen_stride > 0 else i
            simd.axpy(weights[n_raw + i], rows, j * width, out, q_at, width)
        inverse = np.float32(1.0 / total)
        for d in range(width):
            out[q_at + d] *= inverse
