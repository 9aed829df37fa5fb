"""What callers may ask of the scheduler, one claim at a time."""

import pytest

from ds4.errors import ConfigError, ContextOverflow, InvalidRequest, Overloaded
from ds4.requests import (
    Finished,
    FinishReason,
    PromptLogits,
    PromptProgress,
    SchedulerConfig,
    Started,
    TokenEvent,
)
from ds4.sampling import SamplingParams
from ds4.sessions import OpenSession
from ds4.steps import Want
from tests.scheduler_world import GREEDY, V, World, kinds, rows


def test_a_request_runs_its_prompt_in_chunks_and_then_decodes():
    w = World(prefill_chunk=4)
    r = w.submit(range(10), max_tokens=2)
    decision = w.plan()
    assert decision.commands == (OpenSession(session=1, n_ctx=32768),)
    assert decision.events == (Started(request=r),)
    assert rows(decision.step) == ([(1, 0, 4)], [])
    assert decision.step.prefill[0].want == Want.NOTHING
    assert w.scheduler.apply(w.result(decision.step)) == (
        PromptProgress(request=r, cached=0, done=4, total=10),
    )
    assert rows(w.step()[0]) == ([(1, 4, 4)], [])
    plan, events = w.step()
    assert rows(plan) == ([(1, 8, 2)], [])
    assert plan.prefill[0].want == Want.TOKEN
    assert kinds(events) == ["PromptProgress", "TokenEvent"]
    assert (events[1].token, events[1].position, events[1].finished) == (5, 10, None)
    plan, events = w.step()
    assert rows(plan) == ([], [(1, 10, 5)])
    assert events[0].finished is FinishReason.LENGTH
    assert w.plan().step is None


def test_step_ids_have_no_gaps():
    w = World()
    w.submit([1], max_tokens=3)
    assert [w.step()[0].step for _ in range(3)] == [1, 2, 3]
    w.plan()
    w.submit([2], max_tokens=1)
    assert w.step()[0].step == 4


def test_a_step_mixes_several_prompts_and_decodes():
    w = World(n_slots=4, mixed_quantum=64, min_shared_tokens=100)
    w.submit([1] * 4)
    w.submit([2] * 4)
    w.step()
    w.submit([3] * 500)
    w.submit([4] * 500)
    plan, _ = w.step()
    assert rows(plan) == ([(3, 0, 32), (4, 0, 32)], [(1, 4, 5), (2, 4, 5)])


def test_prompts_advance_in_quanta_only_while_others_decode():
    w = World(mixed_quantum=128, prefill_chunk=300, max_rows=2048)
    stream = w.submit([1])
    w.step()
    w.submit([2] * 1000)
    assert [w.step()[0].prefill[0].n_rows for _ in range(2)] == [128, 128]
    w.scheduler.park(stream)
    assert w.step()[0].prefill[0].n_rows == 300
    w.scheduler.unpark(stream)
    assert w.step()[0].prefill[0].n_rows == 128
    w.scheduler.cancel(stream)
    assert w.step()[0].prefill[0].n_rows == 300


def test_a_short_prompt_does_not_wait_for_a_long_one():
    w = World(max_rows=100, prefill_chunk=100)
    w.submit([1] * 5000)
    w.step()
    w.submit([2] * 20)
    plan, _ = w.step()
    assert sorted(rows(plan)[0]) == [(1, 100, 80), (2, 0, 20)]


def test_prompts_take_turns_when_the_quantum_is_too_small_for_all():
    w = World(n_slots=3, mixed_quantum=4, min_shared_tokens=100)
    w.submit([1])
    w.step()
    w.submit([2] * 100)
    w.submit([3] * 100)
    served = [w.step()[0].prefill for _ in range(6)]
    assert [[c.session for c in chunks] for chunks in served] == [[2], [3], [2], [3], [2], [3]]


def test_new_prompts_cannot_keep_an_old_one_waiting():
    """Each new prompt continues the one before it, so it is ready at once and fills the quantum."""
    w = World(n_slots=3, mixed_quantum=4)
    w.submit([1], max_tokens=10_000)
    w.step()
    old = w.submit([2] * 60, max_tokens=1)
    done = []
    for n in range(40):
        w.submit([3] * 4 * (n + 1), max_tokens=1)
        _, events = w.step()
        done += [e.done for e in events if isinstance(e, PromptProgress) and e.request == old]
    assert done == list(range(4, 64, 4))


