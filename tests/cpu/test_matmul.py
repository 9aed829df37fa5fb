from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.cpu.kernels import matmul
from ds4.gguf import QuantType, dequantize

KINDS = [k for k in QuantType if k is not QuantType.I32]
PACKED = [QuantType.Q8_0, QuantType.Q2_K, QuantType.Q4_K, QuantType.IQ2_XXS, QuantType.MXFP4]


def random_rows(kind: QuantType, n_rows: int, n_in: int, seed: int) -> np.ndarray:
    """u8 rows with random quants and finite scales, read-only as a mapped file is."""
    rng = np.random.default_rng(seed)
    if kind in (QuantType.F32, QuantType.F16, QuantType.BF16):
        values = rng.standard_normal((n_rows, n_in)).astype(np.float32)
        if kind is QuantType.F16:
            raw = values.astype(np.float16).view(np.uint8)
        elif kind is QuantType.BF16:
            raw = np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(
                np.uint8
            )
        else:
            raw = values.view(np.uint8)
    else:
        blocks = n_rows * n_in // kind.block_elements
        raw = rng.integers(0, 256, (blocks, kind.block_bytes), dtype=np.uint8)
        scale = (
            rng.standard_normal((blocks, 2)).astype(np.float16).view(np.uint8).reshape(blocks, 4)
        )
        match kind:
            case QuantType.Q8_0 | QuantType.IQ2_XXS:
                raw[:, :2] = scale[:, :2]
            case QuantType.Q2_K:
                raw[:, 80:84] = scale
            case QuantType.Q4_K:
                raw[:, :4] = scale
            case QuantType.MXFP4:
                raw[:, 0] = rng.integers(110, 140, blocks)
    return np.frombuffer(raw.tobytes(), np.uint8).reshape(n_rows, -1)


def decode(kind: QuantType, rows: np.ndarray, n_in: int) -> np.ndarray:
    out = np.empty(rows.shape[0] * n_in, np.float32)
    for r in range(rows.shape[0]):
        matmul.decode_span(int(kind), rows.reshape(-1), r * rows.shape[1], n_in, out, r * n_in)
    return out.reshape(-1, n_in)


def product(kind, rows, x, n_in, tasks=3):
    out = np.empty(x.shape[0] * rows.shape[0], np.float32)
    matmul.matmul(
        int(kind), rows.reshape(-1), rows.shape[1], 0, rows.shape[0], n_in,
        x.reshape(-1), n_in, 0, x.shape[0], out, tasks,
    )  # fmt: skip
    return out.reshape(x.shape[0], rows.shape[0])


def lane_dot(w: np.ndarray, x: np.ndarray) -> np.float32:
    """The defined order in exact steps: 32 lanes, fused multiply-add, halving tree."""
    lanes = np.zeros(32, np.float32)
    for i in range(w.size):
        exact = np.longdouble(w[i]) * np.longdouble(x[i]) + np.longdouble(lanes[i % 32])
        lanes[i % 32] = np.float32(exact)
    while lanes.size > 1:
        half = lanes.size // 2
        lanes = (lanes[:half] + lanes[half:]).astype(np.float32)
    return lanes[0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_decoded_weights_have_the_bits_of_the_oracle(kind):
    n_in = 512
    rows = random_rows(kind, 64, n_in, seed=1)
    expected = dequantize(rows, kind).reshape(64, n_in)
    np.testing.assert_array_equal(
        decode(kind, rows, n_in).view(np.uint32), expected.view(np.uint32)
    )


@pytest.mark.parametrize("exponent", [0, 1, 2, 254])
def test_mxfp4_scales_at_the_edges_of_float32(exponent):
    rows = random_rows(QuantType.MXFP4, 4, 64, seed=2).copy()
    rows.reshape(-1, 17)[:, 0] = exponent
    expected = dequantize(rows, QuantType.MXFP4).reshape(4, 64)
    np.testing.assert_array_equal(decode(QuantType.MXFP4, rows, 64), expected)


@pytest.mark.parametrize("n_in", [1, 7, 31, 32, 33, 63, 64, 100])
def test_a_dot_product_is_summed_in_the_defined_order(n_in):
    rng = np.random.default_rng(n_in)
    w = rng.standard_normal((3, n_in)).astype(np.float32)
    x = rng.standard_normal((5, n_in)).astype(np.float32)
    rows = np.frombuffer(w.tobytes(), np.uint8).reshape(3, -1)
    found = product(QuantType.F32, rows, x, n_in)
    expected = np.array([[lane_dot(w[o], x[r]) for o in range(3)] for r in range(5)], np.float32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 5, 8, 127, 128, 129])
