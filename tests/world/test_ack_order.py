"""A rank acknowledges a step when the device has finished it, not when it was handed over."""

from __future__ import annotations

import trio
import trio.testing

from ds4.protocol.messages import Ack, SessionOpen, Step
from ds4.steps import Decode, StepPlan
from ds4.world.rank_work import SessionWork
from ds4.world.timeline import Timeline, check_digest
from tests.fakes import FakeBackend, Mesh


class _HeldDevice:
    """A device whose completion event comes when the test says so. Implements `Device`."""

    def __init__(self):
        self.complete = trio.Event()

    async def run(self, function, *args):
        if function.__name__ == "_checked_step":
            await self.complete.wait()
        return function(*args)


def test_no_acknowledgement_before_the_device_has_completed():
    async def main():
        device = _HeldDevice()
        backend = FakeBackend(0, Mesh(1))
        backend.connect((), b"", 1.0)
        work = SessionWork(backend, device, 0)
        await work.do(SessionOpen(op=1, session=1, n_ctx=8))
        answers = []

        async def step():
            plan = StepPlan(step=1, decode=(Decode(session=1, position=0, token=1),))
            answers.extend(await work.do(Step(plan=plan, chk=check_digest({1: Timeline(8)}, [1]))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(step)
            await trio.testing.wait_all_tasks_blocked()
            assert answers == []
            assert work.ended == 0
            device.complete.set()
        (ack,) = answers
        assert isinstance(ack, Ack)
        assert work.ended == 1
        assert backend.executor.steps == [1]

    trio.run(main)
