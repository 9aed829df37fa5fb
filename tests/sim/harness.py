"""Head and ranks in one Trio loop, in virtual time, with faults on their links.

`simulate` runs a scenario and returns how everyone ended. Nothing here is fake but the executor,
the device and the streams.
"""

from __future__ import annotations

import contextlib
import functools

import attrs
import trio
from trio.testing import MockClock, memory_stream_pair

from ds4.errors import Ds4Error
from ds4.protocol.membership import ClusterKey
from ds4.steps import Chunk, Decode, StepPlan, Want
from ds4.world.exit_codes import ExitCode, exit_code_of
from ds4.world.handle import World
from ds4.world.head import Head
from ds4.world.rank_actor import Ending, RankActor
from ds4.world.timeouts import Timeouts
from tests.fakes import FakeBackend, Faults, Killed, Mesh, SimDevice, geometry

TIMEOUTS = Timeouts(dial_s=30.0)
KEY = b"k" * 32


@attrs.define
class LinkFault:
    """Something that happens to a link when its `at`-th frame (preface first) is sent.

    Attributes:
      rank: whose link.
      side: `head` or `rank`: whose frame.
      at: counted from 0.
      kind: `kill`, `stall`, `corrupt` or `cut` (half of the frame, then closed).
      when: virtual time it happened; None if it did not.
    """

    rank: int
    side: str
    at: int
    kind: str
    when: float | None = None


