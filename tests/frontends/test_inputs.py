"""Files that options name, missing, wrong or hostile: one line, exit 1, the option named."""

from __future__ import annotations

import os
import stat

import pytest

from ds4.frontends.files import FileError, read_token_ids, write_file
from ds4.frontends.prefix import parse_prefix
from tests.frontends.conftest import run


def refused(outcome, *parts) -> None:
    assert outcome.status == 1
    assert outcome.out == ""
    assert outcome.err.startswith("ds4: error: ")
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


@pytest.mark.parametrize("option", ["--prompt-file", "--tokens-file", "--perplexity-file"])
def test_a_missing_file_or_a_directory_is_refused(option, tmp_path):
    refused(run(option, tmp_path / "none"), option, "none", "No such file")
    refused(run(option, tmp_path), option, str(tmp_path), "directory")
    refused(run(option, "a\0b"), option, "null")


def test_a_missing_prefix_file_is_refused(tmp_path):
    refused(run("-p", "x", "--prefix-file", tmp_path / "none"), "--prefix-file", "No such file")


def test_a_prompt_that_is_not_utf8_is_refused_naming_the_byte(tmp_path):
    path = tmp_path / "latin"
    path.write_bytes(b"caf\xe9")
    refused(run("--prompt-file", path), "--prompt-file", "0xe9", "offset 3")
    refused(run(stdin=b"\xff\xfe"), "standard input", "0xff", "offset 0")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100000, "not JSON"),
        ("[1, 2", "not JSON"),
        ("{}", "an object"),
        ("3", "found 3"),
        ('"words"', "text"),
        ("null", "null"),
        ("[]", "empty list"),
        ("[0, 768]", "item 1: expected a token id from 0 to 767, found 768"),
        ("[-1]", "item 0"),
        ("[1.5]", "found 1.5"),
        ("[1.0]", "found 1.0"),
        ("[NaN]", "found nan"),
        ("[true]", "item 0"),
        ('[0, "1"]', "item 1"),
        ("[[0]]", "a list"),
        ("[1e400]", "item 0"),
        (f"[{10**30}]", "item 0"),
        ("[" + "9" * 6000 + "]", "JSON"),
    ],
)
def test_wrong_token_files_are_refused_naming_the_item(content, named, tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(content)
    refused(run("--tokens-file", path, "-n", 1), "--tokens-file", str(path), named)


def test_token_ids_are_read_as_they_stand(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text("\ufeff [0, 767 ]\n", encoding="utf-8")
    assert read_token_ids("--tokens-file", str(path), 768) == [0, 767]


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"PK\x03\x04" * 20], ids=repr
)
@pytest.mark.parametrize("argv", [("-p", "x"), ("--inspect",)], ids=" ".join)
def test_a_file_that_is_no_model_is_one_line_and_exit_1(content, argv, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refused(run(*argv, model=path), str(path))


def test_a_directory_or_a_missing_model_is_refused(tmp_path):
    refused(run("-p", "x", model=tmp_path), "a directory")
    refused(run("-p", "x", model=tmp_path / "none\nsuch"), "No such file")


def test_an_empty_text_to_score_is_refused(tmp_path):
    path = tmp_path / "empty"
    path.write_text("")
    refused(run("--perplexity-file", path), "--perplexity-file", "no text")


def test_a_trace_that_cannot_be_written_is_refused(tmp_path):
    refused(run("-p", "x", "--trace", tmp_path / "no" / "t"), "--trace", "No such file")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--perplexity-file", "f", "-p", "x"], "--perplexity-file"),
        (["--prefix-file", "f", "--raw-prompt", "-p", "x"], "--prefix-file"),
    ],
)
def test_options_that_exclude_each_other_exit_2(argv, named):
    outcome = run(*argv)
    assert outcome.status == 2
    assert named in outcome.err


def test_earlier_turns_are_rendered_before_the_prompt(tmp_path):
    path, trace = tmp_path / "prefix", tmp_path / "trace"
    path.write_text("USER: one\nmore\nASSISTANT: two\n\nUSER: three\nASSISTANT: four\n")
    outcome = run("-p", "five", "--prefix-file", path, "-n", 1, "--trace", trace)
    assert outcome.status == 0
    assert (
        "<｜User｜>one\nmore<｜Assistant｜></think>two<｜end▁of▁sentence｜>"
        "<｜User｜>three<｜Assistant｜></think>four<｜end▁of▁sentence｜>"
        "<｜User｜>five<｜Assistant｜><think>"
    ) in trace.read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "found none"),
        ("\n\n", "found none"),
        ("hello\nUSER: x", "line 1"),
        ("ASSISTANT: x", "line 1: expected USER:"),
        ("USER: x\nUSER: y", "line 2: expected ASSISTANT:"),
        ("USER: x\nASSISTANT: y\nASSISTANT: z", "line 3: expected USER:"),
        ("USER: x", "last turn must be ASSISTANT:"),
        ("USER: x\n ASSISTANT: y", "last turn must be ASSISTANT:"),
    ],
)
def test_wrong_prefix_files_are_refused_naming_the_line(text, problem):
    with pytest.raises(FileError, match="--prefix-file p: ") as caught:
        parse_prefix("--prefix-file", "p", text)
    assert problem in str(caught.value)


def test_markers_count_only_at_the_start_of_a_line():
    turns = parse_prefix("o", "p", "USER: say USER: twice\nASSISTANT:ok\n  ASSISTANT: inner\n")
    assert [(t.role, t.content) for t in turns] == [
        ("user", "say USER: twice"),
        ("assistant", "ok\n  ASSISTANT: inner"),
    ]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")

    def write(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(FileError, match=r"--x .*out: No space left on device"):
        write_file("--x", str(path), write)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_keeps_its_mode_and_follows_a_link(tmp_path):
    path, link = tmp_path / "out", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_file("--x", str(link), lambda file: file.write(b"new"))
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    fresh = tmp_path / "fresh"
    write_file("--x", str(fresh), lambda file: file.write(b"new"))
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o666 & ~umask


def test_a_device_is_written_to_and_not_replaced():
    write_file("--x", "/dev/null", lambda file: file.write(b"new"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(FileError, match="No space left"):
        write_file("--x", "/dev/full", lambda file: file.write(b"new" * 10000))
