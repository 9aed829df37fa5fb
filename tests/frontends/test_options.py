"""The command line itself: what is accepted, what is refused, and how both are said."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest

from ds4.frontends.arguments import TOPICS
from ds4.frontends.options import cli_parser
from tests.frontends.conftest import run

VALUES = {
    "FILE": "/nowhere/file",
    "N": "1",
    "F": "0.5",
    "TEXT": "words",
    "NAME": None,  # see CHOICES
    "R": "1",
    "ROLE": "none",
    "SEC": "5",
    "WHICH": "contiguous",
    "HOST PORT": "127.0.0.1 7000",
}
CHOICES = {"--backend": "cpu", "--activation-rounding": "vendor", "--transport": "tcp"}
OPTION = re.compile(r"^  (-\S.*?)(?:  |$)", re.MULTILINE)


def printed_options() -> list[tuple[str, str | None]]:
    """(option, metavar) of every spelling in `--help all`."""
    found = []
    for line in OPTION.findall(run("--help", "all").out):
        for spelling in line.split(", "):
            name, _, metavar = spelling.partition(" ")
            found.append((name, metavar or None))
    return found


def test_help_all_prints_every_option_of_the_parser():
    printed = {name for name, _ in printed_options()}
    # Options that are known only to be refused with a reason are not offered.
    offered = [a for a in cli_parser()._actions if a.help != argparse.SUPPRESS]
    assert printed == {name for action in offered for name in action.option_strings}


@pytest.mark.parametrize(("option", "metavar"), printed_options())
def test_every_printed_option_is_accepted_up_to_opening_the_model(option: str, metavar: str | None):
    """C2: with a missing model the exit status is 1, not 2."""
    if metavar == "[TOPIC]":
        assert run(option, model="/nowhere/model.gguf").status == 0
        return
    value = [] if metavar is None else (CHOICES.get(option) or VALUES[metavar]).split()
    model = "/nowhere/model.gguf" if option not in ("-m", "--model") else None
    outcome = run(option, *value, model=model)
    assert outcome.status == 1
    assert outcome.out == ""
    assert re.fullmatch(r"ds4: error: /nowhere/\S+: model file: .*\n", outcome.err)


def test_an_unknown_option_exits_2_and_is_named():
    """C1, in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-m", "ds4", "--bogus"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert found.stdout == ""
    assert "--bogus" in found.stderr
    assert found.stderr.startswith("ds4: error: ")
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--temp", "abc"], ["--temp", "'abc'"]),
        (["--temp", "nan"], ["--temp", "'nan'"]),
        (["--temp", "-1"], ["--temp", "'-1'"]),
        (["--temp", "inf"], ["--temp", "'inf'"]),
        (["--top-p", "1.5"], ["--top-p", "'1.5'"]),
        (["--min-p", ""], ["--min-p", "''"]),
        (["--top-k", "1.5"], ["--top-k", "'1.5'"]),
        (["--seed", "-1"], ["--seed", "'-1'"]),
        (["--seed", str(2**64)], ["--seed", str(2**64)]),
        (["-n", "0"], ["--tokens", "'0'"]),
        (["-n", "1_000"], ["--tokens", "'1_000'"]),
        (["-n", "9" * 5000], ["--tokens", "9999"]),
        (["-n"], ["--tokens"]),
        (["-c", "many"], ["--ctx", "'many'"]),
        (["-c", "0"], ["--ctx", "'0'"]),
        (["-t", "0"], ["--threads", "'0'"]),
        (["--prefill-chunk", "0"], ["--prefill-chunk", "'0'"]),
        (["--backend", "gpu"], ["--backend", "'gpu'"]),
        (["--activation-rounding", "x"], ["--activation-rounding", "'x'"]),
        (["--cpu", "--cuda"], ["--cuda", "--cpu"]),
        (["--think", "--nothink"], ["--nothink", "--think"]),
        (["-p", "a", "--prompt-file", "b"], ["--prompt-file", "--prompt"]),
        (["--tokens-file", "a", "-p", "b"], ["--tokens-file", "--prompt"]),
        (["--inspect", "--dump-tokens"], ["--inspect", "--dump-tokens"]),
        (["--dump-logits", ""], ["--dump-logits", "''"]),
        (["-p", "\udcff"], ["--prompt", "udcff"]),
        (["--help", "cooking"], ["--help", "'cooking'"]),
        (["stray"], ["stray"]),
        (["--prom", "abbreviation"], ["--prom"]),
    ],
)
def test_a_wrong_argument_exits_2_naming_program_option_and_value(argv, named):
    outcome = run(*argv)
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("ds4: error: ")
    assert outcome.err.count("\n") == 1
    for part in named:
        assert part in outcome.err


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_has_help_on_standard_output(topic: str):
    outcome = run("--help", topic)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("usage: ds4")
    assert outcome.out.count("\n") > 2


def test_help_advertises_only_topics_that_hold_something():
    text = run("--help").out
    assert text.endswith("More with ds4 --help TOPIC: diagnostics, commands, distributed, all.\n")
    assert "kv-cache" not in text
    assert "kv-cache" not in run("--help", "all").out


def test_help_by_topic_shows_that_topic_only():
    text = run("--help", "sampling").out
    assert "--top-k" in text
    assert "--inspect" not in text
    assert "/status" in run("--help", "commands").out
    assert "DS4_LOG" in run("--help", "diagnostics").out


@pytest.mark.parametrize("argv", [["--help"], ["--dump-tokens", "-p", "x"], ["--inspect"]])
def test_what_needs_no_model_run_does_not_import_numba(argv):
    code = (
        "import io, sys\n"
        "from ds4.frontends.cli import main\n"
        "status = main(sys.argv[1:], stdin=sys.stdin, stdout=io.StringIO(), stderr=sys.stderr,"
        " environment={})\n"
        "assert status == 0, status\n"
        "heavy = {'numba', 'trio', 'prompt_toolkit', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    from tests.frontends.conftest import MODEL

    subprocess.run([sys.executable, "-c", code, "-m", str(MODEL), *argv], check=True)


def test_an_unknown_variable_is_warned_about_naming_the_nearest():
    outcome = run("--dump-tokens", "-p", "x", environment={"DS4_LOGG": "1", "OTHER": "1"})
    assert outcome.status == 0
    assert "DS4_LOGG" in outcome.err
    assert "nearest known is DS4_LOG\n" in outcome.err
    assert "OTHER" not in outcome.err


def test_a_wrong_log_level_exits_2_naming_the_variable():
    outcome = run("--inspect", environment={"DS4_LOG": "loud"})
    assert outcome.status == 2
    assert "DS4_LOG" in outcome.err
    assert "'loud'" in outcome.err
