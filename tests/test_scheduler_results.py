"""Reuse and rewinds, and what the scheduler makes of results, refusals and lost worlds."""

import numpy as np
import pytest

from ds4.errors import RemoteProtocolError
from ds4.requests import (
    Finished,
    FinishReason,
    PromptProgress,
    Started,
)
from ds4.sessions import CloseSession, OpenSession
from ds4.steps import Chunk, RowResult, StepResult
from tests.scheduler_world import V, World, kinds, rows


def test_a_second_turn_runs_only_what_is_new():
    w = World(token=5)
    w.run(w.submit(range(40), max_tokens=3))
    # The last token was sampled but never fed, so it is not in the session.
    second = w.submit([*range(40), 5, 5, 5, 60], max_tokens=1)
    decision = w.plan()
    assert decision.commands == ()
    assert rows(decision.step) == ([(1, 42, 2)], [])
    events = w.scheduler.apply(w.result(decision.step))
    assert events[0] == PromptProgress(request=second, cached=42, done=44, total=44)
    assert w.scheduler.statistics().reused_tokens == 42


def test_a_session_is_in_no_step_until_its_rewind_is_known():
    w = World(n_slots=1)
    w.run(w.submit(range(40), max_tokens=3))
    w.submit(range(40), max_tokens=1)
    decision = w.scheduler.plan(0.0)
    (rewind,) = decision.commands
    assert (rewind.session, rewind.length) == (1, 39)
    assert decision.step is None
    assert w.scheduler.plan(0.0).step is None
    w.scheduler.rewound(1, 39)
    assert rows(w.scheduler.plan(0.0).step) == ([(1, 39, 1)], [])


def test_a_rewind_that_keeps_less_runs_more_of_the_prompt():
    w = World(n_slots=1)
    w.run(w.submit(range(40), max_tokens=3))
    r = w.submit(range(40), max_tokens=1)
    w.scheduler.plan(0.0)
    w.scheduler.rewound(1, 20)
    decision = w.scheduler.plan(0.0)
    assert decision.commands == ()
    assert rows(decision.step) == ([(1, 20, 20)], [])
    events = w.scheduler.apply(w.result(decision.step))
    assert events[0] == PromptProgress(request=r, cached=20, done=40, total=40)
    assert w.scheduler.statistics().reused_tokens == 20


def test_a_slot_stays_busy_until_its_rewind_is_known_even_when_nobody_wants_it_any_more():
    w = World(n_slots=1)
    w.run(w.submit(range(40), max_tokens=3))
    r = w.submit(range(40), max_tokens=1)
    w.scheduler.plan(0.0)
    w.scheduler.cancel(r)
    later = w.submit(range(45), max_tokens=1)
    assert w.scheduler.plan(0.0).events == ()
    w.scheduler.rewound(1, 20)
    decision = w.scheduler.plan(0.0)
    assert decision.events == (Started(request=later),)
    assert rows(decision.step) == ([(1, 20, 25)], [])


@pytest.mark.parametrize("length", [-1, 40])
def test_a_rewind_cannot_keep_more_than_was_asked_for(length):
    w = World(n_slots=1)
    w.run(w.submit(range(40), max_tokens=3))
    w.submit(range(40), max_tokens=1)
    w.scheduler.plan(0.0)
    with pytest.raises(RemoteProtocolError, match=f"at most 39 tokens and has kept {length}"):
        w.scheduler.rewound(1, length)


def test_a_chunk_ends_with_the_system_prompt():
    """Executors can go back to the end of a chunk; the next conversation branches off there."""
    w = World(n_slots=1)
    w.submit(range(50), system_tokens=30, max_tokens=1)
    assert rows(w.step()[0]) == ([(1, 0, 30)], [])
    assert rows(w.step()[0]) == ([(1, 30, 20)], [])


def test_an_unasked_rewind_outcome_is_a_protocol_error():
    w = World()
    w.submit([1])
    w.plan()
    with pytest.raises(RemoteProtocolError, match="session 1 was not asked to rewind"):
        w.scheduler.rewound(1, 39)


# --- results -----------------------------------------------------------------------------------


