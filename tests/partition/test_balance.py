"""Closed forms are pinned to the corrected figures; the counters measure what they say."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import ConfigError
from ds4.partition.balance import (
    BalanceCounters,
    coverage,
    expected_distinct,
    expected_hottest,
    read_bound,
)
from ds4.partition.placement import LayerPlacement, Placement

# E = 256, k = 6: tokens, distinct, coverage in percent, bound for N = 2, 4, 8.
DEEPSEEK = [
    (1, 6.0, 2.3, 2.00, 4.00, 8.00),
    (8, 44.2, 17.3, 2.00, 4.00, 5.79),
    (16, 80.8, 31.6, 2.00, 3.17, 3.17),
    (32, 136.2, 53.2, 1.880, 1.880, 1.880),
    (64, 199.9, 78.1, 1.281, 1.281, 1.281),
    (128, 243.7, 95.2, 1.0505, 1.0505, 1.0505),
    (256, 255.4, 99.8, 1.0023, 1.0023, 1.0023),
]


@pytest.mark.parametrize("row", DEEPSEEK)
def test_the_whole_published_table_holds(row):
    tokens, distinct, percent, *bounds = row
    d = expected_distinct(256, 6, tokens)
    assert d == pytest.approx(distinct, abs=0.051)  # the table rounds 136.149 up
    assert round(100 * coverage(256, 6, tokens), 1) == percent
    for world, bound in zip((2, 4, 8), bounds, strict=True):
        # As many digits as the table gives; 1.880 is 1.8803.
        tolerance = 0.005 if bound >= 2 else 0.001 if bound > 1.5 else 0.0005
        assert read_bound(256, d, world) == pytest.approx(bound, abs=tolerance)


def test_the_corrected_excess_is_the_same_for_every_world():
    """An earlier version of these figures (+4.8, +4.6, +4.2 %) depended on N; it was wrong."""
    for tokens, percent in ((64, 28.1), (128, 5.05), (256, 0.23)):
        d = expected_distinct(256, 6, tokens)
        excess = {round(100 * (read_bound(256, d, n) - 1), 6) for n in (2, 4, 8)}
        assert len(excess) == 1
        assert excess.pop() == pytest.approx(percent, abs=0.05 if percent > 1 else 0.005)


def test_glm_figures():
    assert round(read_bound(256, expected_distinct(256, 8, 64), 2), 3) == 1.151
    assert round(read_bound(256, expected_distinct(256, 8, 128), 2), 4) == 1.0175


def test_the_hottest_of_two_ranks_reads_3_93_of_6_experts():
    assert round(expected_hottest(256, 6, 2), 2) == 3.93
    assert expected_hottest(256, 6, 1) == 6.0


@pytest.mark.parametrize(("n", "k", "world"), [(8, 3, 2), (8, 3, 4), (8, 5, 8), (12, 4, 3)])
def test_expected_hottest_equals_enumeration(n, k, world):
    per_rank = n // world
    hottest = [
        max(sum(1 for e in chosen if e // per_rank == r) for r in range(world))
        for chosen in combinations(range(n), k)
    ]
    assert expected_hottest(n, k, world) == pytest.approx(sum(hottest) / comb(n, k))


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_no_choice_of_distinct_experts_exceeds_the_bound(per_rank, world, data):
    n = per_rank * world
    chosen = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    most = max(sum(1 for e in chosen if e // per_rank == r) for r in range(world))
    ratio = most / (len(chosen) / world)
    assert ratio <= read_bound(n, len(chosen), world) * (1 + 1e-12)


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_the_bound_is_reached(per_rank, world, data):
    n = per_rank * world
    d = data.draw(st.integers(1, n))
    most = min(per_rank, d)  # fill rank 0 first
    assert most / (d / world) == pytest.approx(read_bound(n, d, world))


def test_counters_tell_tokens_from_distinct_experts():
    placement = Placement.contiguous(2, 16)
    counters = BalanceCounters(2, 16)
    counters.record(0, np.array([[0, 1], [0, 1], [0, 1]]))  # all on shard 0
    counters.record(1, np.array([[0, 15], [1, 14], [2, 13]]))
    counters.end_step()
    report = counters.report(placement, 2)
    assert report.steps == 1
    assert report.tokens == (9, 3)
    assert report.distinct == (5, 3)
    assert report.token_ratio == pytest.approx(1.5)
    assert report.distinct_ratio == pytest.approx(1.25)
    assert report.mean_distinct == 4.0


@given(st.integers(0, 2**32 - 1))
def test_an_interval_counted_on_a_device_gives_the_same_report(seed):
    rng = np.random.default_rng(seed)
    steps = [[rng.integers(0, 16, (3, 4)) for _ in range(2)] for _ in range(5)]
    one, other = BalanceCounters(2, 16), BalanceCounters(2, 16)
    tokens = np.zeros((2, 16), np.int64)
    active = np.zeros((2, 16), np.int64)
    for step in steps:
        for layer, ids in enumerate(step):
            one.record(layer, ids)
            counts = np.bincount(ids.reshape(-1), minlength=16)
            tokens[layer] += counts
            active[layer] += counts > 0
        one.end_step()
    other.add_interval(tokens, active, 5)
    placement = Placement.balanced(2, 16, {1: one.histogram(1)})
    for world in (1, 2, 4, 8):
        assert one.report(placement, world) == other.report(placement, world)


def test_a_measured_histogram_improves_the_measured_balance():
    rng = np.random.default_rng(3)
    counters = BalanceCounters(1, 32)
    for _ in range(50):
        counters.record(0, np.minimum(rng.geometric(0.1, (16, 4)) - 1, 31))
        counters.end_step()
    before = counters.report(Placement.contiguous(1, 32), 4)
    placement = Placement(layers=(LayerPlacement.balanced(counters.histogram(0)),))
    assert counters.report(placement, 4).token_ratio < before.token_ratio / 1.5


def test_reset_starts_from_nothing():
    counters = BalanceCounters(1, 8)
    counters.record(0, np.array([[1, 2]]))
    counters.end_step()
    counters.reset()
    report = counters.report(Placement.contiguous(1, 8), 2)
    assert (report.steps, report.tokens, report.distinct) == (0, (0, 0), (0, 0))
    assert report.token_ratio == report.distinct_ratio == 1.0
    assert report.mean_distinct == 0.0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: coverage(8, 9, 1), "experts per token must be from 1 to 8, got 9"),
        (lambda: coverage(8, 2, -1), "n_tokens must be >= 0"),
        (lambda: read_bound(8, 0, 2), "distinct experts must be above 0"),
        (lambda: read_bound(8, 9, 2), "up to 8, got 9"),
        (lambda: read_bound(8, 1, 0), "world must be >= 1"),
        (lambda: expected_hottest(8, 2, 3), "world must divide 8 experts, got 3"),
        (lambda: BalanceCounters(0, 8), "layers and experts"),
        (lambda: BalanceCounters(1, 8).record(1, np.array([0])), "layer must be from 0 to 0"),
        (lambda: BalanceCounters(1, 8).record(0, np.array([8])), "expert ids"),
        (lambda: BalanceCounters(1, 8).report(Placement.contiguous(1, 16), 2), "placement is for"),
        (
            lambda: BalanceCounters(1, 2).add_interval(np.ones((1, 2)), np.ones((1, 2)), 0),
            "at most every step",
        ),
        (
            lambda: BalanceCounters(1, 2).add_interval(np.ones((2, 2)), np.ones((1, 2)), 1),
            r"counts must be \(1, 2\)",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, text):
    with pytest.raises(ConfigError, match=text):
        call()
