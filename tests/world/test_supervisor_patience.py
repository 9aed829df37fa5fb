"""How long a supervisor waits for a process that is slow to leave."""

from __future__ import annotations

import pytest
import trio

from ds4.world.local import Supervisor


@pytest.mark.parametrize(("patience_s", "status"), [(0.05, -9), (30.0, 0)])
def test_a_slow_process_is_killed_only_after_the_patience_it_was_given(patience_s, status):
    async def main():
        supervisor = Supervisor(head=None)
        process = await trio.lowlevel.open_process(["sleep", "0.6"])
        supervisor._processes[0] = process
        await supervisor.end(patience_s)
        return supervisor.statuses

    assert trio.run(main) == {0: status}