def test_requests_start_in_the_order_of_submission():
    w = World(n_slots=2)
    a, b, c, d = (w.submit([n]) for n in range(4))
    assert [e.request for e in w.plan().events] == [a, b]
    w.scheduler.apply(w.result(w.scheduler._outstanding))
    w.scheduler.cancel(b)
    w.scheduler.cancel(a)
    assert [e.request for e in w.plan().events] == [c, d]


def test_fewer_requests_than_slots_may_be_allowed_to_run():
    w = World(n_slots=3, max_active=1)
    w.submit([1], max_tokens=1)
    second = w.submit([2], max_tokens=1)
    w.step()
    assert w.scheduler.statistics().waiting == 1
    _, events = w.step()
    assert events[0] == Started(request=second)


# --- the queue ---------------------------------------------------------------------------------


def test_the_queue_is_bounded_behind_the_free_slots():
    w = World(n_slots=2, max_queue=1)
    for n in range(3):
        w.submit([n])
    with pytest.raises(Overloaded, match="3 requests are waiting, the limit is 1"):
        w.submit([9])
    w.plan()
    with pytest.raises(Overloaded, match="1 requests are waiting, the limit is 1"):
        w.submit([9])
    w.scheduler.cancel(3)
    w.submit([9])
    assert w.scheduler.statistics().overloaded == 2


def test_without_a_limit_the_queue_grows():
    w = World(n_slots=1, max_queue=0)
    for n in range(500):
        w.submit([n])
    assert w.scheduler.statistics().waiting == 500


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"prompt": []}, InvalidRequest, "no tokens"),
        ({"prompt": [1, V]}, InvalidRequest, "token 1000 at index 1 is outside the vocabulary"),
        ({"prompt": [1, -1]}, InvalidRequest, "token -1 at index 1 is no token id"),
        ({"prompt": [2**40]}, InvalidRequest, "is no token id"),
        ({"prompt": [2**70]}, InvalidRequest, "flat list of whole numbers"),
        ({"prompt": [1.0]}, InvalidRequest, "flat list of whole numbers"),
        ({"prompt": [[1]]}, InvalidRequest, "flat list of whole numbers"),
        ({"prompt": "text"}, InvalidRequest, "flat list of whole numbers"),
        ({"prompt": [True]}, InvalidRequest, "flat list of whole numbers"),
        ({"prompt": [1], "max_tokens": -1}, InvalidRequest, "max_tokens must be >= 0"),
        ({"prompt": [1], "system_tokens": 2}, InvalidRequest, "system_tokens must be from 0 to 1"),
        ({"prompt": [1] * 16}, ContextOverflow, "prompt of 16 tokens does not fit a context of 16"),
    ],
)
def test_a_wrong_request_is_refused_at_once(options, error, text):
    w = World(n_ctx=16)
    with pytest.raises(error, match=text):
        w.submit(**options)
    assert w.scheduler.statistics().submitted == 0


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"n_slots": 0}, "n_slots must be >= 1, got 0"),
        ({"n_slots": 3, "max_rows": 2}, "max_rows must be at least the 3 batched sessions, got 2"),
        ({"mixed_quantum": 0}, "mixed_quantum must be >= 1"),
        ({"max_queue": -1}, "max_queue must be >= 0"),
        ({"n_slots": 2, "max_active": 3}, "max_active must be from 0 to 2, got 3"),
        ({"park_limit_s": 0.0}, "park_limit_s must be above 0"),
    ],
)
def test_wrong_limits_are_named(limits, text):
    with pytest.raises(ConfigError, match=text):
        SchedulerConfig(**limits)


# --- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_nothing_is_said_of_a_request_after_its_end(end):
    w = World()
    r = w.submit([1, 2, 3])
    decision = w.plan()
    finished = getattr(w.scheduler, end)(r)
    assert finished.request == r
    assert w.scheduler.apply(w.result(decision.step)) == ()
    assert w.plan().step is None
    assert getattr(w.scheduler, end)(r) is None


