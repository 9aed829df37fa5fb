"""Causes before consequences, and a step that does not fit is never launched."""

from __future__ import annotations

import pytest
import trio

from ds4.errors import CollectiveError, Desync, RankLost
from ds4.protocol.messages import SessionOpen, Step
from ds4.steps import Decode, StepPlan
from ds4.world.peer import Failure
from ds4.world.rank_work import SessionWork
from tests.fakes import FakeBackend, Mesh, SimDevice
from tests.sim.harness import simulate


def test_a_cause_that_arrives_after_its_consequence_is_what_everyone_is_told():
    async def report(head, nursery):
        await head.formed.wait()
        broken = CollectiveError("rank 0: connection closed")
        head.fail(Failure(error=broken, rank=0, is_consequence=True))
        await trio.sleep(0.5)
        head.fail(Failure(error=RankLost(1, "its process ended"), rank=1))

    async def script(world):
        await trio.sleep(60)

    outcome = simulate(2, extra=report, script=script)
    assert isinstance(outcome.error, RankLost)
    assert outcome.error.rank == 1
    assert outcome.codes() == {0: 3, 1: 3}


def test_a_step_whose_sessions_differ_from_the_heads_is_not_launched():
    async def main():
        backend = FakeBackend(0, Mesh(1))
        backend.connect((), b"", 1.0)
        work = SessionWork(backend, SimDevice(backend), 0)
        await work.do(SessionOpen(op=1, session=1, n_ctx=8))
        plan = StepPlan(step=1, decode=(Decode(session=1, position=0, token=1),))
        with pytest.raises(Desync, match="differ from the head's"):
            await work.do(Step(plan=plan, chk=b"another"))
        assert backend.executor.steps == []
        assert work.begun == 0

    trio.run(main)
