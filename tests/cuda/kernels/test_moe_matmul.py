"""The expert kernels against float64 products, and the world invariance of their sums.

Under the simulator a whole block would take minutes, so these launch a few tiles and rows; the
whole block is checked on a GPU by `benchmarks/cuda_matmul.py`.
"""

import attrs
import cases
import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels.experts_down import experts_down_kernel
from ds4.cuda.kernels.experts_up import TILE, ExpertShape, experts_up_kernel, piece_order
from ds4.cuda.kernels.moe_matmul import Experts, ExpertWeights
from ds4.cuda.kernels.quantize import quantize_reference
from ds4.cuda.kernels.reduce import tree_reference
from ds4.cuda.layout import iq2_xxs_selectors
from ds4.errors import ConfigError
from ds4.gguf.constants import QuantType
from ds4.gguf.quants import dequantize

IQ2, Q2K, Q8 = QuantType.IQ2_XXS, QuantType.Q2_K, QuantType.Q8_0
D = F = 256
CLAMP = 0.5
ROWS = 3


def value(blocks, kind):
    return dequantize(blocks, kind).astype(np.float64)


def swiglu(gate, up, x, weight):
    a, b = np.minimum(gate @ x, CLAMP), np.clip(up @ x, -CLAMP, CLAMP)
    return weight * a / (1 + np.exp(-a)) * b


def i32(values):
    return cuda.to_device(np.array(values, np.int32))


def f32(values):
    return cuda.to_device(np.array(values, np.float32))


