"""The three standard streams of a program, and the rules of what may go where.

Invariant: standard output carries the product only; every note, warning, error and progress line
goes to standard error. Escape codes are written only to a stream that shows them. Streams are
injected, so that a test can run a whole program in its own process.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

import attrs

__all__ = ["DIM", "RESET", "LineHandler", "Terminal", "is_terminal"]

DIM = "\x1b[2m"
RESET = "\x1b[0m"


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is an open terminal."""
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


@attrs.define(kw_only=True)
class Terminal:
    """Streams of one run.

    Attributes:
      program: name that begins every message.
      stdin: input.
      stdout: the product.
      stderr: everything else.
      environment: variables that decide about colour.
      quiet: leave out notes, progress and rates; warnings and errors stay.
    """

    program: str
    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    environment: Mapping[str, str]
    quiet: bool = False

    @property
    def colours_allowed(self) -> bool:
        """False under NO_COLOR (any non-empty value) and TERM=dumb."""
        return not self.environment.get("NO_COLOR") and self.environment.get("TERM") != "dumb"

    @property
    def dims_output(self) -> bool:
        """Whether reasoning on standard output is dimmed: only where a terminal shows it."""
        return self.colours_allowed and is_terminal(self.stdout)

    @property
    def redraws(self) -> bool:
        """Whether a line on standard error can be drawn over."""
        return is_terminal(self.stderr) and self.environment.get("TERM") != "dumb"

    def line(self, text: str) -> None:
        """Write one line to standard error, also under `quiet`."""
        self.stderr.write(text + "\n")
        self.stderr.flush()

    def note(self, text: str) -> None:
        """Something worth knowing; silent under `quiet`."""
        if not self.quiet:
            self.line(f"{self.program}: {text}")

    def warning(self, text: str) -> None:
        """Something probably unintended."""
        self.line(f"{self.program}: warning: {text}")

    def error(self, text: str) -> None:
        """Why the program cannot go on, on one line."""
        self.line(f"{self.program}: error: {' '.join(text.split())}")

    def read_input(self) -> bytes:
        """All of standard input."""
        binary = getattr(self.stdin, "buffer", None)
        if isinstance(binary, io.BufferedIOBase):
            return binary.read()
        return self.stdin.read().encode("utf-8", errors="surrogatepass")

    @contextmanager
    def logging(self, level: int) -> Iterator[None]:
        """Show the package's log records on standard error for as long as the block runs."""
        logger = logging.getLogger("ds4")
        handler = LineHandler(self)
        before = logger.level
        logger.addHandler(handler)
        logger.setLevel(level)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)


class LineHandler(logging.Handler):
    """Writes each record as one line: program, level, message."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        text = " ".join(record.getMessage().split())
        self._terminal.line(f"{self._terminal.program}: {record.levelname.lower()}: {text}")
