"""The interactive mode: commands, turns that grow one timeline, and what a failure leaves."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable

import pexpect
import pytest

import ds4
from ds4.frontends import tasks
from ds4.frontends.commands import COMMANDS, Command, UnknownCommand, parse_line
from ds4.frontends.conversation import Conversation, ConversationLostError
from ds4.frontends.interrupt import Interrupt
from ds4.frontends.line_editor import PlainEditor, history_path, open_editor
from ds4.frontends.terminal import Terminal
from ds4.model.template import ChatTemplate
from tests.frontends.conftest import MODEL, Input, Stream, run

GREEDY = ds4.SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model():
    with ds4.open_model(MODEL, threads=1, prefill_chunk=8) as model:
        yield model


class Script:
    """An editor that enters lines; a callable runs first and gives the line, or raises."""

    def __init__(self, *entries: str | Callable[[], str]) -> None:
        self._entries = list(entries)

    def read(self) -> str:
        if not self._entries:
            raise EOFError
        entry = self._entries.pop(0)
        return entry if isinstance(entry, str) else entry()


def chat(monkeypatch, *entries, argv=("-n", "6", "--temp", "0")):
    monkeypatch.setattr(tasks, "open_editor", lambda terminal: Script(*entries))
    return run(*argv, tty="i")


# -- entries ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("", None),
        ("  \n ", None),
        ("hello", "hello"),
        ("two\nlines", "two\nlines"),
        ("/quit", Command("/quit", "")),
        ("/QUIT  ", Command("/quit", "")),
        ("/ctx 100", Command("/ctx", "100")),
        ("/read  a b.txt ", Command("/read", "a b.txt")),
        ("/think-max", Command("/think-max", "")),
        (" /etc/passwd is a file", "/etc/passwd is a file"),
        ("/help\nme", "/help\nme"),
        ("  indented", "  indented"),
    ],
)
def test_an_entry_is_a_command_a_turn_or_nothing(line, meaning):
    assert parse_line(line) == meaning


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/etc/passwd", "unknown command /etc/passwd"),
        ("/thinkmax", "unknown command /thinkmax"),
        ("/", "unknown command /"),
        ("/ctx", "/ctx needs N"),
        ("/read", "/read needs FILE"),
        ("/quit now", "/quit takes no argument"),
    ],
)
def test_a_wrong_command_gets_a_hint(line, hint):
    with pytest.raises(UnknownCommand, match=re.escape(hint)):
        parse_line(line)


# -- commands --------------------------------------------------------------------------------


def test_help_lists_every_command(monkeypatch):
    outcome = chat(monkeypatch, "/help")
    assert (outcome.status, outcome.out) == (0, "")
    for name in COMMANDS:
        assert f"  {name}" in outcome.err


@pytest.mark.parametrize("leave", ["/quit", "/exit"])
def test_leaving_exits_0_and_reads_no_further(monkeypatch, leave):
    assert chat(monkeypatch, leave, lambda: pytest.fail("read on")).status == 0


def test_the_end_of_input_exits_0(monkeypatch):
    assert chat(monkeypatch).status == 0


def test_status_shows_model_context_mode_rates_and_ranks(monkeypatch):
    outcome = chat(monkeypatch, "/status", "hi", "/status")
    before, after = re.findall(r"context +(\d+) of 4096 tokens used", outcome.err)
    assert int(before) == 0
    assert int(after) == 21 + 6
    assert str(MODEL) in outcome.err
    assert re.search(r"ranks +1\n", outcome.err)
    assert re.search(r"thinking +high\n", outcome.err)
    assert re.search(r"last answer +none yet\n", outcome.err)
    assert re.search(r"last answer +prefill: 21 tokens, \d+\.\d\d t/s", outcome.err)


def test_the_mode_switches_for_the_next_turns(monkeypatch):
    outcome = chat(monkeypatch, "/nothink", "hi", "/think", "hi", "/think-max", "/status", "hi")
    assert "next turn on: none" in outcome.err
    assert "393216" in outcome.err  # max is not possible in so small a context
    assert outcome.out.startswith(run("-p", "hi", "-n", 6, "--temp", 0, "--nothink").out)


def test_another_context_starts_an_empty_session(monkeypatch):
    outcome = chat(monkeypatch, "hi", "/ctx 64", "/status", "hi", "/ctx 99999", "/ctx x", "/status")
    assert "the transcript is gone" in outcome.err
    assert re.search(r"context +0 of 64 tokens used", outcome.err)
    assert re.search(r"context +27 of 64 tokens used", outcome.err)  # wrong sizes changed nothing
    assert "1 to 4096, got '99999'" in outcome.err
    assert "got 'x'" in outcome.err
    first, second = outcome.out.splitlines()[0], outcome.out.splitlines()[-1]
    assert outcome.out == run("-p", "hi", "-n", 6, "--temp", 0).out * 2
    assert first
    assert second


def test_a_file_is_sent_as_the_next_turn(monkeypatch, tmp_path):
    path = tmp_path / "my turn.txt"
    path.write_text("hi")
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    outcome = chat(
        monkeypatch, f"/read {path}", f"/read {tmp_path}", f"/read {empty}", "/read none/such"
    )
    assert outcome.status == 0
    assert outcome.out == run("-p", "hi", "-n", 6, "--temp", 0).out
    assert "directory" in outcome.err
    assert "holds no text" in outcome.err
    assert "No such file" in outcome.err


def test_ctrl_c_at_the_prompt_is_a_hint_only(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    outcome = chat(monkeypatch, interrupt, "hi")
    assert outcome.status == 0
    assert "/quit leaves" in outcome.err
    assert outcome.out == run("-p", "hi", "-n", 6, "--temp", 0).out


def test_a_turn_that_does_not_fit_is_reported_and_leaves_the_rest(monkeypatch):
    outcome = chat(
        monkeypatch, "hi", "word " * 50, "/status", "ho", argv=("-n", 4, "--temp", 0, "-c", 60)
    )
    assert outcome.status == 0
    assert re.search(r"prompt of \d+ tokens does not fit a context of 60", outcome.err)
    assert re.search(r"context +25 of 60 tokens used", outcome.err)
    expected = chat(monkeypatch, "hi", "ho", argv=("-n", 4, "--temp", 0, "-c", 60))
    assert outcome.out == expected.out


def test_a_raw_chat_continues_text(monkeypatch, model):
    outcome = chat(monkeypatch, "once", " upon", argv=("-n", 4, "--temp", 0, "--raw-prompt"))
    conversation = Conversation(model, raw=True)
    texts = []
    for text in ("once", " upon"):
        turn = conversation.render(text, None)
        texts.append(list(conversation.answer(turn, max_tokens=4, sampling=GREEDY)))
    decode = model.tokenizer.decode
    assert outcome.out.replace("\n", "") == "".join(map(decode, texts)).replace("\n", "")


# -- the timeline ----------------------------------------------------------------------------


def test_transcript_and_timeline_grow_together(model):
    conversation = Conversation(model, system="Be brief.")
    first = conversation.render("one", ds4.ThinkingMode.NONE)
    answer = list(conversation.answer(first, max_tokens=5, sampling=GREEDY))
    assert conversation.live == [*first.ids, *answer]
    assert conversation.session.tokens == [*first.ids, *answer[:-1]]  # the last is not fed yet
    second = conversation.render("two", ds4.ThinkingMode.NONE)
    again = list(conversation.answer(second, max_tokens=5, sampling=GREEDY))
    special = model.tokenizer.special
    closing = [] if answer[-1] == special.eos else [special.eos]
    turn = [special.user, *model.tokenizer.encode("two", special=False), special.assistant]
    expected = [*first.ids, *answer, *closing, *turn, special.end_think]
    assert conversation.live == [*expected, *again]
    with model.session() as fresh:
        assert list(fresh.generate(expected, max_tokens=5, sampling=GREEDY)) == again
    conversation.close()


def test_a_stopped_prefill_rolls_the_turn_back(model):
    conversation = Conversation(model)
    turn = conversation.render("one", None)
    list(conversation.answer(turn, max_tokens=3, sampling=GREEDY))
    before = conversation.live
    asked = iter([False, False, True])
    long_turn = conversation.render("word " * 30, None)
    stopped = conversation.answer(
        long_turn, max_tokens=3, sampling=GREEDY, stop=lambda: next(asked)
    )
    assert list(stopped) == []
    assert conversation.live == before
    turn = conversation.render("two", None)
    found = list(conversation.answer(turn, max_tokens=4, sampling=GREEDY))
    with model.session() as fresh:
        assert (
            list(fresh.generate([*before, *turn.ids[1:]], max_tokens=4, sampling=GREEDY)) == found
        )
    conversation.close()


def test_a_stopped_first_turn_leaves_an_empty_timeline(model):
    conversation = Conversation(model)
    asked = iter([False, False, True])
    turn = conversation.render("word " * 30, None)
    stopped = conversation.answer(turn, max_tokens=3, sampling=GREEDY, stop=lambda: next(asked))
    assert list(stopped) == []
    assert conversation.live == []
    turn = conversation.render("two", None)
    found = list(conversation.answer(turn, max_tokens=6, sampling=GREEDY))
    with model.session() as fresh:
        assert list(fresh.generate(turn.ids, max_tokens=6, sampling=GREEDY)) == found
    conversation.close()


def test_a_failed_decode_keeps_the_answer_so_far(model, monkeypatch):
    conversation = Conversation(model)
    turn = conversation.render("one", None)
    answer = conversation.answer(turn, max_tokens=50, sampling=GREEDY)
    got = [next(answer) for _ in range(3)]
    real = model.executor.step

    def step(plan):
        monkeypatch.undo()
        real(plan)
        raise ds4.errors.DeviceError("made to fail")  # after the executor has advanced

    monkeypatch.setattr(model.executor, "step", step)
    with pytest.raises(ds4.errors.DeviceError):
        next(answer)
    assert conversation.live == [*turn.ids, *got]
    assert model.executor.session_length(conversation.session.id) == len(conversation.session)
    follow = conversation.render("two", None)
    found = list(conversation.answer(follow, max_tokens=4, sampling=GREEDY))
    with model.session() as fresh:
        expected = fresh.generate(
            [*turn.ids, *got[:-1], *follow.ids], max_tokens=4, sampling=GREEDY
        )
        assert list(expected) == found
    conversation.close()


def test_a_model_that_keeps_failing_loses_the_conversation_and_says_so(model, monkeypatch):
    conversation = Conversation(model, system="Be brief.", n_ctx=200)
    list(conversation.answer(conversation.render("one", None), max_tokens=3, sampling=GREEDY))
    turn = conversation.render("two", None)

    def step(plan):
        raise ds4.errors.DeviceError("made to fail")

    monkeypatch.setattr(model.executor, "step", step)
    # Cutting to the middle of a chunk needs steps, too.
    monkeypatch.setattr(model.executor, "rewind", lambda session, length: 0)
    answer = conversation.answer(turn, max_tokens=3, sampling=GREEDY)
    with pytest.raises(ConversationLostError, match="made to fail; the conversation is lost"):
        next(answer)
    monkeypatch.undo()
    assert conversation.live == []
    assert conversation.session.n_ctx == 200
    turn = conversation.render("two", None)
    assert model.tokenizer.decode(turn.ids[1:]).startswith("Be brief.")
    assert len(list(conversation.answer(turn, max_tokens=3, sampling=GREEDY))) == 3
    conversation.close()


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_failed_prefill_rolls_the_turn_back(model, monkeypatch, fails_at):
    conversation = Conversation(model)
    list(conversation.answer(conversation.render("one", None), max_tokens=3, sampling=GREEDY))
    before = conversation.live
    real, calls = model.executor.step, []

    def step(plan):
        result = real(plan)
        calls.append(plan)
        if len(calls) == fails_at:
            raise ds4.errors.DeviceError("made to fail")  # after the executor has advanced
        return result

    monkeypatch.setattr(model.executor, "step", step)
    answer = conversation.answer(
        conversation.render("word " * 30, None), max_tokens=3, sampling=GREEDY
    )
    with pytest.raises(ds4.errors.DeviceError):
        list(answer)
    monkeypatch.undo()
    assert conversation.live == before
    turn = conversation.render("two", None)
    found = list(conversation.answer(turn, max_tokens=4, sampling=GREEDY))
    with model.session() as fresh:
        assert (
            list(fresh.generate([*before, *turn.ids[1:]], max_tokens=4, sampling=GREEDY)) == found
        )
    conversation.close()


def test_an_answer_that_is_left_keeps_what_was_produced(model):
    conversation = Conversation(model)
    turn = conversation.render("one", None)
    answer = conversation.answer(turn, max_tokens=50, sampling=GREEDY)
    got = [next(answer) for _ in range(3)]
    answer.close()
    assert conversation.live == [*turn.ids, *got]
    conversation.close()


# -- chat templates --------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<｜User｜>' if m.role == 'user' else '<｜Assistant｜></think>' if m.role == 'assistant'"
    " else '' }}"
    "{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    "<｜Assistant｜></think>"
)


def test_a_template_that_writes_the_models_layout_keeps_the_timeline(model, monkeypatch):
    answer = model.tokenizer.encode("An old sailor", special=False)  # a random model writes no text

    def generate(self, tokens, **kw):
        self.feed(tokens)
        for index, token in enumerate(answer):
            yield token
            if index + 1 < len(answer):
                self.feed([token])

    monkeypatch.setattr(ds4.Session, "generate", generate)
    own = Conversation(model, system="Be brief.")
    other = Conversation(model, system="Be brief.", template=ChatTemplate(TEMPLATE, origin="test"))
    for text in ("one", "two", "three"):
        for conversation in (own, other):
            before = len(conversation.session)
            turn = conversation.render(text, ds4.ThinkingMode.NONE)
            assert turn.keep == before  # nothing is fed again
            list(conversation.answer(turn, max_tokens=4, sampling=GREEDY))
        assert own.live == other.live
    own.close()
    other.close()


FORGETFUL = (
    "{{ bos_token }}{% for m in messages[-1:] %}<｜User｜>{{ m.content }}{% endfor %}"
    "<｜Assistant｜></think>"
)


def test_a_template_may_rewrite_the_past(model):
    conversation = Conversation(model, template=ChatTemplate(FORGETFUL, origin="test"))
    list(conversation.answer(conversation.render("one", None), max_tokens=4, sampling=GREEDY))
    turn = conversation.render("two", None)
    assert turn.keep == 2  # begin-of-sequence and the user marker
    answer = list(conversation.answer(turn, max_tokens=4, sampling=GREEDY))
    special = model.tokenizer.special
    words = model.tokenizer.encode("two", special=False)
    expected = [special.bos, special.user, *words, special.assistant, special.end_think]
    assert conversation.live == [*expected, *answer]
    with model.session() as fresh:
        assert list(fresh.generate(expected, max_tokens=4, sampling=GREEDY)) == answer
    conversation.close()


def test_a_stopped_turn_restores_the_past_that_a_template_rewrote(model):
    conversation = Conversation(model, template=ChatTemplate(FORGETFUL, origin="test"))
    list(conversation.answer(conversation.render("one", None), max_tokens=4, sampling=GREEDY))
    before = conversation.live
    turn = conversation.render("word " * 30, None)
    answer = conversation.answer(turn, max_tokens=4, sampling=GREEDY, stop=lambda: True)
    assert list(answer) == []
    assert conversation.live == before
    follow = conversation.given([5, 6])
    found = list(conversation.answer(follow, max_tokens=4, sampling=GREEDY))
    with model.session() as fresh:
        assert list(fresh.generate([*before, 5, 6], max_tokens=4, sampling=GREEDY)) == found
    conversation.close()


def test_reasoning_is_told_apart_for_the_template(model):
    template = ChatTemplate("{{ messages | length }}", origin="test")
    conversation = Conversation(model, template=template)
    special = model.tokenizer.special
    words = model.tokenizer.encode("why", special=False)
    for prompt, sampled, expected in (
        ([special.think], [*words, special.end_think, *words, special.eos], ("why", "why")),
        ([special.think], words, ("why", "")),
        ([special.end_think], [*words, special.eos], ("", "why")),
    ):
        message = conversation._message(prompt, sampled)
        assert (message.reasoning, message.content) == expected
    conversation.close()


def test_the_option_takes_a_file_or_the_models_own_template(tmp_path):
    path, trace = tmp_path / "t.jinja", tmp_path / "trace"
    path.write_text("{{ bos_token }}[{{ messages[-1].content }}]<｜Assistant｜></think>")
    argv = ("-p", "<｜User｜>", "-n", 2, "--temp", 0, "--chat-template")
    outcome = run(*argv, path, "--trace", trace)
    assert outcome.status == 0
    assert "[<｜User｜>]<｜Assistant｜></think>" in trace.read_text()
    assert "763" not in trace.read_text()  # the user's text did not become a marker
    none = run(*argv, "model")
    assert none.status == 2
    assert "holds no chat template" in none.err
    missing = run(*argv, tmp_path / "none")
    assert missing.status == 1
    assert "--chat-template" in missing.err
    path.write_text("{% if %}")
    wrong = run(*argv, path)
    assert wrong.status == 2
    assert "line 1" in wrong.err
    assert run(*argv, path, "--raw-prompt").status == 2
    path.write_text("{{ raise_exception('not like this') }}")
    failing = run(*argv, path)
    assert failing.status == 1
    assert "not like this" in failing.err


# -- Ctrl+C ----------------------------------------------------------------------------------


def test_ctrl_c_sets_a_flag_and_only_the_third_one_leaves():
    said, left = [], []
    interrupt = Interrupt(said.append, lambda: left.append(True))
    before = signal.getsignal(signal.SIGINT)
    with interrupt.guard():
        assert not interrupt()
        signal.raise_signal(signal.SIGINT)
        assert (interrupt(), said, left) == (True, [], [])
        signal.raise_signal(signal.SIGINT)
        assert (len(said), left) == (1, [])
        signal.raise_signal(signal.SIGINT)
        assert left == [True]
    assert signal.getsignal(signal.SIGINT) is before
    with interrupt.guard():
        assert not interrupt()


# -- line editors ----------------------------------------------------------------------------


def terminal(data: bytes, environment=None, *, tty: bool = False) -> Terminal:
    return Terminal(
        program="ds4",
        stdin=Input(data, tty=True),
        stdout=Stream(),
        stderr=Stream(tty=tty),
        environment=environment or {},
    )


def test_a_dumb_terminal_gets_plain_lines_with_the_prompt_on_standard_error():
    for at in (
        terminal(b"one\ntwo", {"TERM": "dumb"}, tty=True),
        terminal(b"one\ntwo"),
    ):
        editor = open_editor(at)
        assert isinstance(editor, PlainEditor)
        assert [editor.read(), editor.read()] == ["one", "two"]
        with pytest.raises(EOFError):
            editor.read()
        assert at.stdout.getvalue() == ""
        assert at.stderr.getvalue() == "ds4> " * 3


def test_the_history_is_private_and_optional(tmp_path):
    path = history_path({"XDG_STATE_HOME": str(tmp_path)})
    assert path == tmp_path / "ds4" / "history"
    assert path.stat().st_mode & 0o777 == 0o600
    assert history_path({}) is None
    (tmp_path / "file").write_text("")
    assert history_path({"XDG_STATE_HOME": str(tmp_path / "file")}) is None
    assert history_path({"HOME": str(tmp_path)}) == tmp_path / ".local/state/ds4/history"


# -- a real terminal -------------------------------------------------------------------------

PROMPT = r"\x1b\[\?2004h[^\n]*ds4>"  # bracketed paste goes on when a prompt opens
RATE = r"generation: \d+ tokens, \d+\.\d\d t/s"


@pytest.fixture
def child(tmp_path):
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody answers the question for the cursor's place
    }
    process = pexpect.spawn(
        sys.executable,
        ["-m", "ds4", "-m", str(MODEL), "-t", "1", "-n", "3000", "--seed", "3"],
        env=environment,
        encoding="utf-8",
        codec_errors="replace",
        timeout=300,  # a first start compiles the kernels
        dimensions=(40, 120),
    )
    yield process
    process.close(force=True)


def test_ctrl_c_in_an_answer_keeps_the_chat_going(child, tmp_path):
    """C6, and a pasted text of several lines is one turn."""
    child.expect(PROMPT)
    child.send("tell me a long story\r")
    child.expect(r"\x1b\[2m")  # the answer has begun
    child.sendintr()
    child.expect(RATE)
    child.expect("what was written is kept")
    child.expect(PROMPT)
    child.send("\x1b[200~second\nprompt\x1b[201~")
    child.send("\r")
    child.expect(r"\x1b\[2m")
    child.sendintr()
    child.expect(RATE)
    child.expect(PROMPT)
    child.sendintr()
    child.expect("/quit leaves")
    child.expect(PROMPT)
    child.send("/quit\r")
    child.expect(pexpect.EOF)
    child.wait()
    assert (child.exitstatus, child.signalstatus) == (0, None)
    assert "Traceback" not in child.before
    entries = (tmp_path / ".local/state/ds4/history").read_text()
    assert "+second\n+prompt\n" in entries


def test_ctrl_d_leaves_with_0_and_the_history_is_kept(child, tmp_path):
    child.expect(PROMPT)
    child.send("/status\r")
    child.expect("0 of 4096 tokens used")
    child.expect(PROMPT)
    child.sendeof()
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    assert "+/status" in (tmp_path / ".local/state/ds4/history").read_text()
