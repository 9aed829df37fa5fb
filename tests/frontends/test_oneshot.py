"""One prompt, one answer: what goes to which stream, and when it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading

import pytest

import ds4
from ds4.frontends import answer as answer_module
from ds4.frontends import cli
from tests.frontends.conftest import MODEL, run

GREEDY = ("-p", "hi", "-n", "8", "--temp", "0")
RATES = re.compile(
    r"prefill: (\d+) tokens, \d+\.\d\d t/s; generation: (\d+) tokens, \d+\.\d\d t/s\n\Z"
)


def test_a_greedy_answer_repeats_and_the_seed_does_not_matter():
    """C3."""
    one = run(*GREEDY, "--seed", 1)
    assert one.status == 0
    assert one.out == run(*GREEDY, "--seed", 1).out == run(*GREEDY, "--seed", 2).out


def test_a_sampled_answer_depends_on_the_seed_alone():
    argv = ("-p", "hi", "-n", "24")
    one, again, other = (run(*argv, "--seed", seed).out for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_the_answer_is_what_the_python_api_generates():
    with ds4.open_model(MODEL) as model:
        ids = model.chat.render(
            [
                ds4.Message(role="system", content="You are a helpful assistant"),
                ds4.Message(role="user", content="hi"),
            ]
        )
        with model.session() as session:
            tokens = list(
                session.generate(ids, max_tokens=8, sampling=ds4.SamplingParams(temperature=0.0))
            )
        expected = model.tokenizer.decode(t for t in tokens if t != model.tokenizer.special.eos)
    found = run(*GREEDY).out
    assert found == expected + ("" if expected.endswith("\n") else "\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["--nothink"],
        ["-sys", ""],
        ["-sys", "Be brief."],
        ["--raw-prompt"],
        ["--activation-rounding", "vendor"],
        ["--temp", "3"],
        ["-p", "ho"],
    ],
    ids=" ".join,
)
def test_options_that_change_the_computation_change_the_answer(argv):
    base = ["-n", "12", "--seed", "5", "-p", "hi"]
    if argv[0] == "-p":
        base = base[:-2]
    assert run(*base, *argv).out != run("-n", "12", "--seed", "5", "-p", "hi").out


@pytest.mark.parametrize(
    "argv",
    [["--prefill-chunk", "3"], ["-t", "2"], ["--quality"], ["--cpu"], ["--warm-weights"]],
    ids=" ".join,
)
def test_options_of_speed_change_no_byte_of_the_answer(argv):
    outcome = run(*GREEDY, *argv)
    assert outcome.status == 0
    assert outcome.out == run(*GREEDY).out


def test_redirected_output_holds_no_progress_and_no_escape_codes():
    """C4: also when standard error is a terminal."""
    outcome = run(*GREEDY, tty="e", environment={"TERM": "xterm-256color"})
    assert outcome.status == 0
    assert outcome.out == run(*GREEDY).out
    assert "\x1b" not in outcome.out
    assert "prefill" not in outcome.out


def test_progress_is_redrawn_in_place_on_a_terminal():
    outcome = run("-p", "word " * 60, "-n", 2, tty="e", environment={"TERM": "xterm-256color"})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", outcome.err)
    assert re.search(r"(\d+)/\1 tokens 100\.0%", shown)
    assert "\x1b[2K" in outcome.err  # the line is wiped, not left behind
    assert outcome.err.count("\x1b[?25l") == outcome.err.count("\x1b[?25h")  # cursor comes back


def test_progress_elsewhere_is_one_line_per_chunk():
    outcome = run("-p", "word " * 60, "-n", 2, "--prefill-chunk", 32)
    lines = [line for line in outcome.err.splitlines() if line.startswith("prefill ")]
    total = int(re.match(r"prefill \d+/(\d+)", lines[0])[1])
    assert len(lines) == -(-total // 32)
    assert lines[0] == f"prefill 32/{total} tokens {3200 / total:.1f}%"
    assert lines[-1] == f"prefill {total}/{total} tokens 100.0%"
    assert "\r" not in outcome.err
    assert "\x1b" not in outcome.err


def test_rates_follow_the_answer_with_two_decimals():
    outcome = run(*GREEDY)
    match = RATES.search(outcome.err)
    assert match
    assert int(match[2]) <= 8


def test_quiet_leaves_standard_error_empty():
    outcome = run(*GREEDY, "--quiet")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == run(*GREEDY).out


def test_reasoning_is_dimmed_on_a_terminal_and_marked_elsewhere(tmp_path):
    """The answer opens inside reasoning, so the first thing on a terminal is the dim code."""
    colours = {"TERM": "xterm-256color"}
    shown = run(*GREEDY, tty="oe", environment=colours)
    assert shown.out.startswith("\x1b[2m")
    assert "\x1b[0m" in shown.out
    assert run(*GREEDY, "--nothink", tty="oe", environment=colours).out.count("\x1b") == 0


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}])
def test_colours_are_off_when_asked(environment):
    assert "\x1b" not in run(*GREEDY, tty="oe", environment=environment).out


def test_piped_input_is_one_prompt():
    assert run("-n", 8, "--temp", 0, stdin=b"hi").out == run(*GREEDY).out
    assert run("-n", 8, "--temp", 0, stdin=b"hi\n").out == run(*GREEDY).out
    assert run("-n", 8, "--temp", 0, stdin=b"hi\nthere").out != run(*GREEDY).out


def test_a_prompt_option_leaves_standard_input_alone():
    assert run(*GREEDY, stdin=b"something else").out == run(*GREEDY).out


def test_a_prompt_file_is_the_prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("hi")
    assert run("--prompt-file", path, "-n", 8, "--temp", 0).out == run(*GREEDY).out


def test_no_prompt_at_all_exits_2():
    outcome = run(stdin=b"")
    assert outcome.status == 2
    assert "-p TEXT" in outcome.err


def test_token_ids_are_taken_as_they_are(tmp_path, q2_oracle):
    """The reference's own greedy continuation comes out."""
    index = int(next(k for k in q2_oracle.reference if re.fullmatch(r"greedy_\d+", k))[7:])
    expected = q2_oracle.reference[f"greedy_{index}"].tolist()
    path = tmp_path / "ids.json"
    path.write_text(str(q2_oracle.ids(index)))
    logprobs = tmp_path / "out.json"
    assert run("--tokens-file", path, "--dump-logprobs", logprobs, "-n", 12).status == 0
    import json

    steps = json.loads(logprobs.read_text())["steps"]
    assert [step["selected"]["id"] for step in steps] == expected[: len(steps)]


