"""Ctrl+C during model work: a flag that is looked at between steps.

A `KeyboardInterrupt` inside a step would leave sessions undefined, so while work runs the signal
only sets a flag. Whoever insists is let out: a further Ctrl+C says what is being waited for, and
one more ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ds4.frontends.exits import EXIT_INTERRUPTED

__all__ = ["Interrupt"]

_PATIENCE = 3


def _exit_now() -> NoReturn:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\x1b[0m\n")  # a progress line hides the cursor
    os._exit(EXIT_INTERRUPTED)


class Interrupt:
    """Turns SIGINT into a flag while `guard` runs.

    Args:
      say: called from the signal handler at the second Ctrl+C.
      leave: called at the third; it ends the process.

    Attributes:
      asked: whether Ctrl+C was pressed in the current or latest guard.
    """

    def __init__(self, say: Callable[[str], None], leave: Callable[[], object] = _exit_now) -> None:
        self.asked = False
        self._say = say
        self._leave = leave
        self._count = 0

    def __call__(self) -> bool:
        """`asked`, in the form that `Session.feed` calls."""
        return self.asked

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Defer Ctrl+C. Only the main thread can; elsewhere nothing is deferred."""
        self.asked = False
        self._count = 0
        try:
            before = signal.signal(signal.SIGINT, self._handle)
        except ValueError:  # not the main thread, which gets no signals anyway
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._count += 1
        if self._count == _PATIENCE - 1:
            # The handler may run in the middle of a write to the same stream, which then refuses.
            with contextlib.suppress(RuntimeError):
                self._say("stopping after the step that runs now; Ctrl+C again ends the program")
        elif self._count >= _PATIENCE:
            self._leave()
