"""A regular beat that notices when this process itself has been asleep.

Silence is measured by the clock, but a process that was stopped, swapped out or starved has not
listened in the meantime: what its peers said is still waiting to be read. So a beat that comes late
proves nothing about them.
"""

from __future__ import annotations

import trio

__all__ = ["Pulse"]

_LATE_FACTOR = 2.0


class Pulse:
    """Beats every `period_s` seconds.

    Args:
      period_s: between beats.

    Attributes:
      was_late: the last beat came after more than two periods.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last = trio.current_time()
        self.was_late = False

    async def wait(self) -> None:
        """Return at the next beat."""
        await trio.sleep(self._period_s)
        now = trio.current_time()
        self.was_late = now - self._last > _LATE_FACTOR * self._period_s
        self._last = now
