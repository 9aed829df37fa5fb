"""What a closed model and a wrong context do."""

from __future__ import annotations

import pytest

import ds4
from tests.conftest import DATA

MODEL = DATA / "v4-tiny-q2.gguf"


def test_a_closed_model_opens_no_session():
    model = ds4.open_model(MODEL, threads=1)
    model.close()
    with pytest.raises(ds4.InvalidRequest, match="is closed"):
        model.session()
    with pytest.raises(ds4.InvalidRequest, match="is closed"):
        next(model.generate("Hello"))
    model.close()


def test_a_session_can_be_closed_after_its_model():
    with ds4.open_model(MODEL, threads=1) as model, model.session() as session:
        session.feed([1, 2])
        model.close()
        with pytest.raises(ds4.InvalidRequest, match="is not open"):
            session.feed([3])


def test_a_context_of_nothing_is_refused():
    with (
        ds4.open_model(MODEL, threads=1) as model,
        pytest.raises(ds4.ConfigError, match="got 0"),
    ):
        model.session(0)