def test_a_huge_token_limit_ends_with_the_context():
    outcome = run("-p", "hi", "-c", 40, "-n", 10**25, "--temp", "0")
    assert outcome.status == 0
    assert "context is full" in outcome.err or RATES.search(outcome.err)


def test_a_prompt_longer_than_the_context_exits_1_with_both_counts():
    outcome = run("-p", "word " * 50, "-c", 20)
    assert outcome.status == 1
    assert outcome.out == ""
    assert re.search(
        r"ds4: error: prompt of \d+ tokens does not fit a context of 20\n", outcome.err
    )


def test_a_context_beyond_the_model_is_noted_and_capped():
    outcome = run(*GREEDY, "-c", 100000)
    assert outcome.status == 0
    assert "--ctx 100000" in outcome.err
    assert "4096" in outcome.err


def test_too_many_threads_exit_2_naming_the_option():
    outcome = run(*GREEDY, "-t", 60000)
    assert outcome.status == 2
    assert "--threads" in outcome.err
    assert "60000" in outcome.err


def test_cuda_without_it_exits_2_naming_the_option():
    outcome = run(*GREEDY, "--cuda")
    assert outcome.status == 2
    assert "--backend" in outcome.err


def test_think_max_in_a_small_context_is_high_and_says_so(tmp_path):
    trace = tmp_path / "trace.txt"
    outcome = run(*GREEDY, "--think-max", "--trace", trace)
    assert outcome.status == 0
    assert "393216" in outcome.err
    assert "393216" in trace.read_text()
    assert outcome.out == run(*GREEDY).out