def test_a_request_that_ended_in_flight_leaves_what_the_ranks_computed():
    w = World()
    r = w.submit(range(100), max_tokens=5)
    decision = w.plan()
    w.scheduler.cancel(r)
    w.scheduler.apply(w.result(decision.step))
    again = w.submit(range(120), max_tokens=1)
    events = w.run(again)
    assert events[1] == PromptProgress(request=again, cached=100, done=120, total=120)


def test_a_cancelled_prefill_keeps_the_finished_part():
    w = World(prefill_chunk=40)
    r = w.submit(range(100))
    w.step()
    w.scheduler.cancel(r)
    again = w.submit(range(100), max_tokens=1)
    progress = [e for e in w.run(again) if isinstance(e, PromptProgress)]
    assert progress[0].cached == 40


def test_a_waiting_request_can_be_cancelled():
    w = World(n_slots=1)
    w.submit([1])
    r = w.submit([2])
    w.step()
    assert w.scheduler.cancel(r).reason is FinishReason.CANCELLED
    assert w.scheduler.statistics().waiting == 0


def test_an_unknown_request_is_an_error():
    w = World()
    with pytest.raises(InvalidRequest, match="request 1 was never submitted"):
        w.scheduler.cancel(1)


def test_prompt_and_output_fill_the_context_and_no_more():
    w = World(n_ctx=8)
    events = w.run(w.submit([1] * 5))
    tokens = [e for e in events if isinstance(e, TokenEvent)]
    assert [e.position for e in tokens] == [5, 6, 7]
    assert tokens[-1].finished is FinishReason.CONTEXT_FULL


def test_length_is_reported_before_a_full_context():
    w = World(n_ctx=8)
    assert w.run(w.submit([1] * 5, max_tokens=3))[-1].finished is FinishReason.LENGTH


def test_the_longest_prompt_gives_one_token():
    w = World(n_ctx=8)
    tokens = [e for e in w.run(w.submit([1] * 7)) if isinstance(e, TokenEvent)]
    assert [(e.position, e.finished) for e in tokens] == [(7, FinishReason.CONTEXT_FULL)]


def test_a_request_for_no_tokens_only_runs_its_prompt():
    w = World(prefill_chunk=2)
    r = w.submit([1, 2, 3], max_tokens=0)
    assert w.step()[0].prefill[0].want == Want.NOTHING
    plan, events = w.step()
    assert plan.prefill[0].want == Want.NOTHING
    assert events[-1] == Finished(request=r, reason=FinishReason.LENGTH)


# --- parking and deadlines ---------------------------------------------------------------------


def test_a_parked_request_keeps_its_slot_and_the_others_go_on():
    w = World(n_slots=2)
    a, b = w.submit([1]), w.submit([2])
    w.step()
    w.scheduler.park(a)
    plan, events = w.step()
    assert [e.request for e in events] == [b]
    assert len(plan.decode) == 1
    w.scheduler.unpark(a)
    assert len(w.step()[0].decode) == 2


def test_parking_in_flight_takes_effect_at_the_next_step():
    w = World(n_slots=1)
    a = w.submit([1])
    decision = w.plan()
    w.scheduler.park(a)
    assert kinds(w.scheduler.apply(w.result(decision.step)))[-1] == "TokenEvent"
    assert w.plan().step is None


def test_a_request_that_is_parked_too_long_expires_with_a_reason():
    w = World(n_slots=1, park_limit_s=5.0)
    a = w.submit([1])
    w.step()
    w.scheduler.park(a)
    assert w.plan(dt=100.0).wake_at == 105.0
    assert w.plan(dt=4.9).events == ()
    (event,) = w.plan(dt=0.1).events
    assert (event.request, event.reason) == (a, FinishReason.EXPIRED)
    assert event.text == "its reader has taken nothing for 5 s"


def test_unparking_starts_the_limit_anew():
    w = World(n_slots=1, park_limit_s=5.0)
    a = w.submit([1], max_tokens=10_000)
    for _ in range(4):
        w.step()
        w.scheduler.park(a)
        assert w.plan(dt=3.0).step is None
        w.scheduler.unpark(a)
    assert w.scheduler.statistics().active == 1


