"""Runs `ds4` in this process on injected streams."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

from ds4.frontends.cli import main
from tests.conftest import DATA

MODEL = DATA / "v4-tiny-q2.gguf"


class Stream(io.StringIO):
    """An output that may claim to be a terminal."""

    def __init__(self, *, tty: bool = False) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


class Input(io.TextIOWrapper):
    """An input of bytes that may claim to be a terminal."""

    def __init__(self, data: bytes, *, tty: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


@attrs.frozen
class Outcome:
    status: int
    out: str
    err: str


def run(
    *argv: object,
    model: object = MODEL,
    stdin: bytes = b"",
    tty: str = "",
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run the program.

    Args:
      argv: its arguments.
      model: value of -m; None leaves it out.
      stdin: bytes on standard input.
      tty: which of the letters i, o, e (input, output, error) are terminals.
      environment: variables; none by default.
    """
    out, err = Stream(tty="o" in tty), Stream(tty="e" in tty)
    # One thread: the tests may share their cores with much else, and threads that wait for each
    # other on a busy machine take many times as long.
    options = ["-t", "1", *([] if model is None else ["-m", str(model)])]
    status = main(
        [*options, *map(str, argv)],
        stdin=Input(stdin, tty="i" in tty),
        stdout=out,
        stderr=err,
        environment=environment or {},
    )
    return Outcome(status, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True, scope="module")
def _threads_as_before():
    """`-t` sets a number that lasts for the process."""
    import numba

    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.fixture
def ids_file(tmp_path: Path, q2_oracle):
    """A JSON file of the ids of a reference prompt; returns (path, index)."""
    import json

    index = q2_oracle.indices()[-1]
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(q2_oracle.ids(index)))
    return path, index
