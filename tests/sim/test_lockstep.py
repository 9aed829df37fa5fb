"""Whatever is asked in whatever order, and whoever gives up waiting, all ranks stay together."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import ConfigError, Ds4Error, InvalidRequest, Overloaded, SnapshotError
from ds4.steps import Decode, StepPlan
from tests.fakes import VOCAB, FakeExecutor, Faults
from tests.sim.harness import simulate, step

SESSIONS = st.integers(1, 5)
COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), SESSIONS, st.integers(0, 70)),
        st.tuples(st.just("close"), SESSIONS),
        st.tuples(st.just("step"), SESSIONS, st.lists(st.integers(0, VOCAB), max_size=9)),
        st.tuples(st.just("rewind"), SESSIONS, st.integers(0, 20)),
        st.tuples(st.just("save"), SESSIONS),
        st.tuples(st.just("load"), SESSIONS),
    ),
    max_size=25,
)


async def play(target, commands):
    """Run commands on a `World`, or on an executor behind the same names; returns what was seen."""
    seen, saved = [], b""
    for name, session, *rest in commands:
        try:
            if name == "open":
                seen.append(await target.open_session(session, rest[0]))
            elif name == "close":
                seen.append(await target.close_session(session))
            elif name == "step":
                rows = await step(target, session, rest[0])
                seen.append([(row.token, row.logits.tobytes()) for row in rows])
            elif name == "rewind":
                seen.append(await target.rewind(session, rest[0]))
            elif name == "save":
                saved = await target.snapshot(session)
                seen.append(saved)
            else:
                seen.append(await target.restore(session, saved))
        except (InvalidRequest, ConfigError, SnapshotError, Overloaded) as error:
            seen.append(type(error).__name__)
    return seen


class Direct:
    """One executor behind the names of `World`."""

    def __init__(self):
        self.executor = FakeExecutor()

    def timeline(self, session):
        return self.executor.session_tokens(session)

    def __getattr__(self, name):
        async def call(*args):
            if name == "open_session" and len(self.executor.sessions) >= 4:
                if args[0] in self.executor.sessions:
                    raise ConfigError("open already")
                raise Overloaded("full")
            return getattr(self.executor, name)(*args)

        return call


@settings(max_examples=60)
@given(commands=COMMANDS, n=st.sampled_from([1, 2, 4]))
def test_any_sequence_of_requests_gives_what_one_executor_gives_and_ends_clean(commands, n):
    async def script(world):
        return await play(world, commands)

    outcome = simulate(n, script=script)
    assert outcome.error is None
    assert outcome.script_error is None
    assert outcome.codes() == dict.fromkeys(range(n), 0)
    expected = []

    async def direct():
        expected.extend(await play(Direct(), commands))

    trio.run(direct)
    assert outcome.result == expected
    held = [backend.executor.sessions for backend in outcome.backends.values()]
    assert all(other == held[0] for other in held)


@pytest.mark.parametrize("moment", [0.0, 0.5, 1.5, 2.5, 6.5, 9.5])
def test_a_caller_that_gives_up_leaves_the_ranks_together(moment):
    """The operation that is running ends everywhere; the next one starts from there."""

    async def script(world):
        await world.open_session(1, 32)
        await step(world, 1, [1, 2, 3])
        with trio.move_on_after(moment):
            for n in range(8):
                await step(world, 1, [n])
        length = len(world.timeline(1))
        rows = await step(world, 1, [50])
        return length, rows[0].token, world.timeline(1).tokens()

    outcome = simulate(2, script=script, faults={r: Faults(step_s=1.0) for r in range(2)})
    assert outcome.error is None
    assert outcome.codes() == {0: 0, 1: 0}
    length, token, tokens = outcome.result
    assert length == 3 + (min(8, int(moment) + 1) if moment else 0)
    assert token == int(FakeExecutor.logits(tokens).argmax())
    for backend in outcome.backends.values():
        assert backend.executor.session_tokens(1) == tokens


def test_requests_from_many_tasks_run_one_after_another():
    async def script(world):
        async def one(session):
            await world.open_session(session, 32)
            for n in range(5):
                await step(world, session, [n, n + 1])
            await world.close_session(session)

        async with trio.open_nursery() as nursery:
            for session in range(1, 5):
                nursery.start_soon(one, session)
        return world.statistics()

    outcome = simulate(4, script=script)
    assert outcome.error is None
    assert outcome.result.steps == 20
    assert outcome.result.sessions == 0


def test_a_step_without_rows_is_an_explicit_no_op_on_every_rank():
    async def script(world):
        result = await world.step(StepPlan(step=7))
        return result.step, result.rows

    outcome = simulate(2, script=script)
    assert outcome.error is None
    assert outcome.result == (7, ())
    assert [backend.executor.steps for backend in outcome.backends.values()] == [[], []]


def test_after_the_end_every_call_says_why():
    async def script(world):
        await world.open_session(1, 32)
        errors = []
        for _ in range(3):
            try:
                await world.step(
                    StepPlan(
                        step=1,
                        decode=(Decode(session=1, position=len(world.timeline(1)), token=1),),
                    )
                )
            except Ds4Error as error:
                errors.append(error)
        return errors

    outcome = simulate(2, script=script, faults={1: Faults(crash_step=2)})
    assert len(outcome.result) == 2
    assert outcome.result[0] is outcome.result[1] is outcome.error


def test_a_plan_with_too_many_rows_is_refused_before_anything_is_sent():
    async def script(world):
        await world.open_session(1, 64)
        with pytest.raises(InvalidRequest, match="at most 20"):
            await step(world, 1, list(range(21)))
        return (await step(world, 1, list(range(20))))[0].token

    outcome = simulate(2, script=script)
    assert outcome.error is None
    assert outcome.script_error is None
    assert outcome.backends[1].executor.steps == [1]
