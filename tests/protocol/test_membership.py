"""Membership: only a holder of the key, in its own role, for these very nonces."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from ds4.protocol.connection import Connection
from ds4.protocol.membership import MIN_KEY_BYTES, ClusterKey
from ds4.protocol.messages import Challenge, Response, Role
from ds4.protocol.state import State
from fuzz.conversation import CHALLENGES, GEOMETRY, KEY, RUN, SETUP, Pair, hello

L, W = Role.LEADER, Role.WORKER
OURS, THEIRS = CHALLENGES[0][1], CHALLENGES[1][1]
challenges = st.builds(
    Challenge,
    role=st.just(1),
    rank=st.integers(0, 2**32 - 1),
    geometry_hash=st.binary(min_size=32, max_size=32),
    nonce=st.binary(min_size=32, max_size=32),
)


def test_members_go_on_to_the_hello():
    pair = Pair(key=KEY).play(CHALLENGES)
    assert (pair.leader.state, pair.worker.state) == (State.HELLO, State.HELLO)
    pair.play(SETUP + RUN)


def test_prove_answers_with_the_connection_s_own_challenge():
    pair = Pair(key=KEY).play(CHALLENGES[:2])
    assert pair.worker.prove(THEIRS) == CHALLENGES[2][1]
    with pytest.raises(LocalProtocolError):
        Connection(W).prove(THEIRS)


@given(challenges, challenges)
def test_a_response_is_good_for_one_pair_of_challenges_only(one, other):
    response = KEY.respond(one, THEIRS)
    assert KEY.accepts(response, one, THEIRS)
    assert KEY.accepts(response, other, THEIRS) == (one == other)


@pytest.mark.parametrize("field", ["rank", "geometry_hash", "nonce"])
@pytest.mark.parametrize("side", ["prover", "verifier"])
def test_every_part_of_the_challenge_is_under_the_mac(field, side):
    response = KEY.respond(OURS, THEIRS)
    value = 9 if field == "rank" else bytes(32)
    prover, verifier = OURS, THEIRS
    if side == "prover":
        prover = attrs.evolve(prover, **{field: value})
    else:
        verifier = attrs.evolve(verifier, **{field: value})
    # Of the verifier only the nonce matters: what it claims of itself it must prove itself.
    bound = side == "prover" or field == "nonce"
    assert KEY.accepts(response, prover, verifier) is not bound


def test_a_reflected_response_is_refused():
    """The peer returns our own proof. Rank 0 exists in both roles, so the role must decide."""
    ours = attrs.evolve(OURS, rank=THEIRS.rank)
    assert not KEY.accepts(KEY.respond(ours, THEIRS), THEIRS, ours)


def test_a_reflected_challenge_is_refused():
    pair = Pair(key=KEY).play(CHALLENGES[:1])
    mirrored = attrs.evolve(OURS, role=0, rank=0)
    with pytest.raises(LocalProtocolError, match="reflected") as caught:
        pair.leader.send(mirrored)
    assert caught.value.reason == "membership"


def test_a_replayed_response_is_refused():
    """A recorded conversation is played to a leader that draws a new nonce."""
    fresh = attrs.evolve(THEIRS, nonce=b"n" * 32)
    leader = Pair(key=KEY).play((CHALLENGES[0], (L, fresh))).leader
    recorded = Pair(key=KEY).play(CHALLENGES[:2]).worker.send(CHALLENGES[2][1])
    leader.receive_data(recorded)
    with pytest.raises(RemoteProtocolError, match="rank 1 does not hold") as caught:
        leader.next_event()
    assert caught.value.reason == "membership"


def test_another_key_is_refused_at_both_ends():
    other = ClusterKey(b"another key of 16 bytes or more")
    leader = Pair(key=KEY).play(CHALLENGES[:2]).leader
    stranger = Pair(key=other).play(CHALLENGES[:2]).worker
    leader.receive_data(stranger.send(other.respond(OURS, THEIRS)))
    with pytest.raises(RemoteProtocolError, match="cluster key"):
        leader.next_event()


def test_the_leader_proves_nothing_to_a_stranger():
    pair = Pair(key=KEY).play(CHALLENGES[:2])
    with pytest.raises(LocalProtocolError):
        pair.leader.send(CHALLENGES[3][1])


@pytest.mark.parametrize("first", [SETUP[0], CHALLENGES[2]])
def test_nothing_else_counts_before_membership(first):
    with pytest.raises(LocalProtocolError, match="legal: challenge, refuse"):
        Pair(key=KEY).send(*first)


def test_a_peer_without_a_key_is_refused_by_one_with_a_key_and_the_other_way_round():
    for leader_key, worker_key, first in ((KEY, None, SETUP[0]), (None, KEY, CHALLENGES[0])):
        leader, worker = Connection(L, key=leader_key), Connection(W, key=worker_key)
        leader.receive_data(worker.start())
        worker.receive_data(leader.start())
        leader.next_event()
        worker.next_event()
        leader.receive_data(worker.send(first[1]))
        with pytest.raises(RemoteProtocolError, match=f"{first[1].NAME} is not legal now"):
            leader.next_event()


@pytest.mark.parametrize("changed", [{"rank": 0}, {"geometry": attrs.evolve(GEOMETRY, n_ctx=5)}])
def test_a_hello_must_repeat_what_was_proven(changed):
    pair = Pair(key=KEY).play(CHALLENGES)
    with pytest.raises(LocalProtocolError, match="proven"):
        pair.worker.send(hello(W, **changed))


def test_a_challenge_of_the_other_role_is_refused():
    with pytest.raises(LocalProtocolError, match="role"):
        Pair(key=KEY).worker.send(THEIRS)
    with pytest.raises(LocalProtocolError):
        KEY.respond(OURS, OURS)


@pytest.mark.parametrize("size", range(MIN_KEY_BYTES))
def test_a_short_key_is_refused(size):
    with pytest.raises(ConfigError, match=f"{size} bytes"):
        ClusterKey(b"k" * size)


def test_secrets_are_not_shown():
    assert "example" not in repr(KEY)
    assert "mac" not in repr(Response(mac=bytes(32)))
