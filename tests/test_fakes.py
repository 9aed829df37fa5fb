"""The fakes keep the interfaces they stand for; a fake that does not proves nothing."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import trio

from ds4.backend import RankBackend, RefusedBackend
from ds4.cpu.backend import CpuBackend
from ds4.cpu.executor import CpuExecutor
from ds4.errors import ConfigError, Ds4Error, InvalidRequest, SnapshotError
from ds4.executor import StepExecutor
from ds4.gguf import GGUFFile
from ds4.steps import Chunk, Decode, StepPlan, Want
from tests.fakes import FakeBackend, FakeExecutor, Mesh


@pytest.fixture(params=["fake", "cpu"])
def executor(request, q2_oracle):
    if request.param == "fake":
        yield FakeExecutor()
    else:
        real = CpuExecutor(GGUFFile.open(q2_oracle.path), threads=1)
        yield real
        real.close()


def chunk(session, start, tokens):
    return StepPlan(
        step=1,
        prefill=(Chunk(session=session, start=start, tokens=tokens, want=Want.ALL_LOGITS),),
    )


def decode(session, position, token):
    return StepPlan(
        step=2,
        decode=(Decode(session=session, position=position, token=token, want=Want.ALL_LOGITS),),
    )


def test_both_are_step_executors(executor):
    assert isinstance(executor, StepExecutor)


def test_results_do_not_depend_on_how_tokens_were_fed(executor):
    executor.open_session(1, 16)
    executor.open_session(2, 16)
    whole = executor.step(chunk(1, 0, [1, 2, 3, 4])).rows[0]
    executor.step(chunk(2, 0, [1, 2, 3]))
    last = executor.step(decode(2, 3, 4)).rows[0]
    assert last.token == whole.token
    np.testing.assert_array_equal(last.logits[-1], whole.logits[-1])


def test_what_is_wrong_is_refused_and_changes_nothing(executor):
    executor.open_session(1, 4)
    executor.step(chunk(1, 0, [1, 2]))
    for plan in (chunk(1, 0, [1]), chunk(1, 2, [1, 2, 3]), decode(1, 3, 1), decode(9, 0, 1)):
        with pytest.raises(InvalidRequest):
            executor.check(plan)
        with pytest.raises(InvalidRequest):
            executor.step(plan)
    with pytest.raises(ConfigError):
        executor.open_session(1, 4)
    with pytest.raises(InvalidRequest):
        executor.rewind(1, 3)
    with pytest.raises(SnapshotError):
        executor.restore(1, b"not a snapshot")
    assert executor.session_tokens(1) == [1, 2]


def test_a_rewind_keeps_a_prefix_and_says_how_long(executor):
    executor.open_session(1, 32)
    ids = list(range(1, 20))
    executor.step(chunk(1, 0, ids))
    kept = executor.rewind(1, 9)
    assert 0 <= kept <= 9
    assert executor.session_tokens(1) == ids[:kept]
    assert executor.session_length(1) == kept


def test_a_snapshot_restores_the_tokens(executor):
    executor.open_session(1, 16)
    executor.open_session(2, 16)
    executor.step(chunk(1, 0, [1, 2, 3]))
    executor.restore(2, executor.snapshot(1))
    assert executor.session_tokens(2) == [1, 2, 3]
    executor.close_session(1)
    with pytest.raises(InvalidRequest):
        executor.session_length(1)
    executor.close()


@pytest.mark.parametrize("backend", [FakeBackend, CpuBackend, RefusedBackend])
def test_backends_take_the_arguments_of_the_interface(backend):
    for name, member in inspect.getmembers(RankBackend, inspect.isfunction):
        if name.startswith("_"):
            continue
        expected = list(inspect.signature(member).parameters)
        assert list(inspect.signature(getattr(backend, name)).parameters) == expected, name
    assert isinstance(inspect.getattr_static(backend, "executor"), property)


def test_a_refused_backend_computes_nothing_and_frees_what_was_opened():
    freed = []
    backend = RefusedBackend(lambda: freed.append(1))
    for call in (
        lambda: backend.load(print),
        lambda: backend.offer("x"),
        lambda: backend.connect([], b"", 1.0),
        backend.warm_up,
        lambda: backend.executor,
    ):
        with pytest.raises(Ds4Error, match="refused rank"):
            call()
    backend.abort()
    backend.close()
    assert freed == [1]


def test_the_mesh_lets_nobody_pass_alone():
    passed = []

    async def rank(mesh, index):
        await mesh.join(index, trio.Event())
        passed.append(index)

    async def main():
        mesh = Mesh(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rank, mesh, 0)
            await trio.testing.wait_all_tasks_blocked()
            assert passed == []
            nursery.start_soon(rank, mesh, 1)
        assert sorted(passed) == [0, 1]

    trio.run(main)
