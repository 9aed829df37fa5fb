"""Decode matmuls against float64 products, and the bits that must not depend on the launch."""

import cases
import numpy as np
import pytest

from ds4.cuda.kernels.quant_matmul import Projections, Q8Matvec, ShardedQ8Matvec
from ds4.cuda.kernels.reduce import shard_blocks, tree_reference
from ds4.errors import ConfigError
from ds4.gguf.constants import QuantType

Q8, F16 = QuantType.Q8_0, QuantType.F16


def setup(rows, k, kind=Q8, batch=1, seed=0):
    rng = np.random.default_rng(seed)
    blocks = cases.random_blocks(rng, rows, k, kind)
    x = rng.standard_normal((batch, k)).astype(np.float32)
    return blocks, x


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("rows", "k", "batch"), [(1, 32, 1), (5, 544, 1), (3, 1056, 2)])
def test_q8_0_rows_equal_the_float64_product(rows, k, batch, exact):
    blocks, x = setup(rows, k, batch=batch)
    device_x, rounded = cases.activations(x)
    out = cases.poisoned(batch, rows)
    matvec = Q8Matvec(batch, cases.device_matrix(blocks, Q8), exact=exact, warps=1)
    matvec(0, device_x, out)
    want = cases.product(blocks, Q8, x if exact else rounded)
    assert cases.error(out.copy_to_host(), want) < cases.EXACT_TOLERANCE


@pytest.mark.parametrize(("rows", "k", "batch"), [(1, 8, 1), (3, 264, 2), (2, 512, 1)])
def test_f16_rows_equal_the_float64_product(rows, k, batch):
    blocks, x = setup(rows, k, F16, batch)
    device_x = (
        cases.activations(x)[0] if k % 32 == 0 else cases.Activations(cases.cuda.to_device(x))
    )
    out = cases.poisoned(batch, rows)
    Projections(batch, f16=cases.device_matrix(blocks, F16), warps=1)(0, device_x, None, out)
    assert cases.error(out.copy_to_host(), cases.product(blocks, F16, x)) < cases.EXACT_TOLERANCE


def test_f16_splits_add_up_to_the_whole_row():
    blocks, x = setup(3, 512, F16)
    out = cases.poisoned(1, 12)
    launch = Projections(1, f16=cases.device_matrix(blocks, F16), splits=4, warps=1)
    launch(0, cases.activations(x)[0], None, out)
    got = out.copy_to_host().reshape(4, 3).sum(axis=0)
    assert cases.error(got, cases.product(blocks, F16, x)[0]) < cases.EXACT_TOLERANCE


def test_stacked_projections_write_both_outputs_in_one_launch():
    q8_blocks, x = setup(3, 256)
    f16_blocks, _ = setup(5, 256, F16, seed=4)
    device_x, rounded = cases.activations(x)
    q8_out, f16_out = cases.poisoned(1, 3), cases.poisoned(1, 5)
    launch = Projections(
        1, q8=cases.device_matrix(q8_blocks, Q8), f16=cases.device_matrix(f16_blocks, F16), warps=1
    )
    launch(0, device_x, q8_out, f16_out)
    q8_want, f16_want = cases.product(q8_blocks, Q8, rounded), cases.product(f16_blocks, F16, x)
    assert cases.error(q8_out.copy_to_host(), q8_want) < cases.EXACT_TOLERANCE
    assert cases.error(f16_out.copy_to_host(), f16_want) < cases.EXACT_TOLERANCE


def test_each_output_group_reads_its_own_slice_of_the_input():
    rng = np.random.default_rng(3)
    blocks = cases.random_blocks(rng, 8, 64, Q8)
    x = rng.standard_normal((1, 128)).astype(np.float32)
    device_x, _ = cases.activations(x)
    out = cases.poisoned(1, 8)
    Q8Matvec(1, cases.device_matrix(blocks, Q8), exact=True, groups=2, warps=1)(0, device_x, out)
    want = np.concatenate(
        [
            cases.product(blocks[4 * g : 4 * g + 4], Q8, x[:, 64 * g : 64 * g + 64])[0]
            for g in (0, 1)
        ]
    )
    assert cases.error(out.copy_to_host()[0], want) < cases.EXACT_TOLERANCE


@pytest.mark.parametrize("exact", [False, True])
def test_a_row_s_bits_do_not_depend_on_the_bucket_or_the_row_slice(exact):
    blocks, x = setup(5, 1056, batch=4)
    results = {}
    for batch, first in ((1, 0), (2, 0), (4, 0), (1, 2)):
        device_x, _ = cases.activations(x[:batch])
        weight = cases.device_matrix(blocks, Q8).row_range(first, 5 - first)
        out = cases.poisoned(batch, 5 - first)
        Q8Matvec(batch, weight, exact=exact, warps=1)(0, device_x, out)
        results[batch, first] = out.copy_to_host()
    assert np.array_equal(results[4, 0][:1], results[1, 0])
    assert np.array_equal(results[4, 0][:2], results[2, 0])
    assert np.array_equal(results[4, 0][:1, 2:], results[1, 2])


@pytest.mark.parametrize("total_k", [128, 640])
@pytest.mark.parametrize("exact", [False, True])
def test_every_world_s_subtrees_join_to_the_bits_of_one_rank(total_k, exact):
    blocks, x = setup(2, total_k)
    n_blocks = total_k // 32

    def subtree(first, count):
        low, high = (shard_blocks(n_blocks, v) for v in (first, first + count))
        if low == high:
            return np.zeros((1, 2), np.float32)
        weight = cases.device_matrix(np.ascontiguousarray(blocks[:, 34 * low : 34 * high]), Q8)
        device_x, _ = cases.activations(np.ascontiguousarray(x[:, 32 * low : 32 * high]))
        out = cases.poisoned(1, 2)
        launch = ShardedQ8Matvec(
            1, weight, total_k=total_k, first_shard=first, n_shards=count, exact=exact, warps=1
        )
        launch(0, device_x, out)
        return out.copy_to_host()

    whole = subtree(0, 8)
    rounded = cases.activations(x)[1]
    want = cases.product(blocks, Q8, x if exact else rounded)
    assert cases.error(whole, want) < cases.EXACT_TOLERANCE
    for world in (2, 4, 8):
        parts = [subtree(8 // world * r, 8 // world) for r in range(world)]
        assert np.array_equal(tree_reference(np.stack(parts, axis=-1)), whole), world


def test_wrong_launches_are_refused_by_name():
    weight = cases.device_matrix(setup(2, 128)[0], Q8)
    with pytest.raises(ConfigError, match="bucket"):
        Q8Matvec(3, weight)
    with pytest.raises(ConfigError, match="subtree"):
        ShardedQ8Matvec(1, weight, total_k=64, first_shard=1, n_shards=2)
    with pytest.raises(ConfigError, match="hold 2 blocks of a row, the matrix 4"):
        ShardedQ8Matvec(1, weight, total_k=512, n_shards=1)
    with pytest.raises(ConfigError, match="quants and scales"):
        Q8Matvec(1, weight)(0, cases.Activations(cases.poisoned(1, 128)), cases.poisoned(1, 2))
