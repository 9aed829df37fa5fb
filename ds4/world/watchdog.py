"""The last resort: a process that should have ended by now is ended.

Cancelling a task does not stop a thread, and a thread that hangs in a collective, or in the abort
of one, would keep the process, its memory and its port for ever.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ds4.world.exit_codes import ExitCode

__all__ = ["hard_exit_after"]

_log = logging.getLogger(__name__)


def _end(seconds: float) -> None:
    _log.critical("watchdog.exit seconds=%g: the abort did not return", seconds)
    os._exit(ExitCode.DATA_PLANE)


@contextmanager
def hard_exit_after(seconds: float) -> Iterator[None]:
    """End the process with status 6 unless the block is left within `seconds`."""
    timer = threading.Timer(seconds, _end, [seconds])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
