"""The table of refusals: each with its reason, its option and its value, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from ds4.errors import WorldRefused
from ds4.partition.rules import Mode
from ds4.world.refusals import WorldRequest, check_request, device_refusal

HERE = ("10.0.0.1", 7000)
EP = {"expert_parallel": True}
TP = {"tensor_parallel": True}
LEADER = {"role": "coordinator", "listen": HERE}
WORKER = {"role": "worker", "coordinator": HERE}

REFUSALS = [
    ({**EP, **TP}, "both_modes", "--expert-parallel and --tensor-parallel"),
    ({**LEADER}, "role_without_mode", "--role coordinator"),
    ({"world": 4}, "world_without_mode", "--tensor-parallel-world 4"),
    ({**EP, "listen": HERE}, "addresses", "--listen and --coordinator need --role"),
    ({**EP, "coordinator": HERE}, "addresses", "--listen and --coordinator need --role"),
    ({**EP, "role": "worker"}, "addresses", "needs --coordinator"),
    ({**EP, **WORKER, "listen": HERE}, "addresses", "--listen is for --role coordinator"),
    ({**EP, "role": "coordinator"}, "addresses", "needs --listen"),
    ({**EP, **LEADER, "coordinator": HERE}, "addresses", "--coordinator is for --role worker"),
    ({**EP, "foreign": (("--layers", "why"),)}, "foreign_option", "--layers with --expert-parall"),
    ({**TP, "foreign": (("--mtp", "why"),)}, "foreign_option", "--mtp with --tensor-parallel: why"),
    ({**EP, "world": 3}, "world_size", "--tensor-parallel-world 3: the world must be one of 2, 4"),
    ({**TP, "world": 16}, "world_size", "16"),
    ({**EP, **LEADER, "world": 1}, "world_size", "one of 2, 4, 8"),
    ({**EP, "rank": 1}, "rank", "--tensor-parallel-rank 1 is for --role worker"),
    ({**EP, **LEADER, "rank": 1}, "rank", "the head is rank 0"),
    ({**EP, **WORKER, "world": 4}, "rank", "needs --tensor-parallel-rank, 1 to 3"),
    ({**EP, **WORKER, "world": 4, "rank": 0}, "rank", "rank 0 is the head's"),
    ({**EP, **WORKER, "world": 4, "rank": 4}, "rank", "a worker is rank 1 to 3"),
    ({**EP, "backend": "cuda", "transport": "tcp"}, "transport", "--transport tcp"),
    ({**EP, "backend": "cpu", "transport": "nccl"}, "transport", "--transport nccl"),
    ({**EP, "needs_context": True, "has_context": False}, "automatic_context", "--ctx"),
]


@pytest.mark.parametrize(("options", "reason", "part"), REFUSALS)
def test_what_cannot_be_a_world_is_refused_with_its_reason(options, reason, part):
    with pytest.raises(WorldRefused) as caught:
        check_request(WorldRequest(**options))
    assert caught.value.reason == reason
    assert part in str(caught.value)


ALLOWED = [
    {},
    {"world": 1},
    {"transport": "tcp"},
    EP,
    TP,
    {**EP, "world": 8},
    {**TP, "world": 8},
    {**EP, **LEADER},
    {**EP, **WORKER},
    {**TP, **WORKER, "world": 4, "rank": 3},
    {**EP, "backend": "cuda", "transport": "nccl"},
    {**EP, "backend": "cpu", "transport": "tcp"},
    {**EP, "needs_context": True, "has_context": True},
]


@pytest.mark.parametrize("options", ALLOWED)
def test_what_can_be_a_world_is_not_refused(options):
    check_request(WorldRequest(**options))


def test_every_refusal_is_a_line_that_names_an_option():
    for options, _, _ in REFUSALS:
        with pytest.raises(WorldRefused) as caught:
            check_request(WorldRequest(**options))
        text = str(caught.value)
        assert "\n" not in text
        assert "--" in text


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_rank_of_a_world_is_allowed_and_no_other(world):
    for rank in range(-1, world + 2):
        request = WorldRequest(**EP, **WORKER, world=world, rank=rank)
        if 1 <= rank < world:
            check_request(request)
        else:
            with pytest.raises(WorldRefused):
                check_request(request)


def test_a_world_of_two_needs_neither_a_number_nor_a_rank():
    request = WorldRequest(**TP, **WORKER)
    assert (request.n_ranks, request.worker_rank, request.mode) == (2, 1, Mode.TENSOR_PARALLEL)
    assert not WorldRequest().is_networked


def test_ranks_on_different_gpus_pass_and_on_one_gpu_do_not():
    uuids = [(("uuid", f"GPU-{n}"),) for n in range(3)]
    assert device_refusal(dict(enumerate(uuids))) is None
    assert device_refusal({0: (("kind", "cpu"),), 1: (("kind", "cpu"),)}) is None
    for first, second in itertools.combinations(range(3), 2):
        devices = {0: uuids[0], 1: uuids[1], 2: uuids[2]}
        devices[second] = devices[first]
        refusal = device_refusal(devices)
        assert refusal.reason == "same_device"
        assert f"ranks {first} and {second}" in refusal.text
        assert "CUDA_VISIBLE_DEVICES" in refusal.flag
