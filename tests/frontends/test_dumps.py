"""The diagnostics: what they write, and that it agrees with the model and with the references."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

import ds4
from ds4.frontends.dumps import Diagnostics, decode_consistency
from ds4.frontends.interrupt import Interrupt
from ds4.sampling import log_softmax
from ds4.steps import Want
from tests.conftest import relative_error
from tests.frontends.conftest import MODEL, Input, Stream, run


@pytest.fixture(scope="module")
def model():
    with ds4.open_model(MODEL, threads=1) as model:
        yield model


def test_dumped_tokens_are_the_reference_ids(q2_oracle):
    for prompt in q2_oracle.prompts[:4]:
        outcome = run("--dump-tokens", "-p", prompt["text"])
        assert outcome.status == 0
        assert json.loads(outcome.out) == prompt["ids"]
        assert outcome.err == ""


def test_dumped_tokens_are_spelled_out_on_a_terminal():
    outcome = run("--dump-tokens", "-p", "<｜User｜>Hello", tty="e")
    assert json.loads(outcome.out)[0] == 763
    assert "'<｜User｜>'" in outcome.err


def test_dump_tokens_without_a_prompt_exits_2():
    assert run("--dump-tokens", tty="i").status == 2
    assert run("--dump-tokens", stdin=b"").status == 2


def test_all_logits_agree_with_the_reference(tmp_path, ids_file, q2_oracle):
    path, index = ids_file
    out = tmp_path / "logits.npz"
    outcome = run("--tokens-file", path, "--dump-logits", out)
    assert (outcome.status, outcome.out) == (0, "")
    with np.load(out) as archive:
        assert archive.files == ["logits"]
        logits = archive["logits"]
    expected = q2_oracle.reference[f"logits_{index}"]
    assert logits.dtype == np.float32
    assert logits.shape == expected.shape
    assert np.median(relative_error(logits, expected)) < 1e-4


def test_one_token_has_logits_of_one_position(tmp_path):
    (tmp_path / "ids.json").write_text("[0]")
    out = tmp_path / "noending"
    assert run("--tokens-file", tmp_path / "ids.json", "--dump-logits", out).status == 0
    with np.load(out) as archive:
        assert archive["logits"].shape == (1, 768)


def test_next_token_logits_are_exact_in_json(tmp_path, model):
    out = tmp_path / "logits.json"
    assert run("-p", "hi", "--raw-prompt", "--dump-logits", out).status == 0
    found = json.loads(out.read_text())
    ids = [model.tokenizer.special.bos, *model.tokenizer.encode("hi", special=False)]
    with model.session() as session:
        result = session.feed(ids, want=Want.TOKEN_AND_LOGITS)
    assert np.array_equal(np.array(found["logits"], np.float32), result.logits[0])
    assert (found["source"], found["prompt_tokens"], found["vocab"]) == ("ds4", len(ids), 768)


def test_logits_of_every_position_of_a_prompt_end_in_the_next_token_logits(tmp_path):
    one, every = tmp_path / "one.json", tmp_path / "every.npz"
    assert run("-p", "hi", "--dump-logits", one).status == 0
    assert run("-p", "hi", "--dump-logits", every).status == 0
    with np.load(every) as archive:
        last = archive["logits"][-1]
    assert np.array_equal(np.array(json.loads(one.read_text())["logits"], np.float32), last)


def test_logprobs_have_sorted_alternatives_whose_sum_is_at_most_one(tmp_path):
    """C5."""
    out = tmp_path / "x.json"
    outcome = run("-p", "hi", "--dump-logprobs", out, "-n", 4, "--temp", 0)
    assert (outcome.status, outcome.out) == (0, "")
    found = json.loads(out.read_text())
    assert set(found) == {"source", "prompt_tokens", "ctx", "top_k", "steps"}
    assert found["top_k"] == 20
    steps = found["steps"]
    assert len(steps) == 4 or steps[-1]["selected"]["id"] == 1
    for number, step in enumerate(steps):
        assert step["step"] == number
        top = step["top_logprobs"]
        assert len(top) == 20
        values = [item["logprob"] for item in top]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-12
        assert step["selected"] == top[0]["token"]
        assert {"id", "text", "bytes"} == set(step["selected"])


def test_logprobs_are_the_log_softmax_of_the_logits(tmp_path, model):
    out = tmp_path / "x.json"
    argv = ("-p", "hi", "--raw-prompt", "--dump-logprobs", out, "-n", 1, "--logprobs-top-k", 500)
    assert run(*argv).status == 0
    top = json.loads(out.read_text())["steps"][0]["top_logprobs"]
    assert len(top) == 128  # capped
    ids = [model.tokenizer.special.bos, *model.tokenizer.encode("hi", special=False)]
    with model.session() as session:
        logits = session.feed(ids, want=Want.TOKEN_AND_LOGITS).logits[0]
    expected = log_softmax(logits)
    for item in top:
        assert item["logprob"] == expected[item["token"]["id"]]
        assert np.float32(item["logit"]) == logits[item["token"]["id"]]
        assert bytes(item["token"]["bytes"]) == model.tokenizer.token_bytes(item["token"]["id"])


def test_logprobs_record_the_end_token_and_stop(tmp_path, monkeypatch, model):
    real = ds4.Session.feed
    end, ends_at = model.tokenizer.special.eos, 2

    def feed(self, tokens, **kw):
        result = real(self, tokens, **kw)
        if result.logits is not None:
            result.logits[-1, end] = 100.0 if len(tokens) == 1 and feed.steps == ends_at else -100.0
            feed.steps += 1
        return result

    feed.steps = 0
    monkeypatch.setattr(ds4.Session, "feed", feed)
    out = tmp_path / "x.json"
    assert run("-p", "hi", "--dump-logprobs", out, "-n", 30).status == 0
    steps = json.loads(out.read_text())["steps"]
    assert [step["selected"]["id"] for step in steps].index(end) == ends_at == len(steps) - 1


def test_perplexity_is_the_exponential_of_the_mean_negative_log_likelihood(tmp_path, model):
    text = "An old sailor carries every token."
    path = tmp_path / "text.txt"
    path.write_text(text)
    outcome = run("--perplexity-file", path, "--prefill-chunk", 4)
    assert outcome.status == 0
    found = dict(line.split() for line in outcome.out.splitlines())
    ids = [model.tokenizer.special.bos, *model.tokenizer.encode(text, special=False)]
    with model.session() as session:
        logits = session.feed(ids, want=Want.ALL_LOGITS).logits
    nll = -sum(log_softmax(logits[i])[ids[i + 1]] for i in range(len(ids) - 1))
    assert int(found["tokens"]) == len(ids) - 1
    assert float(found["nll"]) == pytest.approx(nll, abs=1e-5)
    assert float(found["perplexity"]) == pytest.approx(math.exp(nll / (len(ids) - 1)), rel=1e-5)


def test_n_bounds_the_scored_tokens(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("An old sailor carries every token.")
    outcome = run("--perplexity-file", path, "-n", 3)
    assert "tokens 3\n" in outcome.out
    assert re.search(r"scoring the first 3 of \d+ tokens", outcome.err)


def test_decoding_and_prefill_agree_in_every_bit():
    outcome = run("-p", "hi", "--decode-consistency", 6)
    assert outcome.status == 0
    assert re.fullmatch(
        r"decode consistency: 6 steps after \d+ tokens: identical bits\n", outcome.out
    )


def test_a_decode_that_differs_is_found_and_exits_1(model, monkeypatch):
    real = ds4.Session.feed

    def feed(self, tokens, **kw):
        result = real(self, tokens, **kw)
        if len(tokens) == 1 and result.logits is not None:
            result.logits[0, 7] += np.float32(1e-3)
        return result

    monkeypatch.setattr(ds4.Session, "feed", feed)
    outcome = run("-p", "hi", "--decode-consistency", 2)
    assert outcome.status == 1
    assert "2 differ" in outcome.out
    assert outcome.out.count("logits differ by up to") == 2


def test_consistency_beyond_the_context_is_refused():
    outcome = run("-p", "hi", "-c", 30, "--decode-consistency", 20)
    assert outcome.status == 1
    assert "does not fit a context of 30" in outcome.err


def test_consistency_holds_for_a_model_called_directly(model):
    run_of = Diagnostics(
        model=model,
        terminal=_terminal(),
        interrupt=Interrupt(lambda text: None),
    )
    assert decode_consistency(run_of, [0, 5, 9], 3)


def _terminal():
    from ds4.frontends.terminal import Terminal

    return Terminal(
        program="ds4", stdin=Input(b""), stdout=Stream(), stderr=Stream(), environment={}
    )


def test_alternatives_without_a_dump_are_noted():
    outcome = run("-p", "hi", "-n", 1, "--logprobs-top-k", 3)
    assert "--logprobs-top-k has no effect" in outcome.err


@pytest.mark.parametrize("option", ["--dump-logprobs", "--dump-logits"])
def test_an_output_that_cannot_be_written_is_refused_before_the_model_runs(
    option, tmp_path, monkeypatch
):
    monkeypatch.setattr(ds4.Model, "open", lambda *a, **k: pytest.fail("the model was opened"))
    for target in (tmp_path, tmp_path / "no" / "such.json"):
        outcome = run("-p", "hi", option, target)
        assert outcome.status == 1
        assert outcome.out == ""
        assert outcome.err.startswith(f"ds4: error: {option} {target}: ")
        assert outcome.err.count("\n") == 1


def test_an_interrupted_diagnostic_writes_nothing_and_exits_130(tmp_path, monkeypatch):
    import signal

    real = ds4.Session.feed

    def feed(self, tokens, **kw):
        if len(tokens) > 4:
            signal.raise_signal(signal.SIGINT)
        return real(self, tokens, **kw)

    monkeypatch.setattr(ds4.Session, "feed", feed)
    out = tmp_path / "x.json"
    outcome = run("-p", "hi", "--dump-logprobs", out)
    assert outcome.status == 130
    assert list(tmp_path.iterdir()) == []
