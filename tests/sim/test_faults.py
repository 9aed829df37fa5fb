"""One fault anywhere, and every rank ends within the bound, for a reason that names the rank.

Each case plays the whole life of a world and breaks one link at one frame. Bounds are in virtual
time: what the timeouts allow, and not a second more.
"""

from __future__ import annotations

import functools

import pytest

from ds4.errors import CollectiveError, Desync, RankLost, WorldRefused
from ds4.world.exit_codes import ExitCode
from tests.fakes import Faults
from tests.sim.harness import KEY, TIMEOUTS, FaultyStream, LinkFault, simulate, step

N_HELLO_FRAMES = {"head": 3, "rank": 3}  # preface, hello, hello_ok
KINDS = ["kill", "stall", "corrupt", "cut"]


@functools.cache
def frames_of(side, n=2):
    """How many frames one side of a link sends in a world without faults."""
    counted = []
    original = FaultyStream.__init__

    def counting(self, *args, **kwargs):
        original(self, *args, **kwargs)
        counted.append(self)

    FaultyStream.__init__ = counting
    try:
        outcome = simulate(n)
    finally:
        FaultyStream.__init__ = original
    assert outcome.error is None
    # Streams are made in pairs, head's first.
    mine = counted[0 if side == "head" else 1 :: 2]
    assert len(mine) == n
    return mine[1].n


@functools.cache
def reference():
    return simulate(1).result


def bound():
    """Longest time from a fault to the end of everything."""
    t = TIMEOUTS
    waiting = max(t.dial_s, t.step_first_s, t.operation_s, t.drain_s, t.setup_s, t.load_silence_s)
    return waiting + t.rank_timeout_s + t.hello_s + t.blame_s + 10 * t.farewell_s + 5 * t.ping_s


def check_ended(outcome, rank, n, *, is_draining=False):
    """Nobody hangs, nobody ends clean but ranks that have said goodbye, the rank is named."""
    assert outcome.error is not None, "the head must not end clean"
    assert outcome.seconds < bound()
    assert set(outcome.endings) == set(range(n))
    if not is_draining:
        assert all(code != ExitCode.CLEAN for code in outcome.codes().values()), outcome.codes()
        assert "abort" in outcome.backends[rank].calls
    assert f"rank {rank}" in str(outcome.error) or f"rank [{rank}]" in str(outcome.error)
    allowed = {ExitCode.REFUSED, ExitCode.PEER_LOST, ExitCode.DESYNC, ExitCode.DATA_PLANE}
    assert outcome.head_code in allowed


@pytest.mark.parametrize("breaks", [True, False], ids=["tcp-like", "nccl-like"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["head", "rank"])
def test_a_broken_link_at_any_frame_ends_every_rank_within_the_bound(side, kind, breaks):
    n_frames = frames_of(side)
    assert n_frames >= 20
    for at in range(n_frames):
        fault = LinkFault(rank=1, side=side, at=at, kind=kind)
        outcome = simulate(2, link_fault=fault, breaks=breaks, limit_s=3 * bound())
        where = f"{kind} at frame {at} of {n_frames} from the {side}"
        assert fault.when is not None, where
        if outcome.error is None:
            # Either the world had ended in order before the last frame could matter, or the
            # frame carried a flipped bit in something that decides nothing, such as a report.
            assert at >= n_frames - 2 or kind == "corrupt", where
            assert outcome.result == reference(), where
            continue
        try:
            check_ended(outcome, 1, 2, is_draining=at == n_frames - 1)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}\n{outcome.error}\n{outcome.endings}") from error
        if N_HELLO_FRAMES[side] < at < n_frames - 1:
            lost = {ExitCode.PEER_LOST}
            # A flipped bit that still makes a legal frame shows as a disagreement.
            assert outcome.head_code in lost | ({ExitCode.DESYNC} if kind == "corrupt" else set())


@pytest.mark.parametrize("at", [0, 3, 6, 9, 12, 18])
def test_in_a_larger_world_the_others_end_too(at):
    fault = LinkFault(rank=2, side="rank", at=at, kind="kill")
    outcome = simulate(4, link_fault=fault)
    check_ended(outcome, 2, 4)


def test_a_rank_that_hangs_in_a_step_is_named_and_all_are_freed():
    outcome = simulate(4, faults={2: Faults(hang_step=3)}, breaks=False)
    assert isinstance(outcome.error, RankLost)
    assert outcome.seconds < bound()
    # All ranks wait in the same collective; nothing tells the head which one is to blame, so it
    # names all that have not answered.
    assert all(str(rank) in str(outcome.error) for rank in range(4))
    assert all(code == ExitCode.PEER_LOST for code in outcome.codes().values())


def test_a_slow_step_within_its_bound_is_no_failure():
    outcome = simulate(2, faults={1: Faults(slow_step=2, slow_s=100.0)})
    assert outcome.error is None
    assert outcome.codes() == {0: 0, 1: 0}


def test_a_rank_that_answers_long_after_the_others_is_lost():
    faults = {r: Faults() for r in range(2)}
    faults[1].slow_step, faults[1].slow_s = 2, 400.0
    outcome = simulate(2, faults=faults)
    assert isinstance(outcome.error, RankLost)
    assert "rank [1]" in str(outcome.error)
    # Nothing wakes a kernel; the watchdog ends the process.
    assert outcome.endings[1].reason == "ended by the watchdog"
    assert outcome.seconds < bound()


