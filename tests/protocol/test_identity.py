"""Geometry: every field that must be equal is compared, hashed, and named in the refusal."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given

from ds4.errors import LocalProtocolError
from ds4.protocol.handshake import missing_ranks, refusal, refusals
from ds4.protocol.identity import Geometry, first_difference, warnings_between
from ds4.protocol.messages import Role
from fuzz.conversation import GEOMETRY, hello
from tests.protocol.strategies import geometries

L, W = Role.LEADER, Role.WORKER
WARN = {"cuda_driver", "compute_capability"}
EQUAL = [a.name for a in attrs.fields(Geometry) if a.name not in WARN]


def changed(field):
    value = getattr(GEOMETRY, field)
    other = {
        bool: lambda: not value,
        int: lambda: value + 1,
        str: lambda: value + "x",
        bytes: lambda: value[:-1] + b"?",
    }[type(value)]()
    return attrs.evolve(GEOMETRY, **{field: other})


@pytest.mark.parametrize("field", EQUAL)
def test_a_difference_in_any_one_field_is_found_hashed_and_explained(field):
    other = changed(field)
    assert other.geometry_hash() != GEOMETRY.geometry_hash()
    difference = first_difference(GEOMETRY, other)
    assert difference.field == field
    verdict = refusal(hello(L), hello(W, geometry=other, rank=1))
    for part in (field, difference.leader_value, difference.peer_value, "rank 1", difference.flag):
        assert part in verdict.text
    assert (verdict.field, verdict.rank, verdict.reason) == (field, 1, "geometry")
    assert verdict.flag


@pytest.mark.parametrize("field", sorted(WARN))
def test_a_driver_or_device_difference_only_warns(field):
    other = changed(field)
    assert other.geometry_hash() == GEOMETRY.geometry_hash()
    assert first_difference(GEOMETRY, other) is None
    assert [d.field for d in warnings_between(GEOMETRY, other)] == [field]
    assert refusal(hello(L), hello(W, geometry=other)) is None


@given(geometries, geometries)
def test_the_hash_is_equal_exactly_when_no_difference_is_found(one, other):
    assert (one.geometry_hash() == other.geometry_hash()) == (first_difference(one, other) is None)
    assert one.geometry_hash() == attrs.evolve(one).geometry_hash()


def test_the_first_differing_field_is_the_one_reported():
    other = attrs.evolve(GEOMETRY, vocab=1, n_ctx=2)
    assert first_difference(GEOMETRY, other).field == "vocab"


def test_the_hash_of_the_example_is_pinned():
    """Both sides compute it, so it may not change within a protocol major."""
    assert GEOMETRY.geometry_hash().hex() == PINNED


PINNED = "f5866c6cc8e84a47d9237acca6882dd8a7dd591d149f48d4e53fc4cb2935fc08"


def test_long_values_still_fit_a_refusal():
    long = attrs.evolve(GEOMETRY, model_id="m" * 128, gguf_digest=bytes(64))
    assert refusal(hello(L), hello(W, geometry=long)).field == "gguf_digest"


@pytest.mark.parametrize(("field", "value"), [("world", -1), ("fast_aligned", 1), ("mode", b"x")])
def test_a_wrong_value_is_refused_by_name(field, value):
    with pytest.raises(LocalProtocolError, match=f"Geometry.{field}"):
        attrs.evolve(GEOMETRY, **{field: value})


def test_a_rank_outside_the_world_cannot_say_hello():
    with pytest.raises(LocalProtocolError, match="rank 2 does not exist in a world of 2"):
        hello(W, rank=2)
    with pytest.raises(LocalProtocolError, match="leader must be 0"):
        hello(L, rank=1)
    with pytest.raises(LocalProtocolError, match="world of 0"):
        hello(W, rank=0, geometry=attrs.evolve(GEOMETRY, world=0))


def test_two_leaders_are_refused():
    assert refusal(hello(L), hello(L)).reason == "two_leaders"


WORLD4 = attrs.evolve(GEOMETRY, world=4)


def of4(rank, **rest):
    return hello(W, rank=rank, geometry=attrs.evolve(WORLD4, **rest))


def test_two_claims_of_one_rank_are_both_refused_and_the_others_are_not():
    verdicts = refusals(hello(L, geometry=WORLD4), [of4(3), of4(1), of4(2), of4(1)])
    assert [v and v.reason for v in verdicts] == [None, "rank_taken", None, "rank_taken"]
    assert "node-a (pid 4001)" in verdicts[1].text


def test_the_verdict_does_not_depend_on_the_order_of_arrival():
    hellos = [of4(2), of4(0), of4(1, n_ctx=1), of4(2)]
    leader = hello(L, geometry=WORLD4)
    forward = refusals(leader, hellos)
    assert forward == refusals(leader, hellos[::-1])[::-1]
    assert [v and v.reason for v in forward] == ["rank_taken", None, "geometry", "rank_taken"]


def test_missing_ranks_are_listed():
    assert missing_ranks(hello(L, geometry=WORLD4), [of4(2), of4(0)]) == [1, 3]
