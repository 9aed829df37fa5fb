"""A beat that comes late says so."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from ds4.world.pulse import Pulse


def test_a_beat_is_late_only_after_this_process_was_asleep():
    clock = MockClock()

    async def main():
        pulse = Pulse(1.0)
        seen = []

        async def beat():
            for _ in range(4):
                await pulse.wait()
                seen.append(pulse.was_late)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            for jump in (1.0, 1.5, 30.0, 1.0):
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(jump)
        assert seen == [False, False, True, False]

    trio.run(main, clock=clock)