def test_a_rank_whose_abort_does_not_return_is_ended_by_the_watchdog():
    outcome = simulate(2, faults={1: Faults(hang_step=2, deaf=True)}, breaks=False)
    assert isinstance(outcome.error, RankLost)
    assert outcome.endings[1].code == ExitCode.DATA_PLANE
    assert outcome.endings[0].code == ExitCode.PEER_LOST
    assert outcome.seconds < bound()


def test_another_digest_is_a_desynchronisation():
    outcome = simulate(4, faults={3: Faults(digest_step=2)})
    assert isinstance(outcome.error, Desync)
    assert outcome.error.rank == 3
    assert outcome.head_code is ExitCode.DESYNC
    assert set(outcome.codes().values()) == {int(ExitCode.DESYNC)}


def test_a_rewind_that_keeps_another_length_is_a_desynchronisation():
    outcome = simulate(2, faults={1: Faults(keeps=3)})
    assert isinstance(outcome.error, Desync)
    assert "rewind" in str(outcome.error)
    assert set(outcome.codes().values()) == {int(ExitCode.DESYNC)}


def test_a_step_that_one_rank_refuses_ends_the_world():
    """The others are in a collective that will never complete."""
    outcome = simulate(2, faults={1: Faults(refuse_step=2)}, breaks=False)
    assert outcome.error is not None
    assert outcome.head_code in {ExitCode.DESYNC, ExitCode.PEER_LOST}
    assert all(code != 0 for code in outcome.codes().values())
    assert outcome.seconds < bound()


def test_a_step_that_all_ranks_refuse_changes_nothing():
    async def script(world):
        from ds4.errors import InvalidRequest

        await world.open_session(1, 32)
        await step(world, 1, [1, 2, 3])
        with pytest.raises(InvalidRequest, match="refused by the test"):
            await step(world, 1, [4])
        rows = await step(world, 1, [4])
        return rows[0].token, len(world.timeline(1))

    faults = {rank: Faults(refuse_step=2) for rank in range(2)}
    outcome = simulate(2, script=script, faults=faults)
    assert outcome.error is None
    assert outcome.result[1] == 4
    assert outcome.codes() == {0: 0, 1: 0}


@pytest.mark.parametrize("fault", ["crash_step", "device_step"])
@pytest.mark.parametrize("breaks", [True, False])
def test_a_failure_during_a_step_is_blamed_on_the_rank_that_failed(fault, breaks):
    outcome = simulate(4, faults={2: Faults(**{fault: 3})}, breaks=breaks)
    assert isinstance(outcome.error, RankLost)
    assert outcome.error.rank == 2
    assert "by the test" in str(outcome.error)
    codes = outcome.codes()
    assert codes.pop(2) in {ExitCode.DATA_PLANE, ExitCode.PEER_LOST}
    assert set(codes.values()) == {int(ExitCode.PEER_LOST)}


def test_a_broken_data_plane_without_a_lost_rank_is_status_6():
    outcome = simulate(2, faults={1: Faults(hang_step=2)}, extra=abort_later)
    assert isinstance(outcome.error, CollectiveError)
    assert outcome.head_code is ExitCode.DATA_PLANE
    assert set(outcome.codes().values()) == {int(ExitCode.DATA_PLANE)}


async def abort_later(head, nursery):
    import trio

    await head.formed.wait()
    await trio.sleep(3)
    # Both ends of the mesh see it break.
    mesh = MESHES[-1]
    mesh.is_broken.set()
    for backend in BACKENDS:
        backend.is_aborted.set()


MESHES: list = []
BACKENDS: list = []


@pytest.fixture(autouse=True)
def _remember(monkeypatch):
    from tests.fakes import FakeBackend
    from tests.sim import harness

    MESHES.clear()
    BACKENDS.clear()

    class Remembered(harness.Mesh):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            MESHES.append(self)

    original = FakeBackend.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        BACKENDS.append(self)

    monkeypatch.setattr(harness, "Mesh", Remembered)
    monkeypatch.setattr(FakeBackend, "__init__", init)


def test_a_session_that_one_rank_has_no_room_for_is_undone_on_the_others():
    async def script(world):
        from ds4.errors import DeviceError

        with pytest.raises(DeviceError, match="rank 1: no room"):
            await world.open_session(5, 16)
        await world.open_session(6, 16)
        rows = await step(world, 6, [1, 2])
        return rows[0].token

    outcome = simulate(2, script=script, faults={1: Faults(no_room=5)})
    assert outcome.error is None
    assert outcome.script_error is None
    assert outcome.codes() == {0: 0, 1: 0}
    assert list(outcome.backends[0].executor.sessions) == [6]


def test_a_no_vote_refuses_the_world_on_every_rank_for_the_same_reason():
    outcome = simulate(4, faults={2: Faults(vote_no="no interface")})
    assert isinstance(outcome.error, WorldRefused)
    assert "rank 2" in str(outcome.error)
    assert {ending.reason for ending in outcome.endings.values()} == {str(outcome.error)}
    assert set(outcome.codes().values()) == {int(ExitCode.REFUSED)}


def test_a_rank_that_loads_for_minutes_is_alive():
    outcome = simulate(2, faults={1: Faults(load_s=600.0)})
    assert outcome.error is None
    assert outcome.seconds > 600


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_during_the_proof_of_the_key_ends_in_a_refusal(kind):
    for at in range(5):
        fault = LinkFault(rank=1, side="rank", at=at, kind=kind)
        outcome = simulate(2, key=KEY, link_fault=fault)
        assert outcome.error is not None
        assert outcome.head_code in {ExitCode.REFUSED, ExitCode.PEER_LOST}
        assert all(code != 0 for code in outcome.codes().values())
        assert outcome.seconds < bound()
