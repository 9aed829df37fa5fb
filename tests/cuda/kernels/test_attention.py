"""Attention of a step against softmax in float64: ring, chunk, compressed rows, choice, sink."""

import cases
import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels.attention import (
    APPEND_BLOCKS,
    HEADS_PER_BLOCK,
    SPLIT_KEYS,
    HeadSizes,
    combine_kernel,
    partial_kernel,
)
from ds4.cuda.kernels.latent import N_PARTS, LayerSizes, Part

HD, ROPE, WINDOW, HEADS, TOP_K = 16, 4, 20, 3, 5


def rotate(x, angle):
    out = x.copy()
    a, b = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    c, s = np.cos(angle), np.sin(angle)
    out[..., -ROPE::2], out[..., -ROPE + 1 :: 2] = a * c - b * s, a * s + b * c
    return out


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_rows_attend_window_compressed_rows_and_sink(ratio):
    rng = np.random.default_rng(ratio)
    sizes = LayerSizes(q_rank=8, head_dim=HD, rope_dim=ROPE, window=WINDOW, ratio=ratio,
                       index_dim=8 if ratio == 4 else 0, rms_eps=1e-6)  # fmt: skip
    heads = HeadSizes(layer=sizes, n_heads=HEADS, first_head=1, top_k=TOP_K)
    # Session slot 1 has 259 tokens; rows 0, 1 continue it; row 2 is idle.
    length, batch = 259, 3
    history = rng.standard_normal((length + 2, HD))
    compressed = rng.standard_normal((70, HD))
    cw = sizes.halves * HD
    n_slots, icw = sizes.n_slots, sizes.halves * sizes.index_dim
    starts = np.cumsum([0, WINDOW * HD, 70 * HD, n_slots * cw, n_slots * cw, 0, n_slots * icw])
    table = np.zeros((2, 1, N_PARTS), np.int64)
    table[1, 0] = 8 + starts
    state = np.full(8 + starts[-1] + n_slots * icw + 8, np.nan, np.float32)
    for p in range(length - WINDOW, length):
        at = table[1, 0, Part.RING] + p % WINDOW * HD
        state[at : at + HD] = history[p]
    at = table[1, 0, Part.ROWS]
    state[at : at + 70 * HD] = compressed.ravel()
    slots = np.array([1, 1, -1], np.int32)
    positions = np.array([length, length + 1, 0], np.int32)
    firsts, lasts = np.array([0, 0, 2], np.int32), np.array([1, 1, 2], np.int32)
    q = rng.standard_normal((batch, HEADS * HD + 4))
    kv = np.zeros((batch, HD), np.float32)
    kv[:2] = history[length:]
    angle = rng.random((batch, 4, ROPE // 2))
    chosen = np.stack([np.sort(rng.permutation(60)[:TOP_K]) for _ in range(batch)]).astype(np.int32)
    sinks = rng.standard_normal(HEADS + 1)
    gates = rng.standard_normal((batch, 2 * cw + 2 * icw + 1)).astype(np.float32)
    ape, index_ape = rng.standard_normal(max(1, ratio) * cw), rng.standard_normal(4 * max(1, icw))
    splits = -(-(WINDOW + 70) // SPLIT_KEYS)
    parts, stats = cases.poisoned(batch, splits, HEADS, HD), cases.poisoned(batch, splits, HEADS, 2)
    out = cases.poisoned(batch, HEADS * HD)
    dstate = cuda.to_device(state)
    ints = [cuda.to_device(a) for a in (table, slots, positions, firsts, lasts, chosen)]
    dtable, dslots, dpositions, dfirsts, dlasts, dchosen = ints
    floats = [np.cos(angle), np.sin(angle), q, kv, sinks, ape, index_ape]
    cos, sin, dq, dkv, dsinks, dape, diape = (cuda.to_device(a.astype(np.float32)) for a in floats)
    rows = (dtable, dstate, np.int32(0), dslots, dpositions)
    partial_kernel(heads)[(splits, 1, batch), 32 * HEADS_PER_BLOCK](
        *rows, dfirsts, cos, sin, dq, dkv, dchosen, parts, stats
    )
    g = cuda.to_device(gates)
    combine_kernel(heads)[(HEADS + APPEND_BLOCKS, batch), 32](
        *rows, dlasts, cos, sin, parts, stats, dsinks, out, dkv, g, 0, g, cw, g, 2 * cw, g,
        2 * cw + icw, dape, diape, dslots, dslots,
    )  # fmt: skip
    got, which = out.copy_to_host(), 1 if ratio else 0
    for b in range(2):
        t = length + b
        keys = history[t - WINDOW + 1 : t + 1]
        if ratio == 4:
            keys = np.concatenate([keys, compressed[chosen[b]]])
        elif ratio == 128:
            keys = np.concatenate([keys, compressed[: (t + 1) // 128]])
        query = q[b, : HEADS * HD].reshape(HEADS, HD)
        query = query / np.sqrt((query**2).mean(axis=1, keepdims=True) + 1e-6)
        query = rotate(query, angle[b, which])
        a = query @ keys.T * HD**-0.5
        weights = np.exp(a) / (np.exp(a).sum(axis=1) + np.exp(sinks[1:]))[:, None]
        want = rotate(weights @ keys, -angle[b, which]).ravel()
        assert cases.error(got[b], want) < 3e-6, b
    assert np.isnan(got[2]).all(), "an idle row is not written"
    after = dstate.copy_to_host()
    for b in range(2):
        t = length + b
        at = table[1, 0, Part.RING] + t % WINDOW * HD
        assert np.array_equal(after[at : at + HD], kv[b])
        if ratio:
            at = table[1, 0, Part.SLOTS_K] + t % n_slots * cw
            assert np.array_equal(after[at : at + cw], gates[b, :cw])
            at = table[1, 0, Part.SLOTS_S] + t % n_slots * cw
            bias = ape.astype(np.float32)[t % ratio * cw : (t % ratio + 1) * cw]
            assert np.array_equal(after[at : at + cw], gates[b, cw : 2 * cw] + bias)
        if ratio == 4:
            at = table[1, 0, Part.INDEX_SLOTS_K] + t % n_slots * icw
            assert np.array_equal(after[at : at + icw], gates[b, 2 * cw : 2 * cw + icw])
    # Nothing but the two tokens' places has changed.
    written = 2 * (HD + (2 * cw if ratio else 0) + 2 * icw)
    assert int((after.view(np.uint32) != state.view(np.uint32)).sum()) <= written


def test_a_row_has_the_same_bits_alone_and_inside_a_chunk():
    rng = np.random.default_rng(9)
    sizes = LayerSizes(q_rank=8, head_dim=HD, rope_dim=ROPE, window=WINDOW, ratio=0, index_dim=0,
                       rms_eps=1e-6)  # fmt: skip
    heads = HeadSizes(layer=sizes, n_heads=HEADS, first_head=0, top_k=TOP_K)
    kv = rng.standard_normal((4, HD)).astype(np.float32)
    q = rng.standard_normal((4, HEADS * HD)).astype(np.float32)
    angle = rng.random((4, 4, ROPE // 2)).astype(np.float32)
    table = np.zeros((1, 1, N_PARTS), np.int64)

    def run(first, count):
        state = np.zeros((WINDOW, HD), np.float32)
        state[:first] = kv[:first]
        positions = np.arange(first, first + count, dtype=np.int32)
        parts, stats = cases.poisoned(count, 1, HEADS, HD), cases.poisoned(count, 1, HEADS, 2)
        zeros = np.zeros(count, np.int32)
        span = slice(first, first + count)
        arrays = (
            table,
            state.ravel(),
            np.int32(0),
            zeros,
            positions,
            zeros,
            np.cos(angle[span]),
            np.sin(angle[span]),
            q[span],
            kv[span],
            np.zeros((count, TOP_K), np.int32),
        )
        on_device = [a if a.ndim == 0 else cuda.to_device(a) for a in arrays]
        partial_kernel(heads)[(1, 1, count), 32 * HEADS_PER_BLOCK](*on_device, parts, stats)
        return parts.copy_to_host(), stats.copy_to_host()

    whole = run(0, 4)
    for t in range(4):
        alone = run(t, 1)
        assert np.array_equal(alone[0][0], whole[0][t])
        assert np.array_equal(alone[1][0], whole[1][t])
