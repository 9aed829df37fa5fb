"""Tensor-core matmuls against float64 products of the same halves.

IQ2_XXS and Q2_K tiles are tested in `test_gemm_experts.py`, where models use them.
"""

import cases
import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels.gemm import ShardedMatmul, TiledMatmul, launch_to_half
from ds4.cuda.kernels.reduce import shard_blocks, tree_reference
from ds4.cuda.layout import iq2_xxs_selectors
from ds4.errors import ConfigError
from ds4.gguf.constants import QuantType

Q8, F16 = QuantType.Q8_0, QuantType.F16
# A Q8_0 weight is rounded to 11 bits; F16 weights are exact.
TOLERANCE = {F16: cases.EXACT_TOLERANCE, Q8: 5e-4}


def setup(kind, rows, k, tokens, seed=0):
    rng = np.random.default_rng(seed)
    blocks = cases.random_blocks(rng, rows, k, kind)
    x = rng.standard_normal((tokens, k)).astype(np.float16)
    return blocks, x, cuda.to_device(x.view(np.uint32).reshape(-1))


def selectors():
    return cuda.to_device(iq2_xxs_selectors())


@pytest.mark.parametrize(
    ("kind", "rows", "k", "tokens"),
    [(Q8, 130, 64, 1), (Q8, 3, 32, 129), (F16, 5, 64, 3)],
)
def test_a_tiled_product_equals_the_float64_product(kind, rows, k, tokens):
    blocks, x, device_x = setup(kind, rows, k, tokens)
    out = cases.poisoned(tokens * rows)
    matmul = TiledMatmul(cases.device_matrix(blocks, kind), selectors())
    matmul(0, device_x, k, tokens, out)
    got = out.copy_to_host().reshape(tokens, rows)
    assert cases.error(got, cases.product(blocks, kind, x)) < TOLERANCE[kind]


def test_a_token_s_bits_do_not_depend_on_the_other_tokens():
    blocks, x, _ = setup(Q8, 5, 64, 4)
    results = []
    for tokens in (x, x[2:3]):
        out = cases.poisoned(len(tokens) * 5)
        device_x = cuda.to_device(np.ascontiguousarray(tokens).view(np.uint32).reshape(-1))
        matmul = TiledMatmul(cases.device_matrix(blocks, Q8), selectors())
        matmul(0, device_x, 64, len(tokens), out)
        results.append(out.copy_to_host().reshape(-1, 5))
    assert np.array_equal(results[0][2:3], results[1])


def test_every_world_s_subtrees_join_to_the_bits_of_one_rank():
    blocks, x, _ = setup(Q8, 3, 64, 2)  # two blocks of 32: six shards are empty

    def subtree(first, count):
        low, high = shard_blocks(2, first), shard_blocks(2, first + count)
        columns = np.ascontiguousarray(blocks[:, 34 * low : 34 * high])
        mine = np.ascontiguousarray(x[:, 32 * low : 32 * high])
        matmul = ShardedMatmul(
            cases.device_matrix(columns, Q8),
            selectors(),
            total_k=64,
            first_shard=first,
            n_shards=count,
        )
        out, parts = cases.poisoned(6), cases.poisoned(matmul.parts_size(2))
        matmul(
            0, cuda.to_device(mine.view(np.uint32).reshape(-1)), 32 * (high - low), 2, parts, out
        )
        return out.copy_to_host().reshape(2, 3)

    whole = subtree(0, 8)
    assert cases.error(whole, cases.product(blocks, Q8, x)) < TOLERANCE[Q8]
    parts = [subtree(4 * r, 4) for r in range(2)]
    assert np.array_equal(tree_reference(np.stack(parts, axis=-1)), whole)


def test_rounding_to_halves_is_numpy_s():
    x = np.random.default_rng(1).standard_normal((3, 24)).astype(np.float32)
    halves = cuda.to_device(np.zeros(36, np.uint32))
    launch_to_half(0, cuda.to_device(x), halves)
    assert np.array_equal(halves.copy_to_host().view(np.float16), x.astype(np.float16).reshape(-1))


def test_groups_that_cut_a_tile_are_refused():
    with pytest.raises(ConfigError, match="whole tiles"):
        TiledMatmul(cases.device_matrix(setup(Q8, 8, 32, 1)[0], Q8), selectors(), groups=2)