def first_half(exact, warps=1):
    """One shared tile and the tiles of two pairs, one of them elsewhere; (outputs, oracle)."""
    rng = np.random.default_rng(2)
    gate, up = (cases.random_blocks(rng, TILE, D, IQ2) for _ in range(2))
    shared_gate, shared_up = (cases.random_blocks(rng, TILE, D, Q8) for _ in range(2))
    x = (rng.standard_normal((1, D)) * 0.05).astype(np.float32)
    device_x, rounded = cases.activations(x)
    # The routed width is 256; only the first tile of each pair is launched by giving the expert
    # one tile of rows and a grid that ends there.
    shape = ExpertShape(1, 2, D, F, TILE, CLAMP)
    h = np.full((2, F), np.nan, np.float32) if exact else np.zeros(2 * F // 4, np.uint32)
    shared = np.full((1, TILE), np.nan, np.float32) if exact else np.zeros(TILE // 4, np.uint32)
    outputs = [cuda.to_device(h), f32([np.nan] * (2 * F // 32)), f32([np.nan] * (2 * F // 16))]
    outputs += [cuda.to_device(shared), f32([np.nan])]
    planes = [
        p
        for blocks, kind in ((gate, IQ2), (up, IQ2), (shared_gate, Q8), (shared_up, Q8))
        for p in cases.device_matrix(blocks, kind).planes
    ]
    experts_up_kernel(shape, warps, exact=exact)[2, 32 * warps](
        i32([3, 1]), f32([0.7, 0.3]), i32([-1, -1, -1, 0]), *planes,
        cuda.to_device(iq2_xxs_selectors()), *device_x.form(exact=exact), *outputs,
    )  # fmt: skip
    seen = (x if exact else rounded)[0].astype(np.float64)
    routed = swiglu(value(gate, IQ2), value(up, IQ2), seen, 0.7)
    alone = swiglu(value(shared_gate, Q8), value(shared_up, Q8), seen, 1.0)
    return [o.copy_to_host() for o in outputs], routed, alone


def test_the_exact_first_half_equals_the_float64_activations():
    (h, _, _, shared, _), routed, alone = first_half(exact=True)
    assert cases.error(h[0, :TILE], routed) < cases.EXACT_TOLERANCE
    assert cases.error(shared[0], alone) < cases.EXACT_TOLERANCE


@pytest.mark.parametrize("warps", [1, 8])
def test_the_fast_first_half_rounds_the_float64_activations(warps):
    (h, scales, sums, shared, shared_scale), routed, alone = first_half(exact=False, warps=warps)
    order = piece_order(F)[: TILE // 4]
    got = np.ascontiguousarray(h[order]).view(np.int8)
    want, want_scale = quantize_reference(routed.astype(np.float32)[None])
    # A value within float32 error of a tie may round to either neighbour.
    assert np.abs(got - want[0]).max() <= 1
    assert np.count_nonzero(got != want[0]) <= 1
    assert np.allclose(scales[0], want_scale[0, 0], rtol=1e-5)
    byte_sums = got.reshape(2, 16).astype(np.float32).sum(axis=1) * scales[0]
    assert np.array_equal(sums[[0, 4]], byte_sums)
    want, want_scale = quantize_reference(alone.astype(np.float32)[None])
    assert np.count_nonzero(shared.view(np.int8) != want[0]) <= 1
    assert np.allclose(shared_scale, want_scale[0], rtol=1e-5)


def second_half(exact, *, first_shard=0, n_shards=8, f=F, batch=1):
    """Outputs of ROWS rows of the down projection for four chosen experts, and their oracle."""
    rng = np.random.default_rng(3)
    n_used, n_experts, d_shared = 4, 4, 256
    shard_of = np.array([5, 0, 5, 2])  # shard 5 is hot, five shards have no expert
    down = cases.random_blocks(rng, n_experts * D, f, Q2K)
    shared_down = cases.random_blocks(rng, D, d_shared, Q8)
    h = rng.standard_normal((batch * n_used, f)).astype(np.float32)
    shared = rng.standard_normal((batch, d_shared)).astype(np.float32)
    ids = np.stack([rng.permutation(4) for _ in range(batch)])
    held = np.flatnonzero((shard_of >= first_shard) & (shard_of < first_shard + n_shards))
    slots = np.full(n_experts, -1)
    slots[held] = np.arange(len(held))
    lanes = slice(first_shard * d_shared // 8, (first_shard + n_shards) * d_shared // 8)
    n_lanes = lanes.stop - lanes.start
    shape = ExpertShape(batch, n_used, D, f, n_lanes, CLAMP, first_shard, n_shards)
    stack = np.concatenate([down[:0], *(down[e * D : (e + 1) * D] for e in held)])
    columns = shared_down[:, lanes.start // 32 * 34 : lanes.stop // 32 * 34]
    mine = np.ascontiguousarray(shared[:, lanes])
    if exact:
        buffers = [cuda.to_device(h), f32([0]), f32([0]), cuda.to_device(mine), f32([0])]
        seen_h, seen_shared = h, shared
    else:
        q, s = quantize_reference(h)
        seen_h = (q.reshape(len(h), -1, 32) * s[..., None]).reshape(h.shape)
        words = np.empty((len(h), f // 4), np.uint32)
        words[:, piece_order(f)] = np.ascontiguousarray(q).view(np.uint32)
        sums = q.reshape(len(h), f // 256, 2, 4, 2, 16).astype(np.float32).sum(axis=-1)
        sums *= s.reshape(len(h), f // 256, 2, 4, 1)
        sums = np.ascontiguousarray(sums.transpose(0, 1, 2, 4, 3))
        sq, ss = quantize_reference(shared)
        seen_shared = (sq.reshape(batch, -1, 32) * ss[..., None]).reshape(shared.shape)
        sq, ss = quantize_reference(mine)
        buffers = [
            cuda.to_device(words.reshape(-1)),
            cuda.to_device(s.reshape(-1)),
            cuda.to_device(sums.reshape(-1)),
            cuda.to_device(sq.reshape(-1).view(np.uint32)),
            cuda.to_device(ss.reshape(-1)),
        ]
    out = cases.poisoned(batch, D)
    experts_down_kernel(shape, 1, exact=exact)[(ROWS, batch), 32](
        i32(ids.reshape(-1)), i32(slots), i32(shard_of), *cases.device_matrix(stack, Q2K).planes,
        *cases.device_matrix(np.ascontiguousarray(columns), Q8).planes, *buffers, out,
    )  # fmt: skip
    want = seen_shared.astype(np.float64) @ value(shared_down[:ROWS], Q8).T
    for b in range(batch):
        for k, expert in enumerate(ids[b]):
            rows = value(down[expert * D : expert * D + ROWS], Q2K)
            want[b] += rows @ seen_h[b * n_used + k].astype(np.float64)
    return out.copy_to_host()[:, :ROWS], want


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("f", "batch"), [(256, 1), (2304, 1), (512, 2)])
def test_the_second_half_equals_the_float64_sum(f, batch, exact):
    got, want = second_half(exact, f=f, batch=batch)
    assert cases.error(got, want) < cases.EXACT_TOLERANCE


def test_every_world_s_subtrees_join_to_the_bits_of_one_rank():
    whole, _ = second_half(exact=False)
    for world in (2, 4, 8):
        size = 8 // world
        parts = [second_half(False, first_shard=size * r, n_shards=size)[0] for r in range(world)]
        assert np.array_equal(tree_reference(np.stack(parts, axis=-1)), whole), world


def test_piece_order_is_a_permutation():
    for f in (256, 2048):
        assert np.array_equal(np.sort(piece_order(f)), np.arange(f // 4))


def test_matrices_that_do_not_fit_are_refused_by_name():
    shape = ExpertShape(1, 1, D, F, F, CLAMP)
    q8 = cases.device_matrix(cases.random_blocks(np.random.default_rng(0), F, D, Q8), Q8)
    weights = ExpertWeights(q8, q8, q8, q8, q8, q8)
    with pytest.raises(ConfigError, match="gate must be IQ2_XXS"):
        Experts(shape, weights, None, None)
    with pytest.raises(ConfigError, match="bucket"):
        Experts(attrs.evolve(shape, batch=3), weights, None, None)
    with pytest.raises(ConfigError, match="subtree"):
        Experts(attrs.evolve(shape, first_shard=1, n_shards=2), weights, None, None)
    with pytest.raises(ConfigError, match="d_expert"):
        Experts(attrs.evolve(shape, d_expert=128), weights, None, None)
