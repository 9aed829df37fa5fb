"""Wrong use of the Python API: one typed error each, and the timeline stays what it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds4
from ds4.errors import ConfigError, InvalidRequest, SnapshotError
from ds4.sampling import GREEDY
from ds4.steps import Want
from tests.conftest import DATA

MODEL = DATA / "v4-tiny-q2.gguf"
NO_IDS = [1.7, True, -1, 2**31, 2**70, "1", None, [1], float("nan"), np.float32(1), np.bool_(True)]


@pytest.fixture(scope="module")
def model():
    with ds4.open_model(MODEL, threads=1, prefill_chunk=2) as model:
        yield model


@pytest.mark.parametrize("bad", NO_IDS, ids=repr)
@pytest.mark.parametrize("before", [[], [1, 2, 3, 4]], ids=["alone", "in a later chunk"])
def test_what_is_no_token_id_is_refused_by_its_place_and_nothing_is_appended(model, bad, before):
    with model.session(16) as session:
        with pytest.raises(InvalidRequest, match=f"item {len(before)} is"):
            session.feed([*before, bad])
        assert session.tokens == []
        assert model.executor.session_length(session.id) == 0


def test_a_last_token_that_is_no_id_is_not_scored_as_another(model):
    with model.session(16) as session:
        with pytest.raises(InvalidRequest, match="item 2 is -1"):
            session.score([1, 2, -1])
        assert session.tokens == []


def test_ids_of_numpy_are_ids(model):
    with model.session(16) as one, model.session(16) as two:
        a = one.feed(np.array([1, 2, 3]), want=Want.ALL_LOGITS)
        b = two.feed([1, 2, 3], want=Want.ALL_LOGITS)
        assert np.array_equal(a.logits, b.logits)
        assert one.tokens == [1, 2, 3]
        assert {type(token) for token in one.tokens} == {int}


@pytest.mark.parametrize("n_ctx", [0, -1, 1.5, "8", True, 2**70])
def test_a_context_that_is_no_size_is_refused(model, n_ctx):
    with pytest.raises(ConfigError):
        model.session(n_ctx)


@pytest.mark.parametrize("field", ["n_ctx", "threads", "prefill_chunk"])
@pytest.mark.parametrize("value", [1.5, "2", True, 0])
def test_an_option_that_is_no_whole_number_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        ds4.open_model(MODEL, **{"threads": 1, field: value})


@pytest.mark.parametrize("length", [-1, 4, 1.5, True, None, 2**70])
def test_a_rewind_to_no_length_of_the_timeline_changes_nothing(model, length):
    with model.session(16) as session:
        session.feed([1, 2, 3])
        with pytest.raises(InvalidRequest, match="cannot rewind 3 tokens"):
            session.rewind(length)
        assert len(session) == model.executor.session_length(session.id) == 3


def test_an_empty_timeline_can_be_restored(model):
    with model.session(16) as empty, model.session(16) as session:
        session.feed([1, 2, 3])
        session.restore(empty.snapshot())
        assert session.tokens == []
        with pytest.raises(SnapshotError):
            session.restore(empty.snapshot()[:-1])


def test_a_timeline_stays_consistent_when_its_logits_are_not_finite(model, monkeypatch):
    with model.session(16) as session:
        forward = model.executor.forward
        run = forward.run
        monkeypatch.setattr(forward, "run", lambda *args: run(*args) * np.float32(np.nan))
        for tokens in ([1, 2, 3], [4]):
            with pytest.raises(FloatingPointError, match="not finite"):
                session.feed(tokens)
        monkeypatch.undo()
        assert session.tokens == [1, 2, 3, 4]
        assert session.feed([5]) is not None


def test_a_closed_model_says_so_and_its_sessions_close_in_silence():
    model = ds4.open_model(MODEL, threads=1)
    answer = model.generate("a", max_tokens=9, sampling=GREEDY)
    with model.session(16) as session:
        model.close()
        model.close()
        with pytest.raises(InvalidRequest, match="not open"):
            session.feed([1])
    for use in (model.session, model.warm_weights, model.warm_up, lambda: next(answer)):
        with pytest.raises(InvalidRequest, match="is closed"):
            use()


TOKENS = st.lists(st.integers(0, 299), min_size=1, max_size=9)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), TOKENS),
        st.tuples(st.just("rewind"), st.floats(0, 1)),
        st.tuples(st.just("snapshot"), st.none()),
        st.tuples(st.just("restore"), st.none()),
    ),
    max_size=10,
)


@settings(max_examples=12)
@given(operations=OPERATIONS, last=TOKENS)
def test_any_history_of_a_timeline_leaves_the_bits_of_a_fresh_one(model, operations, last):
    n_ctx = 128
    with model.session(n_ctx) as session, model.session(n_ctx) as fresh:
        expected: list[int] = []
        saved, saved_tokens = session.snapshot(), list(expected)
        for name, value in operations:
            if name == "feed":
                session.feed(value, want=Want.NOTHING)
                expected += value
            elif name == "rewind":
                del expected[int(value * len(expected)) :]
                session.rewind(len(expected))
            elif name == "snapshot":
                saved, saved_tokens = session.snapshot(), list(expected)
            else:
                session.restore(saved)
                expected = list(saved_tokens)
            assert session.tokens == expected
        got = session.feed(last, want=Want.ALL_LOGITS)
        want = fresh.feed([*expected, *last], want=Want.ALL_LOGITS)
        assert np.array_equal(got.logits, want.logits[len(expected) :])
