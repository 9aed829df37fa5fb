"""The values a world is made of: configurations, timelines, offers, verdicts, identities."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import (
    CollectiveError,
    ConfigError,
    Desync,
    Ds4Error,
    OutOfDeviceMemory,
    RankLost,
    WorldRefused,
)
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.rounding import Rounding
from ds4.partition.memory import MemoryBudget, MemoryKind
from ds4.partition.rules import Mode
from ds4.protocol.messages import Ack, Fail, Subject
from ds4.world.config import HeadConfig, RankConfig, RunConfig
from ds4.world.exit_codes import ExitCode, exit_code_of, exit_code_of_fail
from ds4.world.identity import Identity, build_digest, content_digest
from ds4.world.offers import pack_address, public_offers, unpack_address
from ds4.world.preflight import host_memory, memory_verdict
from ds4.world.timeline import Timeline, check_digest
from ds4.world.timeouts import Timeouts
from ds4.world.verdict import verdict
from tests.modelmaker import metadata, write_model

RUN = RunConfig(model="m.gguf", world=4, mode=Mode.TENSOR_PARALLEL, rounding=Rounding.VENDOR)


# -- configurations ---------------------------------------------------------------------------


def test_a_rank_gets_what_its_head_was_given():
    config = RankConfig(
        run=RUN,
        rank=3,
        address=("10.0.0.1", 9),
        key=b"0123456789abcdef",
        threads=2,
        timeouts=Timeouts(ping_s=2.5),
    )
    line = config.dumps()
    assert "\n" not in line
    assert RankConfig.loads(line) == config


def test_a_key_is_in_no_repr():
    key = b"very secret bytes"
    for config in (
        RankConfig(run=RUN, rank=0, address=("h", 1), key=key),
        HeadConfig(run=RUN, key=key),
    ):
        assert "secret" not in repr(config)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"run": 1}', '{"address": ["h", 1], "key": "zz"}']
)
def test_a_damaged_configuration_is_a_config_error(text):
    with pytest.raises(ConfigError, match="rank configuration"):
        RankConfig.loads(text)


@pytest.mark.parametrize("field", ["run", "rank", "address", "key", "threads", "timeouts"])
def test_a_configuration_without_a_field_is_a_config_error(field):
    values = json.loads(RankConfig(run=RUN, rank=0, address=("h", 1)).dumps())
    del values[field]
    with pytest.raises(ConfigError):
        RankConfig.loads(json.dumps(values))


@pytest.mark.parametrize(
    "change",
    [
        {"world": 3},
        {"world": 0},
        {"world": True},
        {"n_ctx": 0},
        {"backend": "gpu"},
        {"transport": "rdma"},
        {"mode": "ep"},
        {"rounding": "some"},
    ],
)
def test_a_wrong_value_is_refused_when_the_configuration_is_made(change):
    with pytest.raises((ConfigError, ValueError, TypeError)):
        attrs.evolve(RUN, **change)


def test_a_rank_outside_its_world_is_refused():
    with pytest.raises(ConfigError, match="0 to 3 in a world of 4, got 4"):
        RankConfig(run=RUN, rank=4, address=("h", 1))


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_timeout_must_be_a_positive_number(value):
    with pytest.raises(ConfigError, match="ping_s"):
        Timeouts(ping_s=value)


@pytest.mark.parametrize(
    ("host", "key", "warns"),
    [
        ("127.0.0.1", None, False),
        ("::1", None, False),
        ("0.0.0.0", None, True),
        ("10.1.2.3", None, True),
        ("10.1.2.3", b"k" * 16, False),
    ],
)
def test_listening_to_the_network_without_a_key_warns(host, key, warns):
    found = HeadConfig(run=RUN, listen=(host, 1), remote=True, key=key).warnings()
    assert bool(found) == warns
    assert all("--cluster-key-file" in line for line in found)


def test_local_ranks_share_the_cores():
    config = HeadConfig(run=RUN)
    assert list(config.local_ranks) == [0, 1, 2, 3]
    assert config.rank_threads >= 1
    assert list(attrs.evolve(config, remote=True).local_ranks) == [0]
    assert attrs.evolve(config, threads=3).rank_threads == 3


def test_the_data_plane_follows_the_backend():
    assert RUN.data_plane == "tcp"
    assert attrs.evolve(RUN, backend="cuda").data_plane == "nccl"
    assert attrs.evolve(RUN, world=1).data_plane == "none"


# -- exit codes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorldRefused("x", "y"), 2),
        (ConfigError("x"), 2),
        (RankLost(1, "x"), 3),
        (Desync(1, "x"), 5),
        (CollectiveError("x"), 6),
        (OutOfDeviceMemory("x"), 6),
        (Ds4Error("x"), 1),
    ],
)
def test_every_error_has_its_status(error, code):
    assert exit_code_of(error) == code


def test_a_rank_that_is_told_of_a_failure_ends_with_its_status():
    assert exit_code_of_fail("rank_lost") is ExitCode.PEER_LOST
    assert exit_code_of_fail("desync") is ExitCode.DESYNC
    assert exit_code_of_fail("collective") is ExitCode.DATA_PLANE
    assert exit_code_of_fail("never heard of") is ExitCode.PEER_LOST


# -- timelines --------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@given(pieces=st.lists(TOKENS, max_size=5), cut=st.integers(0, 60), more=TOKENS)
def test_a_timeline_is_its_tokens_however_it_came_to_hold_them(pieces, cut, more):
    grown, expected = Timeline(100), []
    for piece in pieces:
        grown.extend(piece)
        expected += piece
    assert grown.tokens() == expected
    grown.cut(min(cut, len(expected)))
    grown.extend(np.array(more, np.int32))
    expected = [*expected[:cut], *more]
    fresh = Timeline(100)
    fresh.replace(expected)
    assert grown.tokens() == fresh.tokens() == expected
    assert len(grown) == len(expected)
    assert grown.digest() == fresh.digest()


def test_the_digest_tells_sessions_lengths_and_tokens_apart():
    def lines(**tokens):
        found = {}
        for name, ids in tokens.items():
            found[int(name[1:])] = Timeline(9)
            found[int(name[1:])].extend(ids)
        return found

    digests = {
        check_digest(held, held)
        for held in (
            lines(s1=[1, 2]),
            lines(s2=[1, 2]),
            lines(s1=[1]),
            lines(s1=[2, 1]),
            lines(s1=[]),
            lines(s1=[1], s2=[2]),
            lines(s1=[1, 2], s2=[]),
            lines(s1=[], s2=[1, 2]),
        )
    }
    assert len(digests) == 8
    two = lines(s1=[1], s2=[2])
    assert check_digest(two, [1, 2]) == check_digest(two, [2, 1])


# -- offers -----------------------------------------------------------------------------------


def test_a_wildcard_offer_gets_an_address_that_others_can_dial():
    offers = [pack_address("0.0.0.0", 7), pack_address("10.0.0.2", 8)]
    found = [unpack_address(offer) for offer in public_offers("tcp", offers, [])]
    assert found == [("127.0.0.1", 7), ("10.0.0.2", 8)]
    assert public_offers("nccl", [b"anything"], []) == [b"anything"]


@pytest.mark.parametrize(
    "offer", [b"", b"\xc1", b"\x92\x01\x02", pack_address("h", 0), b"\x91\xa1h"]
)
def test_an_offer_without_an_address_is_a_config_error(offer):
    with pytest.raises(ConfigError, match="address"):
        unpack_address(offer)


# -- verdicts ---------------------------------------------------------------------------------


def ack(**rest):
    return Ack(about=int(Subject.STEP), id=1, **rest)


def refusal(rank=0):
    return Fail(
        code="invalid_request", rank=rank, about=int(Subject.STEP), id=1, text="no", sticky=False
    )


def test_equal_answers_are_a_verdict():
    both = {0: ack(digest=b"d"), 1: ack(digest=b"d")}
    assert verdict(both, "step 1").acks == both
    assert verdict({0: refusal(), 1: refusal(1)}, "step 1").refusal == refusal()


@pytest.mark.parametrize(
    ("answers", "rank"),
    [
        ({0: ack(digest=b"d"), 1: ack(digest=b"e")}, 1),
        ({0: ack(), 1: ack(), 2: ack(length=1)}, 2),
        ({0: refusal(), 1: ack()}, 0),
        ({0: ack(), 1: refusal(1)}, 1),
    ],
)
def test_one_answer_that_differs_is_a_desynchronisation(answers, rank):
    with pytest.raises(Desync) as caught:
        verdict(answers, "step 1")
    assert caught.value.rank == rank


# -- identity ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "eight.gguf", metadata())


def identity(path, **changes):
    run = attrs.evolve(RunConfig(model=str(path), world=2, n_ctx=128), **changes)
    with GGUFFile.open(path) as file:
        return Identity.of(file, run)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"world": 4}, "world"),
        ({"mode": Mode.TENSOR_PARALLEL}, "mode"),
        ({"n_ctx": 64}, "n_ctx"),
        ({"prefill_chunk": 32}, "prefill_chunk"),
        ({"max_sessions": 3}, "max_sessions"),
        ({"rounding": Rounding.VENDOR}, "activation_dtype"),
        ({"backend": "cuda"}, "transport"),
    ],
)
def test_every_option_that_shapes_the_collectives_is_in_the_geometry(model, change, field):
    base, other = identity(model).geometry, identity(model, **change).geometry
    assert getattr(base, field) != getattr(other, field)
    assert base.geometry_hash() != other.geometry_hash()


def test_threads_and_paths_are_not_in_the_geometry(model, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    assert identity(model).geometry == identity(copy).geometry


def test_other_weights_under_the_same_header_are_another_identity(model, tmp_path):
    data = bytearray(model.read_bytes())
    with GGUFFile.open(model) as file:
        middle = file.data_offset + (file.file_bytes - file.data_offset) // 2
        before = content_digest(file)
    data[middle] ^= 1
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    with GGUFFile.open(path) as file:
        assert content_digest(file) != before


def test_a_world_that_does_not_divide_the_model_has_no_identity(q2_oracle):
    with pytest.raises(WorldRefused) as caught:
        identity(q2_oracle.path, world=8, mode=Mode.TENSOR_PARALLEL)
    assert "--tensor-parallel-world 8" in str(caught.value)


def test_a_wrong_placement_names_its_option(model, tmp_path):
    with pytest.raises(ConfigError, match="--ep-placement"):
        identity(model, placement=str(tmp_path / "missing.json"))


def test_a_build_has_one_name():
    assert build_digest() == build_digest()
    assert build_digest().startswith("0.")


# -- memory -----------------------------------------------------------------------------------


def test_a_rank_over_budget_is_refused_with_the_arithmetic(model):
    run = RunConfig(model=str(model), world=2, n_ctx=128)
    small = MemoryBudget(
        kind=MemoryKind.DISCRETE, physical_bytes=1 << 20, free_bytes=1 << 20, reserve_bytes=0
    )
    found = memory_verdict(identity(model), run, who="rank 1", budget=small)
    assert found.reason == "over_budget"
    assert "rank 1: budget" in found.text
    assert memory_verdict(identity(model), run, who="rank 1").admitted


def test_the_host_has_memory():
    budget = host_memory()
    assert 0 < budget.free_bytes <= budget.physical_bytes
