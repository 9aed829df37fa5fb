from __future__ import annotations

import numpy as np
import pytest

from ds4.errors import ContextOverflow, InvalidRequest
from ds4.model.deepseek4.reference import ReferenceModel
from tests.conftest import relative_error


@pytest.fixture
def model(oracle_file):
    return ReferenceModel(oracle_file)


def test_logits_agree_with_an_independent_engine_at_every_position(oracle, model):
    for i in oracle.indices()[:2]:
        logits = model.forward(model.new_state(), oracle.ids(i))
        # The other engine computes in float32; 1e-5 is ten times its rounding.
        assert relative_error(logits, oracle.reference[f"logits_{i}"]).max() < 1e-5


@pytest.mark.parametrize("chunk", [1, 5, 127])
def test_prefill_in_chunks_agrees_with_one_shot(oracle, model, chunk):
    ids = oracle.ids(5)
    whole = model.forward(model.new_state(), ids)
    state = model.new_state()
    parts = [model.forward(state, ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
    assert relative_error(np.concatenate(parts), whole).max() < 1e-11  # float64 sums, reordered
    assert state.tokens == ids


def test_a_copied_state_continues_on_its_own(oracle, model):
    ids = oracle.ids(1)
    state = model.new_state()
    model.forward(state, ids[:10])
    snapshot = state.copy()
    first = model.forward(state, ids[10:])
    second = model.forward(snapshot, ids[10:])
    np.testing.assert_array_equal(first, second)


def test_wrong_tokens_are_refused_by_range(model):
    for bad in ([], [-1], [768]):
        with pytest.raises(InvalidRequest, match="0 to 767"):
            model.forward(model.new_state(), bad)
    with pytest.raises(ContextOverflow):
        model.forward(model.new_state(), [1] * 4097)
