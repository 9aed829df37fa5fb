"""How sampled tokens become text on a stream, how a turn ends, and what the rates say."""

from __future__ import annotations

import pytest

import ds4
from ds4.frontends import progress as progress_module
from ds4.frontends.answer import AnswerWriter, Ending, run_turn
from ds4.frontends.conversation import Conversation, opens_reasoning
from ds4.frontends.interrupt import Interrupt
from ds4.frontends.progress import PrefillProgress, Rates
from ds4.frontends.terminal import Terminal
from ds4.frontends.thinking import MAX_THINKING_CONTEXT, effective_mode
from ds4.frontends.trace import Trace
from tests.frontends.conftest import MODEL, Input, Stream


@pytest.fixture(scope="module")
def model():
    with ds4.open_model(MODEL, threads=1) as model:
        yield model


def terminal(*, tty: bool = False, **environment: str) -> Terminal:
    return Terminal(
        program="ds4",
        stdin=Input(b""),
        stdout=Stream(tty=tty),
        stderr=Stream(tty=tty),
        environment=environment,
    )


def written(model, tokens, *, thinking: bool, tty: bool = False, **environment: str) -> str:
    at = terminal(tty=tty, **environment)
    writer = AnswerWriter(at, model.tokenizer, thinking=thinking)
    for token in tokens:
        writer.token(token)
    writer.end()
    return at.stdout.getvalue()


def test_redirected_text_is_exactly_what_was_generated(model):
    special = model.tokenizer.special
    why, so = (model.tokenizer.encode(text, special=False) for text in ("why", "so"))
    tokens = [*why, special.end_think, *so]
    assert written(model, tokens, thinking=True) == "why</think>so\n"


def test_a_terminal_dims_the_reasoning_and_hides_the_marker(model):
    special = model.tokenizer.special
    why, so = (model.tokenizer.encode(text, special=False) for text in ("why", "so"))
    tokens = [*why, special.end_think, *so]
    assert written(model, tokens, thinking=True, tty=True) == "\x1b[2mwhy\x1b[0m\n\nso\n"
    assert written(model, why, thinking=True, tty=True) == "\x1b[2mwhy\x1b[0m\n"  # cut short
    assert written(model, [special.end_think, *so], thinking=True, tty=True) == "\x1b[2m\x1b[0mso\n"
    assert written(model, so, thinking=False, tty=True) == "so\n"
    later = [*so, special.think, *why, special.end_think]
    assert written(model, later, thinking=False, tty=True) == "so\x1b[2mwhy\x1b[0m\n\n"


def test_characters_are_never_split(model):
    euro = model.tokenizer.encode("€", special=False)
    assert len(euro) > 1
    assert written(model, euro, thinking=False) == "€\n"
    assert written(model, euro[:1], thinking=False) == "\ufffd\n"
    special = model.tokenizer.special
    cut = [*euro[:1], special.end_think]
    assert written(model, cut, thinking=True, tty=True) == "\x1b[2m\ufffd\x1b[0m\n\n"


def test_text_ends_in_one_line_break(model):
    line = model.tokenizer.encode("a\n", special=False)
    assert written(model, line, thinking=False) == "a\n"
    assert written(model, [], thinking=False) == "\n"


@pytest.fixture
def turn_of(model, monkeypatch):
    """Runs a turn in which the model samples the given tokens."""

    def go(tokens, *, max_tokens: int = 50, interrupt_at: int | None = None):
        def generate(self, ids, *, stop, max_tokens, **kw):
            self.feed(ids)
            for index, token in enumerate(tokens[:max_tokens]):
                if index == interrupt_at:
                    interrupt.asked = True
                yield token
                if stop():
                    return
                self.feed([token])

        monkeypatch.setattr(ds4.Session, "generate", generate)
        interrupt = Interrupt(lambda text: None)
        at = terminal()
        conversation = Conversation(model)
        outcome = run_turn(
            conversation,
            conversation.render("hi", ds4.ThinkingMode.NONE),
            max_tokens=max_tokens,
            sampling=ds4.SamplingParams(),
            terminal=at,
            interrupt=interrupt,
            trace=Trace(None),
        )
        return outcome, at.stdout.getvalue()

    return go


def test_the_end_token_ends_the_answer_and_is_not_written(model, turn_of):
    words = model.tokenizer.encode("so", special=False)
    outcome, text = turn_of([*words, model.tokenizer.special.eos])
    assert (outcome.ending, text) == (Ending.END, "so\n")
    assert outcome.rates.tokens == len(words) + 1


def test_each_ending_is_told_apart(model, turn_of):
    words = model.tokenizer.encode("An old sailor", special=False)
    assert turn_of(words, max_tokens=2)[0].ending is Ending.LENGTH
    assert turn_of(words)[0].ending is Ending.CONTEXT
    outcome, text = turn_of(words, interrupt_at=1)
    assert outcome.ending is Ending.STOPPED
    assert text == model.tokenizer.decode(words[:2]) + "\n"


def test_reasoning_is_open_after_the_marker_of_the_last_turn_only(model):
    s = model.tokenizer.special
    assert opens_reasoning(model, [s.bos, s.user, 9, s.assistant, s.think])
    assert opens_reasoning(model, [s.think, 9, 9])
    assert not opens_reasoning(model, [s.think, 9, s.end_think])
    assert not opens_reasoning(model, [s.think, 9, s.eos, s.user, 9])
    assert not opens_reasoning(model, [9, 9])


def test_rates_count_the_first_token_as_prefill(monkeypatch):
    clock = iter([100.0, 102.0, 102.5, 103.0])
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: next(clock))
    rates = Rates(prefill_tokens=10, start=next(clock))
    for _ in range(3):
        rates.token()
    assert rates.prefill_rate == 5.0
    assert rates.decode_rate == 2.0
    assert str(rates) == "prefill: 10 tokens, 5.00 t/s; generation: 3 tokens, 2.00 t/s"


def test_rates_without_a_measurement_are_zero():
    rates = Rates(prefill_tokens=3)
    assert (rates.prefill_rate, rates.decode_rate) == (0.0, 0.0)
    rates.token()
    assert rates.decode_rate == 0.0


def test_a_chunk_that_takes_long_is_seen_to_run():
    """The line is redrawn by a clock of its own, with nothing reported in between."""
    import time

    at = terminal(tty=True, TERM="xterm")
    with PrefillProgress(at, 100) as progress:
        progress(10, 100)
        seen = len(at.stderr.getvalue())
        limit = time.monotonic() + 20
        while len(at.stderr.getvalue()) == seen and time.monotonic() < limit:
            time.sleep(0.05)
        assert len(at.stderr.getvalue()) > seen
    assert at.stdout.getvalue() == ""


@pytest.mark.parametrize(
    ("choice", "n_ctx", "mode", "noted"),
    [
        ("think", 4096, None, False),
        ("none", 4096, ds4.ThinkingMode.NONE, False),
        ("max", MAX_THINKING_CONTEXT - 1, ds4.ThinkingMode.HIGH, True),
        ("max", MAX_THINKING_CONTEXT, ds4.ThinkingMode.MAX, False),
    ],
)
def test_the_mode_depends_on_choice_and_context(choice, n_ctx, mode, noted):
    found, note = effective_mode(choice, n_ctx)
    assert found is mode
    assert (note is not None) == noted
