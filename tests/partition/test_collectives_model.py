"""Algebra of the collectives for 2 to 16 ranks, and the schedule of a step."""

import attrs
import numpy as np
import pytest

from ds4.errors import ConfigError
from ds4.ids import Position, SessionId, StepId, Token
from ds4.partition.collectives_model import (
    Kind,
    bytes_sent,
    canonical_join,
    logit_rows,
    neighbour_gather,
    one_shot_gather,
    ring_all_reduce,
    step_schedule,
    tree_all_reduce,
)
from ds4.partition.rules import Mode
from ds4.partition.shards import WORLDS, owned_shards, tree_sum
from ds4.steps import Chunk, Decode, StepPlan, Want
from tests.partition.models import FULL, shape_of

EP, TP = Mode.EXPERT_PARALLEL, Mode.TENSOR_PARALLEL
SHAPE = shape_of(FULL)
ALL_N = range(2, 17)


def integers(world, n=37):
    rng = np.random.default_rng(world)
    return [rng.integers(-(10**9), 10**9, n) for _ in range(world)]


def floats(world, n=64):
    rng = np.random.default_rng(world)
    return [
        (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(np.float32)
        for _ in range(world)
    ]


def bits(a):
    return a.view(np.uint32).tolist()


@pytest.mark.parametrize("world", ALL_N)
@pytest.mark.parametrize("reduce", [ring_all_reduce, tree_all_reduce])
def test_an_all_reduce_gives_the_true_sum_on_every_rank(reduce, world):
    inputs = integers(world)
    outcome = reduce(inputs)
    for result in outcome.results:
        assert result.tolist() == sum(inputs).tolist()


@pytest.mark.parametrize("world", ALL_N)
@pytest.mark.parametrize("gather", [one_shot_gather, neighbour_gather])
def test_a_gather_gives_every_contribution_in_rank_order(gather, world):
    inputs = integers(world)
    for result in gather(inputs).results:
        assert result.tolist() == np.stack(inputs).tolist()


@pytest.mark.parametrize("world", ALL_N)
def test_the_number_of_exchanges_is_the_least_that_completes(world):
    inputs = integers(world)
    log = (world - 1).bit_length()
    for model, expected in (
        (ring_all_reduce, 2 * (world - 1)),
        (tree_all_reduce, 2 * log),
        (neighbour_gather, world - 1),
    ):
        assert model(inputs).exchanges == expected
        assert all(r is not None for r in model(inputs, expected).results)
        assert any(r is None for r in model(inputs, expected - 1).results)


@pytest.mark.parametrize("world", ALL_N)
def test_a_single_exchange_is_complete_only_for_two_ranks(world):
    complete = all(r is not None for r in neighbour_gather(integers(world), 1).results)
    assert complete == (world == 2)


@pytest.mark.parametrize("world", ALL_N)
@pytest.mark.parametrize("reduce", [ring_all_reduce, tree_all_reduce])
def test_float_results_are_the_same_bits_on_all_ranks(reduce, world):
    results = reduce(floats(world)).results
    assert len({r.tobytes() for r in results}) == 1


@pytest.mark.parametrize("world", range(1, 17))
def test_the_worlds_that_are_admitted_are_those_that_join_to_the_canonical_tree(world):
    shards = np.stack(floats(8))
    whole = tree_sum(shards)
    if world not in WORLDS:
        with pytest.raises(ConfigError, match=f"got {world}"):
            canonical_join(floats(world))
        return
    parts = [tree_sum(shards[list(owned_shards(world, r))]) for r in range(world)]
    outcome = canonical_join(parts)
    assert len(outcome.results) == world
    for result in outcome.results:
        assert bits(result) == bits(whole)
    assert [r.tobytes() for r in tree_all_reduce(parts).results] == [whole.tobytes()] * world


def test_a_plain_ring_differs_from_the_canonical_tree_so_equality_is_not_free():
    shards = floats(8)
    assert bits(ring_all_reduce(shards).results[0]) != bits(tree_sum(np.stack(shards)))


@pytest.mark.parametrize("world", ALL_N)
def test_bytes_sent_follow_the_closed_forms(world):
    n = 16 * world  # whole chunks
    inputs = [np.zeros(n, np.float32)] * world
    size = 4 * n
    assert ring_all_reduce(inputs).sent_bytes == (2 * (world - 1) * size // world,) * world
    assert one_shot_gather(inputs).sent_bytes == ((world - 1) * size,) * world
    assert neighbour_gather(inputs).sent_bytes == ((world - 1) * size,) * world
    assert sum(tree_all_reduce(inputs).sent_bytes) == 2 * (world - 1) * size


@pytest.mark.parametrize("model", [ring_all_reduce, tree_all_reduce, neighbour_gather])
def test_one_rank_needs_no_exchange(model):
    (a,) = floats(1)
    outcome = model([a])
    assert outcome.exchanges == 0
    assert outcome.sent_bytes == (0,)
    assert bits(outcome.results[0].reshape(-1)) == bits(a)


def test_inputs_are_not_changed():
    inputs = floats(4)
    before = [a.tobytes() for a in inputs]
    for model in (ring_all_reduce, tree_all_reduce, one_shot_gather, neighbour_gather):
        model(inputs)
    assert [a.tobytes() for a in inputs] == before


def test_ranks_that_disagree_on_shape_are_named():
    with pytest.raises(ConfigError, match=r"rank 1 contributes float32 \(3,\), rank 0 float32"):
        ring_all_reduce([np.zeros(4, np.float32), np.zeros(3, np.float32)])
    with pytest.raises(ConfigError, match="at least one rank"):
        one_shot_gather([])


# --- the schedule ------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "joins"), [(EP, 43), (TP, 86)])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_step_joins_once_or_twice_per_layer_and_gathers_logits_under_tp(mode, joins, world):
    schedule = step_schedule(SHAPE, mode, world, n_rows=3, n_logit_rows=2)
    joined = [c for c in schedule if c.what != "logits"]
    assert len(joined) == joins
    assert {c.kind for c in joined} == {Kind.ALL_REDUCE if world == 2 else Kind.ALL_GATHER}
    assert {c.counts for c in joined} == {(3 * 4096,) * world}
    assert {c.dtype for c in schedule} == {"float32"}
    order = [(c.layer, c.what) for c in joined]
    parts = ["attention", "moe"] if mode is TP else ["moe"]
    assert order == [(layer, what) for layer in range(43) for what in parts]
    if mode is TP:
        assert schedule[-1].what == "logits"
        assert sum(schedule[-1].counts) == 2 * 129280
    else:
        assert schedule[-1].what == "moe"


def test_bytes_per_decoded_token_are_the_published_ones():
    tp = step_schedule(SHAPE, TP, 2, n_rows=1, n_logit_rows=0)
    ep = step_schedule(SHAPE, EP, 2, n_rows=1, n_logit_rows=1)
    assert bytes_sent(tp, 2, 0) == bytes_sent(tp, 2, 1) == 86 * 16_384 == 1_409_024
    assert bytes_sent(ep, 2, 0) == 43 * 16_384


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_sent_equal_what_the_modelled_join_sends(world):
    (one, *_rest) = step_schedule(SHAPE, EP, world, n_rows=5, n_logit_rows=0)
    inputs = [np.zeros(one.counts[r], np.float32) for r in range(world)]
    modelled = canonical_join(inputs).sent_bytes
    assert tuple(bytes_sent([one], world, r) for r in range(world)) == modelled


def test_uneven_vocabulary_slices_are_counted_per_rank():
    shape = attrs.evolve(SHAPE, n_vocab=1001)
    *_, logits = step_schedule(shape, TP, 4, n_rows=2, n_logit_rows=2)
    assert logits.counts == (500, 500, 500, 502)
    assert bytes_sent([logits], 4, 3) == 3 * 502 * 4


@pytest.mark.parametrize("mode", Mode)
def test_one_rank_and_empty_steps_run_no_collective(mode):
    assert step_schedule(SHAPE, mode, 1, n_rows=4, n_logit_rows=4) == ()
    assert step_schedule(SHAPE, mode, 4, n_rows=0, n_logit_rows=0) == ()


def test_logit_rows_follow_what_each_entry_wants():
    def chunk(session, want):
        return Chunk(session=SessionId(session), start=Position(0), tokens=[1, 2, 3], want=want)

    plan = StepPlan(
        step=StepId(1),
        prefill=(
            chunk(1, Want.NOTHING),
            chunk(2, Want.TOKEN),
            chunk(3, Want.TOKEN_AND_LOGITS),
            chunk(4, Want.ALL_LOGITS),
        ),
        decode=(Decode(session=SessionId(5), position=Position(7), token=Token(1)),),
    )
    assert logit_rows(plan) == 0 + 1 + 1 + 3 + 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: step_schedule(SHAPE, EP, 3, n_rows=1, n_logit_rows=0), "world must be one of"),
        (lambda: step_schedule(SHAPE, EP, 2, n_rows=1, n_logit_rows=2), "from 0 to 1, got 2"),
        (lambda: bytes_sent([], 2, 2), "rank must be from 0 to 1"),
    ],
)
def test_wrong_arguments_are_refused(call, text):
    with pytest.raises(ConfigError, match=text):
        call()
