"""Who may join, in which order, and what strangers can do to a world: nothing."""

from __future__ import annotations

import attrs
import pytest
import trio
from trio.testing import memory_stream_pair

from ds4.errors import WorldRefused
from ds4.protocol.connection import Connection
from ds4.protocol.identity import Geometry
from ds4.protocol.messages import Hello, Role
from ds4.protocol.version import Version
from ds4.world.exit_codes import ExitCode
from ds4.world.gathering import MAX_STRANGERS
from tests.fakes import Faults, UntouchableBackend, geometry
from tests.sim.harness import KEY, TIMEOUTS, default_script, simulate

REFUSED = int(ExitCode.REFUSED)


def other_value(value):
    """Another legal value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value + (b"x" if isinstance(value, bytes) else "x")


MUST_AGREE = [
    a.name for a in attrs.fields(Geometry) if not a.metadata.get("warn_only") and a.name != "world"
]


@pytest.mark.parametrize("field", MUST_AGREE)
def test_one_field_that_differs_refuses_the_world_everywhere_for_the_same_reason(field):
    base = geometry(4)
    differing = attrs.evolve(base, **{field: other_value(getattr(base, field))})
    outcome = simulate(4, geometries={2: differing}, backend_class=UntouchableBackend)
    assert isinstance(outcome.error, WorldRefused)
    text = str(outcome.error)
    assert "rank 2" in text
    assert field in text
    assert attrs.fields_dict(Geometry)[field].metadata["flag"] in text
    assert outcome.codes() == dict.fromkeys(range(4), REFUSED)
    assert {ending.reason for ending in outcome.endings.values()} == {text}
    assert all("load" not in backend.calls for backend in outcome.backends.values())


def test_another_world_size_is_refused():
    outcome = simulate(2, geometries={1: geometry(4)}, backend_class=UntouchableBackend)
    assert "world" in str(outcome.error)
    assert outcome.codes() == {0: REFUSED, 1: REFUSED}


@pytest.mark.parametrize("field", ["cuda_driver", "compute_capability"])
def test_fields_that_only_warn_do_not_refuse(field, caplog):
    outcome = simulate(2, geometries={1: geometry(2, **{field: "other"})})
    assert outcome.error is None
    assert f"differs in {field}" in caplog.text


def test_a_claim_to_a_rank_of_a_complete_world_is_refused_and_disturbs_nothing():
    async def script(world):
        await trio.sleep(5)
        return await default_script(world)

    outcome = simulate(2, ranks=[0, 1, 1], order=[0, 1, 2], script=script)
    assert outcome.error is None
    assert outcome.result == simulate(2).result
    assert outcome.codes() == {0: 0, 1: 0, 2: REFUSED}
    assert "complete" in outcome.endings[2].reason


def test_two_claims_before_the_world_is_complete_leave_the_rank_open():
    outcome = simulate(4, ranks=[1, 1, 0, 2], order=[0, 1, 2, 3])
    assert isinstance(outcome.error, WorldRefused)
    assert "[1, 3]" in str(outcome.error)
    assert outcome.seconds >= TIMEOUTS.dial_s
    assert outcome.codes() == dict.fromkeys(range(4), REFUSED)
    assert "claimed by" in outcome.endings[0].reason
    assert "claimed by" in outcome.endings[1].reason
    assert "did not come" in outcome.endings[2].reason


def test_a_missing_rank_is_named_after_the_bound():
    outcome = simulate(4, order=[0, 1, 3])
    assert "rank [2] did not come within 30 s" in str(outcome.error)
    assert set(outcome.codes().values()) == {REFUSED}
    assert outcome.seconds < TIMEOUTS.dial_s + 5


def test_two_ranks_on_one_gpu_are_refused():
    faults = {rank: Faults(uuid=f"GPU-{rank % 3}") for rank in range(4)}
    outcome = simulate(4, faults=faults, backend_class=UntouchableBackend)
    assert "ranks 0 and 3 run on the same GPU GPU-0" in str(outcome.error)
    assert set(outcome.codes().values()) == {REFUSED}


# -- keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_key", "rank_key"), [(KEY, None), (None, KEY), (KEY, b"another key of 32 bytes, really.")]
)
def test_a_rank_with_another_key_is_told_and_never_joins(head_key, rank_key):
    outcome = simulate(2, key=head_key, keys={1: rank_key})
    assert outcome.codes() == {0: REFUSED, 1: REFUSED}
    assert "--cluster-key-file" in outcome.endings[1].reason
    assert "rank [1] did not come" in str(outcome.error)


# -- strangers --------------------------------------------------------------------------------


async def say(head, data, *, then_close=True, hold_s=0.0):
    """Connect, say something, and return how the head closed."""
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(head.gathering.meet, theirs, "stranger")
        try:
            for piece in data:
                await ours.send_all(piece)
            await trio.sleep(hold_s)
            if then_close:
                await ours.aclose()
            else:
                while await ours.receive_some():
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return


def forged_hello(rank=1):
    connection = Connection(Role.WORKER)
    start = connection.start()
    connection.receive_data(Connection(Role.LEADER).start())
    connection.next_event()
    hello = Hello.of(geometry(2), role=Role.WORKER, rank=rank, pid=1, host="x")
    return [start, connection.send(hello)]


STRANGERS = {
    "a port scanner that connects and leaves": ([], True),
    "a connection that says nothing": ([], False),
    "a browser": ([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], False),
    "a TLS client": ([bytes([22, 3, 1, 2, 0, 1, 0, 1, 252])], False),
    "an older ds4": ([Version(0, 9).preface()], False),
    "half a preface": ([Version(1, 0).preface()[:5]], False),
    "a huge frame": ([Version(1, 0).preface(), b"\xff\xff\xff\xff"], False),
    "noise": ([bytes(range(256)) * 8], False),
    "a rank without the key": (forged_hello(), False),
    "one byte a second": ([bytes([b]) for b in Version(1, 0).preface()], False),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_neither_join_nor_delay_a_world(name):
    data, closes = STRANGERS[name]
    ended = []

    async def strangers(head, nursery):
        for _ in range(5):
            nursery.start_soon(stranger, head)

    async def stranger(head):
        begin = trio.current_time()
        await say(head, data, then_close=closes)
        ended.append(trio.current_time() - begin)

    outcome = simulate(2, key=KEY, extra=strangers)
    assert outcome.error is None
    assert outcome.codes() == {0: 0, 1: 0}
    assert len(ended) == 5
    assert max(ended) <= TIMEOUTS.hello_s + 0.001


def test_a_crowd_of_silent_strangers_is_bounded_and_leaves_room_again():
    turned_away = []

    async def crowd(head, nursery):
        async def one():
            begin = trio.current_time()
            await say(head, [], then_close=False)
            if trio.current_time() == begin:
                turned_away.append(1)

        async with trio.open_nursery() as inner:
            for _ in range(MAX_STRANGERS + 20):
                inner.start_soon(one)
        nursery.start_soon(say, head, [b"late"])

    # A real rank that comes while the crowd is there is turned away too, but may dial again.
    async def late(head, nursery):
        await crowd(head, nursery)

    outcome = simulate(2, key=KEY, extra=late)
    assert len(turned_away) >= 20
    assert outcome.error is None


@pytest.mark.parametrize("key", [None, KEY])
def test_only_the_cluster_key_keeps_a_forged_hello_from_claiming_a_rank(key):
    """Without a key a stranger's claim counts, so both are refused; the head warns about it."""

    async def forger(head, nursery):
        async with trio.open_nursery() as inner:
            inner.start_soon(say_later, head)

    async def say_later(head):
        await say(head, forged_hello(rank=0), then_close=False)

    outcome = simulate(2, key=key, extra=forger)
    if key is not None:
        assert outcome.error is None
        return
    assert "claimed by" in outcome.endings[0].reason
    assert outcome.codes() == {0: REFUSED, 1: REFUSED}
