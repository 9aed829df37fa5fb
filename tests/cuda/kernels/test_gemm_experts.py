"""The prefill expert kernels: lists, a few tiles of up and down, and the join over shards."""

import cases
import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels import gemm_experts
from ds4.cuda.kernels.expert_lists import LIST_TILE, launch_lists, max_tiles
from ds4.cuda.kernels.gemm_experts import TiledExpertShape, launch_join
from ds4.cuda.kernels.reduce import tree_reference
from ds4.cuda.layout import iq2_xxs_selectors
from ds4.gguf.constants import QuantType
from ds4.gguf.quants import dequantize

IQ2, Q2K = QuantType.IQ2_XXS, QuantType.Q2_K
D = F = 256
CLAMP = 0.5
TOLERANCE = 1e-3


def i32(values):
    return cuda.to_device(np.ascontiguousarray(values, np.int32).reshape(-1))


def lists_of(ids, slots):
    n_tiles = max_tiles(ids.size, int((slots >= 0).sum()))
    order, tiles = i32(np.full(ids.size, -7)), i32(np.full(3 * n_tiles, -7))
    launch_lists(0, i32(ids), ids.size, i32(slots), order, tiles, n_tiles)
    return order, tiles, n_tiles


@pytest.mark.parametrize("n_choices", [1, 63, 65, 130])
@pytest.mark.parametrize("hot", [False, True])
def test_every_choice_of_a_held_expert_is_in_one_tile(n_choices, hot):
    rng = np.random.default_rng(n_choices)
    slots = np.array([2, -1, 0, 1, -1, 3])  # expert 5 may be empty, 1 and 4 are elsewhere
    ids = np.full(n_choices, 3) if hot else rng.integers(0, 5, n_choices)
    order, tiles, n_tiles = lists_of(ids, slots)
    order, tiles = order.copy_to_host(), tiles.copy_to_host().reshape(n_tiles, 3)
    seen = []
    for slot, first, count in tiles:
        assert 0 <= count <= LIST_TILE
        for position in range(first, first + count):
            assert slots[ids[order[position]]] == slot
            seen.append(order[position])
    assert sorted(seen) == [i for i in range(n_choices) if slots[ids[i]] >= 0]


def swiglu(gate, up, x):
    a, b = np.minimum(gate @ x, CLAMP), np.clip(up @ x, -CLAMP, CLAMP)
    return a / (1 + np.exp(-a)) * b


def test_tiles_of_the_first_half_equal_the_float64_activations():
    rng = np.random.default_rng(4)
    shape = TiledExpertShape(D, F, 2, CLAMP)
    gate, up = (cases.random_blocks(rng, 2 * F, D, IQ2) for _ in range(2))
    ids = np.array([[0, 1], [2, 0], [0, 2]])
    slots = np.array([1, -1, -1])  # one tile: the simulator takes half a minute for it
    x = (rng.standard_normal((3, D)) * 0.05).astype(np.float16)
    weights = rng.uniform(0.1, 0.9, 6).astype(np.float32)
    order, tiles, n_tiles = lists_of(ids, slots)
    h = cuda.to_device(np.zeros(6 * F // 2, np.uint32))
    gemm_experts._up_kernel(shape)[(1, n_tiles), 128](
        *cases.device_matrix(gate, IQ2).planes, *cases.device_matrix(up, IQ2).planes, tiles, order,
        cuda.to_device(x.view(np.uint32).reshape(-1)), cuda.to_device(weights),
        cuda.to_device(iq2_xxs_selectors()), h,
    )  # fmt: skip
    got = h.copy_to_host().view(np.float16).reshape(6, F)[:, :64]
    placed = order.copy_to_host()
    for position, choice in enumerate(placed[placed >= 0]):
        slot = slots[ids.reshape(-1)[choice]]
        rows = slice(slot * F, slot * F + 64)
        a, b = (dequantize(m[rows], IQ2).astype(np.float64) for m in (gate, up))
        want = weights[choice] * swiglu(a, b, x[choice // 2].astype(np.float64))
        assert cases.error(got[position].astype(np.float64), want) < 2 * TOLERANCE


def test_tiles_of_the_second_half_equal_the_float64_product():
    rng = np.random.default_rng(5)
    shape = TiledExpertShape(D, F, 2, CLAMP)
    down = cases.random_blocks(rng, 2 * D, F, Q2K)
    ids = np.array([[1, 0], [0, 1]])
    order, tiles, n_tiles = lists_of(ids, np.array([-1, 1]))
    h = rng.standard_normal((4, F)).astype(np.float16)
    y = cases.poisoned(4 * D)
    planes = cases.device_matrix(down, Q2K).planes
    gemm_experts._down_kernel(shape)[(1, n_tiles), 128](
        *planes, planes[0], tiles, order, cuda.to_device(h.view(np.uint32).reshape(-1)), y
    )
    got = y.copy_to_host().reshape(4, D)[:, :128]
    placed = order.copy_to_host()
    for position, choice in enumerate(placed[placed >= 0]):
        expert = ids.reshape(-1)[choice]
        rows = dequantize(down[expert * D : expert * D + 128], Q2K).astype(np.float64)
        assert cases.error(got[choice], rows @ h[position].astype(np.float64)) < TOLERANCE


def test_the_join_of_every_world_has_the_bits_of_one_rank():
    rng = np.random.default_rng(6)
    shape = TiledExpertShape(40, F, 3, CLAMP)
    ids, shard_of = np.array([[0, 2, 1], [1, 0, 2]]), np.array([5, 0, 5])
    y = rng.standard_normal((6, 40)).astype(np.float32)
    shared = rng.standard_normal((8, 2, 40)).astype(np.float32)

    def join(first, count):
        slots = np.where((shard_of >= first) & (shard_of < first + count), 0, -1)
        mine = np.where((slots[ids.reshape(-1)] >= 0)[:, None], y, np.float32(np.nan))
        out = cases.poisoned(80)
        parts = (
            cuda.to_device(mine.reshape(-1)),
            cuda.to_device(shared[first : first + count].reshape(-1)),
        )
        launch_join(
            0, shape, (i32(ids), i32(slots), i32(shard_of)), parts, out, 2,
            first_shard=first, n_shards=count,
        )  # fmt: skip
        return out.copy_to_host().reshape(2, 40)

    whole = join(0, 8)
    assert cases.error(whole, y.reshape(2, 3, 40).sum(axis=1) + shared.sum(axis=0)) < 1e-6
    for world in (2, 4, 8):
        parts = [join(8 // world * r, 8 // world) for r in range(world)]
        assert np.array_equal(tree_reference(np.stack(parts, axis=-1)), whole), world
