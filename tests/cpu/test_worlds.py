"""One model, many worlds: the same bits. Ranks are threads here, joined by real TCP collectives."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ds4.collectives import CollectiveListener, SoloCollective
from ds4.cpu.executor import CpuExecutor
from ds4.gguf import GGUFFile
from ds4.partition.collectives_model import bytes_sent, logit_rows, step_schedule
from ds4.partition.ownership import Ownership
from ds4.partition.placement import LayerPlacement, Placement
from ds4.partition.rules import Mode
from ds4.steps import Chunk, Decode, StepPlan, Want
from tests.conftest import relative_error
from tests.modelmaker import metadata, write_model

TOKEN = b"fedcba9876543210"
N_EXPERTS, N_LAYERS = 16, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Eight output groups and sixteen experts: every world divides it."""
    return write_model(tmp_path_factory.mktemp("model") / "eight.gguf", metadata())


def placements():
    shuffled = np.random.default_rng(4).permutation(N_EXPERTS) % 8
    load = np.random.default_rng(5).random(N_EXPERTS) ** 3
    return {
        "contiguous": Placement.contiguous(N_LAYERS, N_EXPERTS),
        "explicit": Placement(layers=(LayerPlacement.from_owners(shuffled.tolist()),) * N_LAYERS),
        "balanced": Placement(layers=(LayerPlacement.balanced(load),) * N_LAYERS),
    }


def plans():
    ids = np.random.default_rng(6).integers(0, 300, 200).astype(np.int32)
    common = {"want": Want.ALL_LOGITS}
    return [
        StepPlan(
            step=1,
            prefill=(
                Chunk(session=1, start=0, tokens=ids[:130], **common),
                Chunk(session=2, start=0, tokens=ids[50:57], **common),
            ),
        ),
        StepPlan(
            step=2,
            prefill=(Chunk(session=2, start=7, tokens=ids[:9], **common),),
            decode=(Decode(session=1, position=130, token=int(ids[130]), **common),),
        ),
    ]


def run_rank(model, own, collective):
    executor = CpuExecutor(GGUFFile.open(model), threads=1, own=own, collective=collective)
    for session in (1, 2):
        executor.open_session(session, 256)
    results = [executor.step(plan) for plan in plans()]
    executor.close()
    return results


def run_world(model, mode, world, placement):
    listeners = [CollectiveListener() for _ in range(world)]
    addresses = [listener.address for listener in listeners]
    results = [None] * world
    sent = [0] * world

    def rank_main(rank):
        with GGUFFile.open(model) as file:
            shape = CpuExecutor(file, threads=1).shape
        own = Ownership.of(shape, mode=mode, world=world, rank=rank, placement=placement)
        collective = listeners[rank].connect(rank, addresses, TOKEN)
        before = collective.statistics().payload_bytes_sent
        results[rank] = run_rank(model, own, collective)
        sent[rank] = collective.statistics().payload_bytes_sent - before

    threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(result is not None for result in results)
    return results, sent


def logits_of(results):
    return np.concatenate([row.logits for result in results for row in result.rows])


@pytest.fixture(scope="module")
def alone(model):
    with GGUFFile.open(model) as file:
        shape = CpuExecutor(file, threads=1).shape
    return {
        name: logits_of(run_rank(model, Ownership.of(shape, placement=placement), SoloCollective()))
        for name, placement in placements().items()
    }


@pytest.mark.parametrize("placement", ["contiguous", "explicit", "balanced"])
@pytest.mark.parametrize("mode", [Mode.EXPERT_PARALLEL, Mode.TENSOR_PARALLEL])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_world_gives_the_bits_of_one_rank(model, alone, world, mode, placement):
    results, _ = run_world(model, mode, world, placements()[placement])
    for rank in range(world):
        found = logits_of(results[rank])
        np.testing.assert_array_equal(
            found.view(np.uint32), alone[placement].view(np.uint32), err_msg=f"rank {rank}"
        )
        assert [r.digest for r in results[rank]] == [r.digest for r in results[0]]


def test_placements_differ_in_association_only(alone):
    for name in ("explicit", "balanced"):
        assert relative_error(alone[name], alone["contiguous"]).max() < 1e-5
        assert not np.array_equal(alone[name], alone["contiguous"])


@pytest.mark.parametrize("mode", [Mode.EXPERT_PARALLEL, Mode.TENSOR_PARALLEL])
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_sends_the_bytes_of_the_schedule(model, world, mode):
    _, sent = run_world(model, mode, world, placements()["contiguous"])
    with GGUFFile.open(model) as file:
        shape = CpuExecutor(file, threads=1).shape
    schedules = [
        step_schedule(shape, mode, world, n_rows=plan.n_rows, n_logit_rows=logit_rows(plan))
        for plan in plans()
    ]
    for rank in range(world):
        assert sent[rank] == sum(bytes_sent(s, world, rank) for s in schedules) > 0
