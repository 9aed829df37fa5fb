"""Timelines and slots: what is reused, what is displaced, and what the ranks are told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import ConfigError
from ds4.sessions import (
    CloseSession,
    OpenSession,
    Rewind,
    SlotTable,
    Timeline,
    common_prefix,
)

SYSTEM = list(range(100, 140))


def array(tokens):
    return np.array(tokens, np.int32)


class Table(SlotTable):
    """Runs requests to their end at once."""

    def __init__(self, n_slots, n_ctx=1000, **options):
        super().__init__(n_slots, n_ctx, **options)
        self.requests = 0

    def begin(self, prompt, system=0, max_reuse=None):
        self.requests += 1
        prompt = array(prompt)
        reuse = prompt.size - 1 if max_reuse is None else max_reuse
        found = self.assign(self.requests, prompt, system_tokens=system, max_reuse=reuse)
        if found is not None:
            found.slot.rewinding = False
            found.slot.timeline.extend(prompt[len(found.slot.timeline) :])
        return found

    def turn(self, prompt, answer=(7, 7, 7), **options):
        found = self.begin(prompt, **options)
        found.slot.timeline.extend(answer)
        self.release(found.slot)
        return found


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_is_the_longest(a, b):
    n = common_prefix(array(a), array(b))
    assert a[:n] == b[:n]
    assert n in (len(a), len(b)) or a[n] != b[n]


@given(st.lists(st.one_of(st.lists(st.integers(0, 99), max_size=70), st.integers(0, 200))))
def test_a_timeline_is_a_list_that_is_cut_at_its_end(changes):
    timeline, model = Timeline(), []
    for change in changes:
        if isinstance(change, list):
            timeline.extend(change)
            model += change
        else:
            length = min(change, len(model))
            timeline.cut(length)
            del model[length:]
        assert timeline.tokens.tolist() == model
        assert len(timeline) == len(model)


def test_a_timeline_view_cannot_be_written_through():
    timeline = Timeline([1, 2])
    with pytest.raises(ValueError, match="read-only"):
        timeline.tokens[0] = 5


@pytest.mark.parametrize("length", [-1, 3])
def test_a_timeline_is_not_cut_to_what_it_has_not(length):
    with pytest.raises(ConfigError, match=f"of 2 tokens to {length}"):
        Timeline([1, 2]).cut(length)


def test_the_first_use_of_a_slot_opens_a_session():
    found = Table(2, n_ctx=64).begin([1, 2, 3])
    assert found.commands == (OpenSession(session=1, n_ctx=64),)
    assert found.reused == 0


def test_the_next_turn_continues_without_any_command():
    table = Table(2)
    first = table.turn([1, 2, 3])
    second = table.begin([1, 2, 3, 7, 7, 7, 4, 5])
    assert second.slot is first.slot
    assert (second.reused, second.commands) == (6, ())


def test_a_regenerated_turn_rewinds_to_the_shared_prefix():
    table = Table(2)
    prompt = list(range(20))
    first = table.turn(prompt)
    again = table.begin(prompt)
    assert again.slot is first.slot
    assert again.reused == 19  # the last prompt token runs again, for its logits
    (rewind,) = again.commands
    assert (rewind.session, rewind.length, rewind.evicts) == (1, 19, False)
    assert rewind.dropped.tolist() == [19, 7, 7, 7]
    assert table.evictions == 0
    assert table.rewinds == 1


def test_the_longest_shared_prefix_wins():
    table = Table(3)
    base = list(range(30))
    table.turn([*base[:20], 50])
    long = table.turn([*base, 51], system=20)
    assert long.slot.index == 1
    assert table.begin([*base, 52, 53]).slot is long.slot


def test_among_equals_the_one_that_loses_fewer_tokens_is_taken():
    table = Table(3)
    base = list(range(30))
    table.turn([*base, *[50] * 10], system=30)
    short = table.turn([*base, 51], system=30)
    assert short.slot.index == 1
    assert table.begin([*base, 52]).slot is short.slot


def test_a_prompt_that_shares_only_the_system_prompt_takes_an_empty_slot():
    table = Table(2)
    live = table.turn([*SYSTEM, 1, 2, 3])
    other = table.begin([*SYSTEM, 4, 5, 6], system=len(SYSTEM))
    assert other.slot is not live.slot
    assert other.reused == 0
    assert len(live.slot.timeline) == len(SYSTEM) + 6


def test_without_an_empty_slot_the_least_recently_used_conversation_goes():
    table = Table(2)
    old = table.turn([*SYSTEM, 1, 2, 3], system=len(SYSTEM))
    table.turn([*SYSTEM, 4, 5, 6], system=len(SYSTEM))
    third = table.begin([*SYSTEM, 8, 9], system=len(SYSTEM))
    assert third.slot is old.slot
    # The system prompt itself is still worth keeping.
    assert third.reused == len(SYSTEM)
    (rewind,) = third.commands
    assert rewind.evicts
    assert rewind.dropped.tolist() == [1, 2, 3, 7, 7, 7]
    assert table.evictions == 1


def test_using_a_conversation_makes_it_recent():
    table = Table(2)
    first = table.turn([*SYSTEM, 1], system=len(SYSTEM))
    second = table.turn([*SYSTEM, 2], system=len(SYSTEM))
    table.turn([*SYSTEM, 1, 7, 7, 7, 3], system=len(SYSTEM))
    assert table.begin([9, 9, 9]).slot is second.slot
    assert first.slot is not second.slot


def test_a_few_shared_markers_do_not_make_a_continuation():
    table = Table(2, min_shared_tokens=4)
    live = table.turn([1, 2, 3, 50, 51])
    assert table.begin([1, 2, 3, 60, 61]).slot is not live.slot


def test_enough_shared_tokens_make_a_continuation():
    table = Table(2, min_shared_tokens=4)
    live = table.turn([1, 2, 3, 4, 51])
    assert table.begin([1, 2, 3, 4, 61]).slot is live.slot


def test_a_short_conversation_is_continued_when_all_of_it_is_shared():
    table = Table(2, min_shared_tokens=100)
    live = table.turn([1, 2], answer=[3])
    assert table.begin([1, 2, 3, 4]).slot is live.slot


def test_an_active_slot_is_never_taken():
    table = Table(1)
    active = table.begin(list(range(20)))
    assert table.begin(list(range(20))) is None
    assert active.slot.request == 1


@pytest.mark.parametrize("flag", ["in_flight", "rewinding"])
def test_a_slot_in_transition_is_not_taken(flag):
    table = Table(1)
    slot = table.turn([1, 2, 3]).slot
    setattr(slot, flag, True)
    assert table.begin([1, 2, 3]) is None
    setattr(slot, flag, False)
    assert table.begin([1, 2, 3]) is not None


def test_an_open_empty_session_is_taken_before_a_new_one_is_opened():
    table = Table(2)
    slot = table.turn([1, 2, 3]).slot
    slot.timeline.cut(0)
    found = table.begin([5, 6])
    assert found.slot is slot
    assert found.commands == ()


def test_reuse_can_be_forbidden():
    table = Table(1)
    table.turn(list(range(20)))
    found = table.begin(list(range(30)), max_reuse=0)
    (rewind,) = found.commands
    assert (found.reused, rewind.length) == (0, 0)


def test_a_discarded_session_is_closed_and_its_id_not_used_again():
    table = Table(1)
    slot = table.turn([1, 2, 3]).slot
    table.discard(slot)
    assert table.closing() == (CloseSession(session=1),)
    assert table.closing() == ()
    found = table.begin([1, 2, 3, 7])
    assert found.reused == 0
    assert found.commands == (OpenSession(session=2, n_ctx=1000),)


def test_a_restored_snapshot_is_reused_like_any_timeline():
    table = Table(1)
    slot = table.turn([1, 2, 3]).slot
    table.adopt(slot.session, list(range(40)))
    found = table.begin(list(range(41)))
    assert (found.reused, found.commands) == (40, ())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: t.adopt(9, [1]), "session 9 is not open"),
        (lambda t: t.adopt(1, [1] * 1001), "1001 tokens do not fit a context of 1000"),
        (lambda t: (t.begin([1, 2, 3, 4]), t.adopt(1, [1])), "session 1 is busy"),
        (lambda t: SlotTable(0, 8), "batched sessions must be >= 1, got 0"),
        (lambda t: SlotTable(1, 0), "ctx must be >= 1, got 0"),
        (lambda t: SlotTable(1, 8, min_shared_tokens=0), "min_shared_tokens must be >= 1"),
    ],
)
def test_wrong_uses_are_refused(call, text):
    table = Table(1)
    table.turn([1, 2, 3])
    with pytest.raises(ConfigError, match=text):
        call(table)


def test_rewinds_are_values_that_do_not_change_with_the_timeline():
    table = Table(1)
    table.turn(list(range(20)))
    (rewind,) = table.begin([0, 1, 50]).commands
    assert isinstance(rewind, Rewind)
    assert rewind.dropped.tolist() == [*range(2, 20), 7, 7, 7]
