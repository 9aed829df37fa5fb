"""A world without faults: every size and order gives the same results and ends clean."""

from __future__ import annotations

import pytest

from tests.sim.harness import KEY, simulate


@pytest.fixture(scope="module")
def alone():
    outcome = simulate(1)
    assert outcome.error is None
    assert outcome.codes() == {0: 0}
    return outcome.result


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_every_world_returns_what_one_rank_returns_and_ends_clean(n, alone):
    outcome = simulate(n)
    assert outcome.error is None
    assert outcome.script_error is None
    assert outcome.result == alone
    assert outcome.codes() == dict.fromkeys(range(n), 0)


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 0, 3, 1]])
def test_the_order_of_arrival_changes_nothing(order, alone):
    outcome = simulate(4, order=order)
    assert outcome.result == alone
    assert outcome.codes() == dict.fromkeys(range(4), 0)
    assert list(outcome.head.peers) == [0, 1, 2, 3]


def test_a_cluster_key_on_both_sides_changes_nothing(alone):
    outcome = simulate(2, key=KEY)
    assert outcome.result == alone
    assert outcome.codes() == {0: 0, 1: 0}


def test_all_ranks_execute_the_same_steps_without_a_gap():
    outcome = simulate(4)
    sequences = [backend.executor.steps for backend in outcome.backends.values()]
    assert sequences == [[1, 2, 3, 4, 5, 6]] * 4


def test_every_rank_gets_all_offers_in_rank_order():
    outcome = simulate(4, order=[3, 1, 0, 2])
    expected = tuple(f"127.0.0.1 {rank}".encode() for rank in range(4))
    assert [backend.offers for backend in outcome.backends.values()] == [expected] * 4
