"""Prefill progress and rates, both on standard error.

On a terminal one line is redrawn in place, from a clock of its own as well as after every chunk, so
a chunk that takes long is seen to run. Elsewhere there is at most one line per chunk. Nothing here
ever writes to standard output.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import attrs
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ds4.frontends.terminal import Terminal

__all__ = ["PrefillProgress", "Rates"]

_SHORT_PROMPT = 1
"""A prompt of one token is a decode step and shows no progress."""


class PrefillProgress:
    """Progress of one prompt, shown from `with` to its end or until all is done.

    The line goes away before any text of the answer comes.

    Args:
      terminal: where to.
      n_tokens: tokens in all.
    """

    def __init__(self, terminal: Terminal, n_tokens: int) -> None:
        self._terminal = terminal
        self._hidden = terminal.quiet or n_tokens <= _SHORT_PROMPT
        self._bar: Bar | None = None
        if terminal.redraws and not self._hidden:
            self._bar = _bar(terminal)
            self._task = self._bar.add_task("prefill", total=n_tokens)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` tokens are through; what `Session.feed` calls."""
        if self._hidden:
            return
        if self._bar is None:
            self._terminal.line(f"prefill {done}/{total} tokens {100 * done / total:.1f}%")
            return
        self._bar.update(self._task, completed=done, total=total)
        self._bar.refresh()
        if done >= total:
            self._bar.stop()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(terminal: Terminal) -> Bar:
    console = Console(
        file=terminal.stderr,
        force_terminal=True,
        no_color=not terminal.colours_allowed,
        highlight=False,
    )
    return Bar(
        TextColumn("prefill"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tokens {task.percentage:.1f}%"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


@attrs.define
class Rates:
    """Tokens and seconds of one answer.

    The first sampled token comes out of the prefill; every later one costs a decode step. So the
    generation rate divides the later tokens by the time they took.

    Attributes:
      prefill_tokens: tokens fed before the first sampled one.
      prefill_s: seconds until it was there.
      tokens: sampled tokens.
      decode_s: seconds from the first to the last.
    """

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    _start: float = attrs.field(factory=time.perf_counter)
    _first: float = attrs.field(default=0.0, init=False)

    def token(self) -> None:
        """Record that a token has been sampled."""
        now = time.perf_counter()
        if not self.tokens:
            self._first = now
            self.prefill_s = now - self._start
        self.tokens += 1
        self.decode_s = now - self._first

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second; 0 when nothing was measured."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second; 0 when nothing was measured."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"prefill: {self.prefill_tokens} tokens, {self.prefill_rate:.2f} t/s;"
            f" generation: {self.tokens} tokens, {self.decode_rate:.2f} t/s"
        )
