"""`Session.score`, warming, and opening a model on an opened file."""

from __future__ import annotations

import numpy as np
import pytest

import ds4
from ds4.api import CPU_CHUNK, Model, ModelOptions
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.tensors import bytes_by_class
from ds4.sampling import log_softmax
from ds4.steps import Want
from tests.conftest import DATA

MODEL = DATA / "v4-tiny-q2.gguf"


@pytest.fixture(scope="module")
def model():
    with ds4.open_model(MODEL, threads=1, prefill_chunk=7) as model:
        yield model


def test_scores_are_the_log_probabilities_of_the_next_tokens(model, q2_oracle):
    ids = q2_oracle.ids(1)
    with model.session() as session:
        logits = session.feed(ids, want=Want.ALL_LOGITS).logits
    expected = [log_softmax(logits[i])[ids[i + 1]] for i in range(len(ids) - 1)]
    seen = []
    with model.session() as session:
        found = session.score(ids, progress=lambda done, total: seen.append((done, total)))
        assert session.tokens == ids[:-1]
    assert found.dtype == np.float64
    assert found.tolist() == expected
    assert seen == [(7, 18), (14, 18), (18, 18)]


def test_scoring_goes_on_from_what_the_timeline_holds(model, q2_oracle):
    ids = q2_oracle.ids(1)
    with model.session() as session:
        whole = session.score(ids)
    with model.session() as session:
        session.feed(ids[:8], want=Want.NOTHING)
        assert session.score(ids[8:]).tolist() == whole[8:].tolist()


def test_a_stopped_scoring_returns_what_is_done(model, q2_oracle):
    ids = q2_oracle.ids(1)
    asked = iter([False, True])
    with model.session() as session:
        assert len(session.score(ids, stop=lambda: next(asked))) == 7
        assert session.tokens == ids[:7]


def test_scoring_refuses_one_token_and_what_does_not_fit(model):
    with model.session(4) as session:
        with pytest.raises(ds4.InvalidRequest, match="at least two tokens"):
            session.score([0])
        with pytest.raises(ds4.ContextOverflow):
            session.score([0] * 6)
        assert session.tokens == []
        assert len(session.score([0] * 5)) == 4  # the last one is not fed


def test_warming_reads_every_tensor_of_the_model(model):
    with GGUFFile.open(MODEL) as file:
        expected = sum(n for _, n in bytes_by_class(file, model.shape).values())
    assert model.warm_weights() == expected


@pytest.mark.parametrize("n_ctx", [1, 2, 4096])
def test_warming_up_leaves_nothing_behind(n_ctx):
    with ds4.open_model(MODEL, threads=1, n_ctx=n_ctx) as model:
        model.warm_up()
        session = model.session()
        assert session.tokens == []


def test_a_model_takes_over_an_opened_file():
    file = GGUFFile.open(MODEL)
    with Model.open(ModelOptions(), file) as model:
        assert model.file is file
        assert model.prefill_chunk == CPU_CHUNK
    with pytest.raises(ValueError, match="closed"):
        file.header_digest()


def test_a_file_is_closed_when_opening_a_model_on_it_fails():
    file = GGUFFile.open(MODEL)
    with pytest.raises(ds4.ConfigError):
        Model.open(ModelOptions(backend="cuda"), file)
    with pytest.raises(ValueError, match="closed"):
        file.header_digest()