def test_a_row_does_not_depend_on_the_rows_beside_it(kind, n_rows):
    n_in = 256
    rows = random_rows(kind, 33, n_in, seed=3)
    x = np.random.default_rng(4).standard_normal((n_rows, n_in)).astype(np.float32)
    together = product(kind, rows, x, n_in)
    for r in {0, n_rows // 2, n_rows - 1}:
        alone = product(kind, rows, np.ascontiguousarray(x[r : r + 1]), n_in, tasks=1)
        np.testing.assert_array_equal(together[r], alone[0])


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_a_product_is_close_to_float64(kind):
    n_in = 768
    rows = random_rows(kind, 40, n_in, seed=5)
    x = np.random.default_rng(6).standard_normal((3, n_in)).astype(np.float32)
    w = dequantize(rows, kind).reshape(40, n_in).astype(np.float64)
    exact = x.astype(np.float64) @ w.T
    bound = 2e-6 * (np.abs(x) @ np.abs(w).T)  # 24 sequential float32 sums a lane, plus the tree
    assert (np.abs(product(kind, rows, x, n_in) - exact) <= bound).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4), st.sampled_from([1, 2, 4, 8]), st.integers(1, 6))
def test_shard_sums_of_any_world_join_to_the_same_bits(which, world, n_rows):
    kind, blocks = [(QuantType.Q8_0, 8), (QuantType.Q8_0, 3), (QuantType.F32, 11),
                    (QuantType.IQ2_XXS, 2), (QuantType.F16, 64)][which]  # fmt: skip
    block = kind.block_elements
    n_in, n_out = blocks * block, 5
    rows = random_rows(kind, n_out, n_in, seed=7)
    x = np.random.default_rng(8).standard_normal((n_rows, n_in)).astype(np.float32)
    bounds = np.array([v * blocks // 8 * block for v in range(9)], np.int64)

    def subtree(v0: int, v1: int) -> np.ndarray:
        mine = np.ascontiguousarray(x[:, bounds[v0] : bounds[v1]])
        parts = np.full((v1 - v0) * n_rows * n_out, np.nan, np.float32)
        matmul.matmul_shards(
            int(kind), rows.reshape(-1), rows.shape[1], block, kind.block_bytes, bounds, v0, v1,
            n_out, mine.reshape(-1), mine.shape[1], n_rows, parts,
        )  # fmt: skip
        out = np.empty(n_rows * n_out, np.float32)
        matmul.tree_join(parts, v1 - v0, out.size, out)
        return out

    whole = subtree(0, 8)
    width = 8 // world
    pieces = [subtree(r * width, (r + 1) * width) for r in range(world)]
    while len(pieces) > 1:
        pieces = [pieces[i] + pieces[i + 1] for i in range(0, len(pieces), 2)]
    np.testing.assert_array_equal(pieces[0].view(np.uint32), whole.view(np.uint32))


def test_grouped_rows_see_only_their_own_columns():
    kind, n_groups, n_out, n_in = QuantType.Q8_0, 4, 6, 64
    rows = random_rows(kind, n_groups * n_out, n_in, seed=9)
    x = np.random.default_rng(10).standard_normal((3, n_groups * n_in)).astype(np.float32)
    out = np.empty(3 * n_groups * n_out, np.float32)
    matmul.matmul_grouped(
        int(kind), rows.reshape(-1), rows.shape[1], n_groups, 0, n_out, n_in,
        x.reshape(-1), n_groups * n_in, 3, out,
    )  # fmt: skip
    for g in range(n_groups):
        mine = np.ascontiguousarray(x[:, g * n_in : (g + 1) * n_in])
        expected = product(kind, rows[g * n_out : (g + 1) * n_out], mine, n_in)
        found = out.reshape(3, n_groups, n_out)[:, g]
        np.testing.assert_array_equal(found, expected)
    second = np.empty(3 * 2 * n_out, np.float32)
    half = np.ascontiguousarray(x[:, 2 * n_in :])
    matmul.matmul_grouped(
        int(kind), rows.reshape(-1), rows.shape[1], 2, 2, n_out, n_in,
        half.reshape(-1), 2 * n_in, 3, second,
    )  # fmt: skip
    np.testing.assert_array_equal(
        second.reshape(3, 2, n_out), out.reshape(3, n_groups, n_out)[:, 2:]
    )


def test_embedding_rows_are_copied_to_every_stream():
    rows = random_rows(QuantType.F16, 10, 64, seed=11)
    x = np.empty(3 * 4 * 64, np.float32)
    tokens = np.array([9, 0, 9], np.int32)
    matmul.embed(int(QuantType.F16), rows.reshape(-1), rows.shape[1], 64, tokens, 3, 4, x)
    expected = dequantize(rows, QuantType.F16).reshape(10, 64)[tokens]
    np.testing.assert_array_equal(x.reshape(3, 4, 64), np.repeat(expected[:, None], 4, axis=1))