def test_think_max_on_a_model_without_its_text_exits_2_naming_the_option(monkeypatch):
    monkeypatch.setattr("ds4.frontends.thinking.MAX_THINKING_CONTEXT", 4096)
    outcome = run(*GREEDY, "--think-max")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("ds4: error: argument --think-max: thinking mode max needs")
    assert outcome.err.count("\n") == 1


def test_warming_reads_all_weights_and_says_how_many():
    outcome = run(*GREEDY, "--warm-weights")
    assert "read 11,811,492 bytes of weights" in outcome.err


def test_quality_says_at_debug_level_that_the_cpu_has_no_other_kernels():
    outcome = run(*GREEDY, "--quality", environment={"DS4_LOG": "debug"})
    assert "ds4: debug: quality.exact backend=cpu" in outcome.err
    assert "quality" not in run(*GREEDY, "--quality").err


def test_without_a_model_option_the_bundled_model_runs(monkeypatch):
    monkeypatch.setattr(cli, "bundled_model", lambda: MODEL)
    assert run(*GREEDY, model=None).out == run(*GREEDY).out


def test_logits_that_are_not_numbers_exit_1_in_one_line(monkeypatch):
    def step(self, plan):
        raise FloatingPointError("logits at position 3 are not finite")

    monkeypatch.setattr("ds4.cpu.executor.CpuExecutor.step", step)
    outcome = run(*GREEDY)
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err == "ds4: error: logits at position 3 are not finite\n"


def test_the_trace_shows_prompt_answer_and_rates(tmp_path):
    trace = tmp_path / "trace.txt"
    outcome = run(*GREEDY, "--trace", trace)
    text = trace.read_text()
    assert "<｜User｜>hi<｜Assistant｜><think>" in text
    assert "You are a helpful assistant" in text
    assert RATES.search(outcome.err)[0].strip() in text
    assert "ended by: token limit" in text


def test_ctrl_c_ends_at_the_next_step_keeps_the_text_and_exits_130(monkeypatch):
    real = answer_module.AnswerWriter.token
    seen = []

    def token(self, value):
        real(self, value)
        seen.append(value)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(answer_module.AnswerWriter, "token", token)
    outcome = run("-p", "hi", "-n", 2000, "--temp", 0)
    assert outcome.status == 130
    assert len(seen) == 3
    assert outcome.out.rstrip("\n") != ""
    assert run(*GREEDY).out.startswith(outcome.out.rstrip("\n"))


def test_ctrl_c_during_prefill_writes_nothing_and_exits_130(monkeypatch):
    real = ds4.Session.feed

    def feed(self, tokens, **kw):
        if len(tokens) > 4:
            signal.raise_signal(signal.SIGINT)
        return real(self, tokens, **kw)

    monkeypatch.setattr(ds4.Session, "feed", feed)
    outcome = run("-p", "hi", "-n", 20)
    assert (outcome.status, outcome.out) == (130, "")


def test_a_closed_pipe_is_one_line_and_exit_1():
    command = [sys.executable, "-m", "ds4", "-m", str(MODEL), "-p", "hi", "-n", "400", "-t", "1"]
    read_end, write_end = os.pipe()
    process = subprocess.Popen(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("ds4: error: standard output: Broken pipe")


@pytest.mark.parametrize("argv", ["--help", "--inspect"])
@pytest.mark.parametrize(
    ("redirection", "reason"),
    [(">/dev/full", "standard output: No space left on device"), (">&-", "output is closed")],
)
def test_output_that_cannot_be_written_is_one_line_and_exit_1(argv, redirection, reason):
    command = f'"{sys.executable}" -m ds4 -m "{MODEL}" {argv} {redirection}'
    found = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.startswith("ds4: error: ")
    assert found.stderr.count("\n") == 1
    assert reason in found.stderr


def test_main_leaves_the_interrupt_handler_and_the_threads_as_they_were():
    before = signal.getsignal(signal.SIGINT), threading.active_count()
    run(*GREEDY, tty="oe", environment={"TERM": "xterm"})
    assert (signal.getsignal(signal.SIGINT), threading.active_count()) == before