def test_a_second_plan_before_the_result_is_a_bug_of_the_caller():
    w = World()
    w.submit([1])
    w.plan()
    with pytest.raises(RuntimeError, match="step 1 has not been applied"):
        w.plan()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (StepResult(step=2), "result of step 2, outstanding is 1"),
        (StepResult(step=1), r"results for sessions \[\], expected \[1, 2\]"),
        (
            StepResult(step=1, rows=(RowResult(session=2, token=1), RowResult(session=1, token=1))),
            r"sessions \[2, 1\], expected \[1, 2\]",
        ),
        (
            StepResult(step=1, rows=(RowResult(session=1), RowResult(session=2, token=1))),
            "session 1: None is no token",
        ),
        (
            StepResult(step=1, rows=(RowResult(session=1, token=V), RowResult(session=2, token=1))),
            "session 1: 1000 is no token",
        ),
        (
            StepResult(step=1, rows=(RowResult(session=1, token=1), RowResult(session=2, token=1))),
            "session 2: logits of 0 rows, expected 1",
        ),
        (
            StepResult(
                step=1,
                rows=(
                    RowResult(session=1, token=1, logits=np.zeros((1, V), np.float32)),
                    RowResult(session=2, token=1, logits=np.zeros((1, V), np.float32)),
                ),
            ),
            "session 1: logits of 1 rows, expected 0",
        ),
    ],
)
def test_a_result_that_does_not_fit_the_plan_changes_nothing(result, text):
    w = World()
    w.submit([1])
    w.submit([2], want_logits=True)
    plan = w.plan().step
    with pytest.raises(RemoteProtocolError, match=text):
        w.scheduler.apply(result)
    assert kinds(w.scheduler.apply(w.result(plan))) == ["PromptProgress", "TokenEvent"] * 2


def test_a_result_without_a_plan_is_refused():
    w = World()
    with pytest.raises(RemoteProtocolError, match="outstanding is none"):
        w.scheduler.apply(StepResult(step=1))


def test_a_refused_step_fails_one_request_and_the_others_are_planned_again():
    w = World()
    a, b = w.submit([1, 2, 3]), w.submit([4, 5, 6])
    plan = w.plan().step
    (event,) = w.scheduler.refused(plan.step, plan.prefill[0].session, "start 0, length 7")
    assert event == Finished(request=a, reason=FinishReason.FAILED, text="start 0, length 7")
    decision = w.plan()
    assert decision.commands == (CloseSession(session=1),)
    assert (decision.step.step, rows(decision.step)) == (2, ([(2, 0, 3)], []))
    assert w.scheduler.session_of(b) == 2


@pytest.mark.parametrize(
    ("step", "session", "text"),
    [(2, 1, "step 2, which is not outstanding"), (1, 9, "step 1 for session 9, not in it")],
)
def test_a_refusal_of_something_else_changes_nothing(step, session, text):
    w = World()
    w.submit([1])
    plan = w.plan().step
    with pytest.raises(RemoteProtocolError, match=text):
        w.scheduler.refused(step, session, "x")
    assert w.scheduler.apply(w.result(plan))


def test_a_lost_world_ends_everything_and_the_next_epoch_starts_empty():
    w = World(n_slots=1)
    running, waiting = w.submit(range(40)), w.submit([2])
    w.plan()
    events = w.scheduler.fail_all("rank 1 lost")
    assert [(e.request, e.reason, e.text) for e in events] == [
        (running, FinishReason.FAILED, "rank 1 lost"),
        (waiting, FinishReason.FAILED, "rank 1 lost"),
    ]
    w.submit(range(40))
    decision = w.plan()
    assert decision.commands == (OpenSession(session=2, n_ctx=32768),)
    assert isinstance(decision.step.prefill[0], Chunk)
    assert decision.step.prefill[0].start == 0


def test_statistics_are_a_snapshot():
    w = World(n_slots=2)
    before = w.scheduler.statistics()
    w.run(w.submit([1, 2, 3], max_tokens=2))
    after = w.scheduler.statistics()
    assert before.submitted == 0
    assert after.steps == 2
    assert (after.prompt_tokens, after.generated_tokens, after.kept_tokens) == (3, 2, 4)
    assert (after.slots, after.open_sessions) == (2, 1)
    assert dict(after.finished)[FinishReason.LENGTH] == 1
    with pytest.raises(AttributeError):
        after.steps = 7
