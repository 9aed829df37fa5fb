"""The memory guard reproduces the published cases and explains itself."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import ConfigError
from ds4.partition.memory import (
    GIB,
    MemoryBudget,
    MemoryKind,
    MemoryPlan,
    admit,
    model_span,
    partial_state_bytes,
    session_rows_bytes,
)
from tests.partition.models import FULL, shape_of

SHAPE = shape_of(FULL)
sizes = st.integers(0, 2**66)


def unified(gib, free=None):
    return MemoryBudget(
        kind=MemoryKind.UNIFIED,
        physical_bytes=gib * GIB,
        free_bytes=(gib if free is None else free) * GIB,
    )


def case(sessions, **changes):
    plan = MemoryPlan(
        model_bytes=60 * GIB,
        artifact_bytes=10 * GIB,
        workspace_bytes=2 * GIB,
        ordered_reduce_bytes=1 * GIB,
        sessions=sessions,
        session_bytes=GIB,
    )
    return attrs.evolve(plan, **changes)


@pytest.mark.parametrize(("sessions", "gib"), [(1, 74), (8, 81), (16, 89)])
def test_the_reference_cases_fit_128_gib_of_unified_memory(sessions, gib):
    verdict = admit(case(sessions), unified(128))
    assert verdict.required_bytes == gib * GIB
    assert verdict.budget_bytes == 96 * GIB
    assert verdict.admitted
    fast = admit(case(sessions, fast_artifact_bytes=5 * GIB), unified(128))
    assert fast.required_bytes == (gib + 5) * GIB


def test_without_ordered_reduction_its_buffer_is_not_counted():
    assert admit(case(1, ordered_reduce_bytes=0), unified(128)).required_bytes == 73 * GIB


def test_a_96_gib_working_set_refuses_74_with_the_subtraction():
    verdict = admit(case(1), unified(128, free=96), who="rank 1")
    assert (verdict.admitted, verdict.reason) == (False, "over_budget")
    assert verdict.budget_bytes == 64 * GIB
    assert verdict.text.splitlines() == [
        "rank 1: budget 64.00 GiB = working set 96.00 GiB (the smaller of 128.00 GiB physical and"
        " 96.00 GiB free) - reserve 32.00 GiB (unified memory)",
        "rank 1: serving 74.00 GiB = model 60.00 GiB + artifacts 10.00 GiB + workspace 2.00 GiB"
        " + ordered reduce 1.00 GiB + 1 session 1.00 GiB",
        "rank 1: loading at most 70.00 GiB, staging 0.00 GiB included",
        "rank 1: refused: 74.00 GiB is over the budget of 64.00 GiB by 10.00 GiB",
    ]


def test_the_budget_is_exact_to_the_byte():
    plan = case(8)
    need = plan.required_bytes
    room = MemoryBudget(kind=MemoryKind.UNIFIED, physical_bytes=2**50, free_bytes=need + 32 * GIB)
    assert admit(plan, room).admitted
    assert not admit(plan, attrs.evolve(room, free_bytes=room.free_bytes - 1)).admitted


def test_a_budget_of_zero_shows_the_subtraction_that_led_to_it():
    verdict = admit(case(1), unified(128, free=20))
    assert verdict.budget_bytes == 0
    assert "working set 20.00 GiB" in verdict.text
    assert "reserve 32.00 GiB (unified memory), taken as 0" in verdict.text


def test_a_discrete_device_keeps_the_larger_of_2_gib_and_3_percent():
    small = MemoryBudget(kind=MemoryKind.DISCRETE, physical_bytes=24 * GIB, free_bytes=24 * GIB)
    large = MemoryBudget(kind=MemoryKind.DISCRETE, physical_bytes=141 * GIB, free_bytes=140 * GIB)
    assert small.reserve == 2 * GIB
    assert large.reserve == -(-141 * GIB * 3 // 100)
    assert large.budget_bytes == 140 * GIB - large.reserve
    assert attrs.evolve(large, reserve_bytes=0).budget_bytes == 140 * GIB


def test_zero_sessions_are_refused_however_much_room_there_is():
    verdict = admit(case(0), unified(4096))
    assert (verdict.admitted, verdict.reason) == (False, "no_sessions")


@pytest.mark.parametrize(
    "changes",
    [
        {"model_bytes": 2**64},
        {"model_bytes": 2**64 - 14 * GIB},
        {"sessions": 2**40, "session_bytes": 2**40},  # the product is 2**80: 0 if it wrapped
        {"sessions": 2**32, "session_bytes": 2**32},
        {"load_bytes": 2**64},
    ],
)
def test_a_plan_beyond_64_bits_saturates_and_is_refused(changes):
    endless = MemoryBudget(kind=MemoryKind.DISCRETE, physical_bytes=2**80, free_bytes=2**80)
    verdict = admit(attrs.evolve(case(1), **changes), endless)
    assert (verdict.admitted, verdict.reason) == (False, "overflow")
    assert verdict.required_bytes == 2**64 - 1


@given(sizes, sizes, sizes, sizes, sizes, st.integers(0, 2**34), sizes, sizes, sizes)
def test_admission_is_the_stated_inequality(m, a, w, o, f, n, s, load, free):
    plan = MemoryPlan(
        model_bytes=m,
        artifact_bytes=a,
        workspace_bytes=w,
        ordered_reduce_bytes=o,
        fast_artifact_bytes=f,
        sessions=n,
        session_bytes=s,
        load_bytes=load,
    )
    budget = MemoryBudget(kind=MemoryKind.UNIFIED, physical_bytes=2**67, free_bytes=free)
    exact = max(m + a + w + o + f + n * s, m + a + f + load)
    expected = n >= 1 and exact < 2**64 - 1 and exact <= free - 32 * GIB
    assert admit(plan, budget).admitted == expected


def test_peak_load_memory_counts_when_it_is_the_larger():
    """An engine that reads everything and narrows afterwards needs the whole file at once."""
    plan = case(1, load_bytes=40 * GIB)
    assert plan.required_bytes == 110 * GIB
    assert not admit(plan, unified(128)).admitted


def test_deepseek_needs_44_5_gib_on_each_of_two_ranks():
    routed = 77_913_391_104
    replicated = 86_714_775_900 - routed
    assert round(routed / GIB, 2) == 72.56
    assert round(replicated / GIB, 2) == 8.20
    assert round(model_span(routed, replicated, 2) / GIB, 2) == 44.48
    assert round(model_span(routed, replicated, 4) / GIB, 1) == 26.3


def test_glm_is_refused_on_two_unified_machines_of_128_gib_and_admitted_on_four():
    routed, replicated = round(177.2 * GIB), round(19.4 * GIB)
    verdicts = {}
    for world in (2, 4):
        plan = MemoryPlan(model_bytes=model_span(routed, replicated, world), sessions=1)
        verdicts[world] = admit(plan, unified(128), who=f"world {world}")
    assert not verdicts[2].admitted
    assert round(verdicts[2].required_bytes / GIB) == 108
    assert verdicts[4].admitted
    assert round(verdicts[4].required_bytes / GIB, 1) == 63.7
    assert "32.30 GiB left" in verdicts[4].text


@pytest.mark.parametrize(
    ("n_ctx", "f16", "f32"),
    [(32 * 1024, 231e6, 462e6), (256 * 1024, 1.81e9, 3.62e9), (1024 * 1024, 7.22e9, 14.44e9)],
)
def test_kv_rows_have_the_published_sizes(n_ctx, f16, f32):
    assert session_rows_bytes(SHAPE, n_ctx, 2) == pytest.approx(f16, rel=2e-3)
    assert session_rows_bytes(SHAPE, n_ctx, 4) == pytest.approx(f32, rel=2e-3)


def test_kv_rows_grow_by_3440_elements_a_token_on_top_of_the_raw_windows():
    assert session_rows_bytes(SHAPE, 128 * 1000, 2) == 2 * (3440 * 128_000 + 43 * 128 * 512)


def test_partial_windows_take_12206080_bytes():
    assert partial_state_bytes(SHAPE) == 12_206_080


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: case(-1), "sessions must be a whole number"),
        (lambda: case(1, model_bytes=1.5), "model_bytes must be a whole number of bytes >= 0"),
        (lambda: case(1, model_bytes=True), "model_bytes must be a whole number"),
        (lambda: unified(-1), "physical_bytes must be"),
        (lambda: attrs.evolve(unified(1), reserve_bytes=-1), "reserve_bytes must be"),
        (lambda: model_span(1, 1, 0), "world must be >= 1"),
        (lambda: session_rows_bytes(SHAPE, 0, 2), "n_ctx must be >= 1"),
        (lambda: session_rows_bytes(SHAPE, 1, 3), "element_bytes must be 2 or 4"),
    ],
)
def test_wrong_sizes_are_named(call, text):
    with pytest.raises(ConfigError, match=text):
        call()