def test_a_deadline_ends_a_request_wherever_it_is():
    w = World(n_slots=1)
    running = w.submit([1], deadline=10.0)
    waiting = w.submit([2], deadline=7.0)
    w.step()
    decision = w.plan(dt=6.9)
    assert decision.wake_at == 7.0
    w.scheduler.apply(w.result(decision.step))
    decision = w.plan(dt=0.1)
    assert [(e.request, e.text) for e in decision.events] == [(waiting, "its deadline has passed")]
    w.scheduler.apply(w.result(decision.step))
    decision = w.plan(dt=3.0)
    assert [e.request for e in decision.events] == [running]
    assert (decision.step, decision.wake_at) == (None, None)


# --- forced tokens, sampling, logits -----------------------------------------------------------


def test_forced_tokens_replace_what_the_model_chooses():
    w = World(token=5)
    r = w.submit([1], max_tokens=4)
    w.step()
    w.scheduler.force(r, [8, 9])
    plan, (event,) = w.step()
    assert plan.decode[0].want == Want.NOTHING  # no output head for a token that is known
    assert (event.token, event.forced, event.position) == (8, True, 2)
    plan, (event,) = w.step()
    assert (plan.decode[0].token, event.token) == (8, 9)
    plan, (event,) = w.step()
    assert (plan.decode[0].token, event.token, event.forced) == (9, 5, False)
    assert event.finished is FinishReason.LENGTH


def test_forcing_in_flight_takes_the_place_of_the_token_under_way():
    w = World(token=5)
    r = w.submit([1])
    decision = w.plan()
    w.scheduler.force(r, [8])
    assert w.scheduler.apply(w.result(decision.step))[-1].token == 8


def test_the_first_token_can_be_forced_before_the_prompt_has_run():
    w = World()
    r = w.submit([1, 2, 3], want_logits=True)
    w.scheduler.force(r, [8])
    plan, events = w.step()
    assert plan.prefill[0].want == Want.TOKEN_AND_LOGITS
    assert (events[-1].token, events[-1].logits.shape) == (8, (V,))


def test_a_forced_token_outside_the_vocabulary_is_refused():
    w = World()
    r = w.submit([1])
    with pytest.raises(InvalidRequest, match="token 1000 at index 1"):
        w.scheduler.force(r, [1, V])
    with pytest.raises(InvalidRequest, match="flat list"):
        w.scheduler.force(r, [1.5])


def test_sampling_can_be_overridden_for_some_steps():
    hot = SamplingParams(temperature=0.7, seed=3)
    w = World()
    r = w.submit([1], sampling=hot)
    assert w.step()[0].prefill[0].sampling == hot
    w.scheduler.set_sampling(r, GREEDY)
    assert [w.step()[0].decode[0].sampling for _ in range(2)] == [GREEDY, GREEDY]
    w.scheduler.set_sampling(r, None)
    assert w.step()[0].decode[0].sampling == hot


def test_sampling_can_be_overridden_before_the_first_token():
    w = World()
    r = w.submit([1], sampling=SamplingParams(temperature=0.7))
    w.scheduler.set_sampling(r, GREEDY)
    assert w.step()[0].prefill[0].sampling == GREEDY


def test_calls_for_a_request_that_has_ended_do_nothing():
    w = World()
    r = w.submit([1])
    w.scheduler.cancel(r)
    w.scheduler.park(r)
    w.scheduler.unpark(r)
    w.scheduler.force(r, [1])
    w.scheduler.set_sampling(r, GREEDY)
    assert w.scheduler.session_of(r) is None
    assert w.plan().step is None


def test_logits_come_with_each_token_when_asked_for():
    w = World()
    events = w.run(w.submit([1, 2], max_tokens=2, want_logits=True))
    assert [e.logits.shape for e in events if isinstance(e, TokenEvent)] == [(V,), (V,)]


def test_prompt_logits_cover_every_row_and_reuse_nothing():
    w = World(n_slots=1, prefill_chunk=20)
    w.run(w.submit(range(30), max_tokens=1))
    r = w.submit(range(30), max_tokens=0, prompt_logits=True)
    decision = w.plan()
    assert [(c.session, c.length) for c in decision.commands] == [(1, 0)]
    events = w.run(r)
    logits = [(e.start, e.logits.shape) for e in events if isinstance(e, PromptLogits)]
    assert logits == [(0, (20, V)), (20, (10, V))]
    assert kinds(events)[-1] == "Finished"