class FaultyStream(trio.abc.HalfCloseableStream):
    """A stream whose owner's frames are counted; one of them meets a fault.

    A stalled link is dead in both directions, like a host that vanished: nothing arrives and
    nothing says so.
    """

    def __init__(self, stream, fault: LinkFault | None = None):
        self.stream = stream
        self.fault = fault
        self.n = 0
        self.other: FaultyStream | None = None
        self.is_stalled = False

    async def send_all(self, data):
        n = self.n
        self.n += 1
        if self.is_stalled:
            await trio.lowlevel.checkpoint()
            return
        fault = self.fault
        if fault is None or n != fault.at:
            await self.stream.send_all(data)
            return
        fault.when = trio.current_time()
        if fault.kind == "stall":
            self.is_stalled = self.other.is_stalled = True
            await trio.lowlevel.checkpoint()
        elif fault.kind == "corrupt":
            middle = len(data) // 2
            await self.stream.send_all(
                data[:middle] + bytes([data[middle] ^ 0x55]) + data[middle + 1 :]
            )
        else:
            if fault.kind == "cut":
                await self.stream.send_all(data[: len(data) // 2])
            await self.stream.aclose()
            raise trio.BrokenResourceError("killed by the test")

    async def wait_send_all_might_not_block(self):
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes=None):
        while True:
            data = await self.stream.receive_some(max_bytes)
            if not self.is_stalled:
                return data
            if not data:
                await trio.sleep_forever()  # the end of a stalled stream is not seen either

    async def send_eof(self):
        if not self.is_stalled:
            await self.stream.send_eof()

    async def aclose(self):
        await self.stream.aclose()


@attrs.define
class Outcome:
    """How a simulated world ended.

    Attributes:
      error: of the head; None for a clean end.
      endings: by rank.
      seconds: virtual time of the whole.
      result: what the script returned.
      backends: by rank.
    """

    error: Ds4Error | None = None
    endings: dict[int, Ending] = attrs.Factory(dict)
    seconds: float = 0.0
    result: object = None
    script_error: Ds4Error | None = None
    backends: dict[int, FakeBackend] = attrs.Factory(dict)
    head: Head | None = None

    @property
    def head_code(self) -> ExitCode:
        return ExitCode.CLEAN if self.error is None else exit_code_of(self.error)

    def codes(self) -> dict[int, int]:
        return {rank: int(ending.code) for rank, ending in sorted(self.endings.items())}


async def default_script(world: World):
    """Everything a world does, once. Returns the tokens."""
    tokens = []
    await world.open_session(1, 32)
    await world.open_session(2, 32)
    rows = await step(world, 1, [1, 2, 3, 4, 5], [(2, [7, 8, 9])])
    tokens += [row.token for row in rows]
    for _ in range(3):
        rows = await step(world, 1, [tokens[-1]])
        tokens.append(rows[0].token)
    snapshot = await world.snapshot(1)
    kept = await world.rewind(1, 6)
    tokens.append(kept)
    await step(world, 1, [11, 12])
    await world.restore(1, snapshot)
    rows = await step(world, 1, [13], [(2, [1])])
    tokens += [row.token for row in rows]
    await world.close_session(2)
    tokens.append(len(world.timeline(1)))
    return tokens


async def step(world, session, ids, others=()):
    """One step of one or several sessions; single ids are decodes."""
    prefill, decode = [], []
    for sid, tokens in ((session, ids), *others):
        at = len(world.timeline(sid))
        if len(tokens) == 1:
            decode.append(
                Decode(session=sid, position=at, token=tokens[0], want=Want.TOKEN_AND_LOGITS)
            )
        else:
            prefill.append(Chunk(session=sid, start=at, tokens=tokens, want=Want.TOKEN_AND_LOGITS))
    result = await world.step(StepPlan(step=99, prefill=tuple(prefill), decode=tuple(decode)))
    return result.rows


def simulate(
    n: int = 2,
    *,
    script=default_script,
    faults: dict[int, Faults] | None = None,
    link_fault: LinkFault | None = None,
    timeouts: Timeouts = TIMEOUTS,
    breaks: bool = True,
    keys: dict[int, bytes | None] | None = None,
    key: bytes | None = None,
    geometries: dict[int, object] | None = None,
    order=None,
    ranks=None,
    extra=None,
    preflight_only: bool = False,
    backend_class=FakeBackend,
    limit_s: float = 5000.0,
) -> Outcome:
    """Run a world of `n` simulated ranks.

    Args:
      script: async function of the `World`.
      faults: by rank.
      link_fault: on one link.
      breaks: whether a lost rank breaks the others' collectives at once.
      key, keys: the head's cluster key, and by rank where a rank has another.
      geometries: by rank, where it differs.
      order: ranks in the order in which they connect.
      ranks: claimed rank of each connection; `range(n)` if not given.
      extra: async function of (head, nursery) started beside everything else.
      limit_s: fails the simulation when virtual time passes it.
    """
    outcome = Outcome()
    daemons: list[trio.Nursery] = []

    async def main():
        mesh = Mesh(n, breaks=breaks)
        head = outcome.head = Head(
            geometry(n),
            key=None if key is None else ClusterKey(key),
            timeouts=timeouts,
            preflight_only=preflight_only,
        )

        @contextlib.contextmanager
        def watchdog(backend, nursery):
            async def kill():
                with trio.CancelScope() as scope:
                    scopes.append(scope)
                    await trio.sleep(timeouts.abort_s)
                    backend.is_killed.set()

            scopes = []
            daemons[0].start_soon(kill)
            try:
                yield
            finally:
                for scope in scopes:
                    scope.cancel()

        async def rank_main(index, rank, nursery):
            ours, theirs = memory_stream_pair()
            fault = link_fault if link_fault is not None and link_fault.rank == index else None
            at_head = FaultyStream(ours, fault if fault and fault.side == "head" else None)
            at_rank = FaultyStream(theirs, fault if fault and fault.side == "rank" else None)
            at_head.other, at_rank.other = at_rank, at_head
            nursery.start_soon(head.gathering.meet, at_head, f"sim:{index}")
            backend = backend_class(rank, mesh, (faults or {}).get(index))
            outcome.backends[index] = backend
            rank_key = (keys or {}).get(index, key)
            actor = RankActor(
                at_rank,
                rank=rank,
                geometry=(geometries or {}).get(index, geometry(n)),
                backend=backend,
                device=SimDevice(backend),
                key=None if rank_key is None else ClusterKey(rank_key),
                timeouts=timeouts,
                watchdog=functools.partial(watchdog, backend, nursery),
            )
            try:
                outcome.endings[index] = await actor.run()
            except BaseExceptionGroup as group:
                if group.split(Killed)[1] is not None:
                    raise
                outcome.endings[index] = Ending(ExitCode.DATA_PLANE, "ended by the watchdog")
            except Killed:
                outcome.endings[index] = Ending(ExitCode.DATA_PLANE, "ended by the watchdog")
            finally:
                await theirs.aclose()

        async def user():
            head_ready = await nursery.start(run_head)
            if head_ready is None or preflight_only:
                head.stop()
                return
            try:
                outcome.result = await script(World(head))
            except Ds4Error as error:
                outcome.script_error = error
            head.stop()

        async def run_head(task_status):
            started = False

            class Status:
                def started(self, value=None):
                    nonlocal started
                    started = True
                    task_status.started(value)

            try:
                await head.run(task_status=Status())
            except Ds4Error as error:
                outcome.error = error
            if not started:
                task_status.started(None)

        with trio.fail_after(limit_s):
            async with trio.open_nursery() as everything:
                daemons.append(everything)
                async with trio.open_nursery() as nursery:
                    if extra is not None:
                        everything.start_soon(extra, head, nursery)
                    nursery.start_soon(user)
                    for index in order or range(n):
                        rank = index if ranks is None else ranks[index]
                        nursery.start_soon(rank_main, index, rank, nursery)
                        await trio.testing.wait_all_tasks_blocked()
                everything.cancel_scope.cancel()
        outcome.seconds = trio.current_time()

    clock = MockClock(autojump_threshold=0)

    async def from_zero():
        start = trio.current_time()
        await main()
        outcome.seconds -= start

    trio.run(from_zero, clock=clock)
    return outcome
