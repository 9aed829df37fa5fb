"""`Head`: forms a world out of ranks, keeps watch over it, and ends it.

Invariants: every wait for a rank is bounded; the first cause of a failure decides what everyone is
told; after it nothing is sent but the last words; and a world ends for all ranks or for none. What
sessions and steps are is not known here: `ds4.world.handle` asks for exchanges.

The states are those of the protocol: gathering, agreed, loading, voting, bootstrap, warming, ready,
draining. A head does one thing at a time, so the state is where `run` stands.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection

import trio

from ds4.errors import Ds4Error, RankLost, WorldRefused
from ds4.protocol.identity import Geometry
from ds4.protocol.membership import ClusterKey
from ds4.protocol.messages import (
    Bye,
    Config,
    ConfigOk,
    Fail,
    Hello,
    Load,
    Loaded,
    Message,
    NcclId,
    NcclOk,
    NcclVote,
    Ready,
    Refuse,
    Role,
    Stop,
    StopMode,
)
from ds4.world.exit_codes import exit_code_of
from ds4.world.gathering import Gathering
from ds4.world.link import Link
from ds4.world.offers import public_offers
from ds4.world.peer import Failure, Peer
from ds4.world.pulse import Pulse
from ds4.world.refusals import device_refusal
from ds4.world.report import RankReport, WorldReport
from ds4.world.timeouts import Timeouts

__all__ = ["SECRET_BYTES", "Head"]

_log = logging.getLogger(__name__)

SECRET_BYTES = 16
"""Of the data plane's secret, dealt out with the head's vote."""
_INBOX = 64
_WINDOW = 1


class Head:
    """The head of one world.

    Args:
      geometry: what every rank must agree with.
      key: cluster key, if any.
      timeouts: bounds.
      preflight_only: stop, in order, when all ranks have agreed.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        key: ClusterKey | None,
        timeouts: Timeouts,
        preflight_only: bool = False,
    ) -> None:
        self.geometry = geometry
        self.timeouts = timeouts
        self.peers: dict[int, Peer] = {}
        self.report: WorldReport | None = None
        self.failure: Failure | None = None
        hello = Hello.of(
            geometry, role=Role.LEADER, rank=0, pid=os.getpid(), host=socket.gethostname()
        )
        self.gathering = Gathering(
            hello,
            key=key,
            timeouts=timeouts,
            agreed=self._agreed,
            dropped=self._dropped,
            refuse_world=self._refused,
        )
        self.formed = trio.Event()
        self._preflight_only = preflight_only
        self._send_inbox, self._inbox = trio.open_memory_channel[tuple[int, Message]](_INBOX)
        self._arrival = trio.Event()
        self._first = trio.Event()
        self._primary = trio.Event()
        self._decided = trio.Event()
        self._failures: list[Failure] = []
        self._refusal: Refuse | None = None
        self._phase = "gathering"
        self._silence_s = timeouts.load_silence_s
        self._busy: set[int] = set()
        self._exchange_scope: trio.CancelScope | None = None
        self._turn = trio.Lock()
        self._stop = trio.Event()
        self._is_over = False
        self._nursery: trio.Nursery | None = None

    # -- life --------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[Head] = trio.TASK_STATUS_IGNORED) -> None:
        """Form the world, serve until `stop`, end it.

        `task_status.started` is called when all ranks are ready (in a preflight: agreed).

        Raises:
          WorldRefused, RankLost, Desync, CollectiveError: why it ended, once every rank has been
            told.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._judge)
                self._nursery.start_soon(self._heartbeat)
                try:
                    await self._form()
                    self.formed.set()
                    task_status.started(self)
                    await self._stop.wait()
                    async with self._turn:
                        await self._drain()
                except Ds4Error:
                    if self.failure is None:
                        raise
                    await trio.sleep_forever()  # the judge ends it, once every rank has been told
                self._nursery.cancel_scope.cancel()
        finally:
            self._is_over = True
            self._decided.set()
            if self._exchange_scope is not None:
                self._exchange_scope.cancel()
            for peer in self.peers.values():
                await peer.link.aclose()
        if self.failure is not None:
            raise self.failure.error

    def stop(self) -> None:
        """Ask for an orderly end: the exchange that is running is finished first."""
        self._stop.set()

    def fail(self, failure: Failure) -> None:
        """Report a failure. The first cause wins; later reports are only logged."""
        if self.failure is not None or self._is_over:
            _log.debug("world.fail.later text=%s", failure.error)
            return
        _log.warning("world.fail phase=%s text=%s", self._phase, failure.error)
        self._failures.append(failure)
        self._first.set()
        if not failure.is_consequence:
            self._primary.set()

    async def _judge(self) -> None:
        """Wait for a failure, find its cause, tell every rank, end the world."""
        await self._first.wait()
        with trio.move_on_after(self.timeouts.blame_s):
            await self._primary.wait()
        self.failure = self._cause()
        self._decided.set()
        if self._exchange_scope is not None:
            self._exchange_scope.cancel()
        _log.error(
            "world.failed phase=%s exit=%d text=%s",
            self._phase, exit_code_of(self.failure.error), self.failure.error,
        )  # fmt: skip
        with trio.CancelScope(shield=True):
            await self._tell_all(self._last_word(self.failure))
            if isinstance(self.failure.error, WorldRefused):
                await self._linger()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def _cause(self) -> Failure:
        """The first failure that has no cause of its own; else what a silent rank explains."""
        first = self._failures[0]
        for failure in self._failures:
            if not failure.is_consequence:
                return failure
        others = [peer for peer in self.peers.values() if peer.rank != first.rank]
        quiet = max(others, key=lambda peer: peer.silence(), default=None)
        if quiet is not None and quiet.silence() > self.timeouts.rank_timeout_s:
            reason = f"silent for {quiet.silence():.1f} s; {first.error}"
            return Failure(error=RankLost(quiet.rank, reason), rank=quiet.rank)
        return first

    def _last_word(self, failure: Failure) -> Message:
        error = failure.error
        if isinstance(error, WorldRefused):
            refusal = self._refusal or Refuse(
                reason=error.reason, text=str(error)[:1000], rank=failure.rank or 0
            )
            self.gathering.close(refusal)
            return refusal
        return Fail(code=error.code, rank=failure.rank or 0, text=str(error)[:1000])

    async def _tell_all(self, word: Message) -> None:
        with trio.move_on_after(2 * self.timeouts.farewell_s):
            async with trio.open_nursery() as nursery:
                for peer in self.peers.values():
                    peer.is_stopping = True
                    nursery.start_soon(self._part, peer, word)

    async def _part(self, peer: Peer, word: Message) -> None:
        with trio.move_on_after(self.timeouts.farewell_s):
            await peer.link.last_word(word)
            await peer.link.finish()
        with trio.move_on_after(self.timeouts.farewell_s):
            await peer.gone.wait()

    async def _linger(self) -> None:
        """Stay a little, so that ranks that are still on their way hear the same reason."""
        with trio.move_on_after(self.timeouts.farewell_s):
            while self.gathering.missing():
                await self._arrival.wait()

    # -- ranks come and go -------------------------------------------------------------------

    def _agreed(self, link: Link, hello: Hello) -> None:
        peer = Peer(link, hello, self._send_inbox, self._peer_failed)
        self.peers[hello.rank] = peer
        if self._nursery is not None:
            self._nursery.start_soon(peer.pump)
        self._arrived()

    def _arrived(self) -> None:
        self._arrival.set()
        self._arrival = trio.Event()

    def _dropped(self, rank: int) -> None:
        peer = self.peers.pop(rank, None)
        if peer is not None:
            peer.is_stopping = True

    def _refused(self, refusal: Refuse) -> None:
        if self._refusal is None:
            self._refusal = refusal
        error = WorldRefused(refusal.reason, refusal.text)
        self.fail(Failure(error=error, rank=refusal.rank))

    def _peer_failed(self, failure: Failure) -> None:
        rank = failure.rank
        if self._phase == "gathering" and isinstance(failure.error, RankLost) and rank is not None:
            # Nothing has begun; it may come back.
            _log.warning("gather.lost rank=%d text=%s", rank, failure.error)
            self.gathering.forget(rank)
            self._dropped(rank)
            return
        self.fail(failure)

    def process_ended(self, rank: int, status: int) -> None:
        """Note that a local rank's process has ended. Its link often says more about why."""
        if self._phase == "draining" and status == 0:
            return
        error = RankLost(rank, f"its process ended with status {status}")
        self.fail(Failure(error=error, rank=rank, is_consequence=True))

    # -- watch -------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        """Ping every rank; report one that has been silent for too long while idle."""
        pulse = Pulse(self.timeouts.ping_s)
        while True:
            await pulse.wait()
            if pulse.was_late:
                continue
            for peer in list(self.peers.values()):
                if peer.gone.is_set() or peer.is_stopping:
                    continue
                if peer.rank not in self._busy and peer.silence() > self._silence_s:
                    reason = f"silent for {peer.silence():.1f} s in phase {self._phase}"
                    self.fail(Failure(error=RankLost(peer.rank, reason), rank=peer.rank))
                elif self._nursery is not None:
                    self._nursery.start_soon(peer.ping)

    # -- exchanges ---------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise the failure of a world that has ended.

        Raises:
          RankLost: it was closed in order.
          Ds4Error: it failed.
        """
        if self.failure is not None:
            raise self.failure.error
        if self._is_over:
            raise RankLost(0, "the world has been closed")

    async def wait_decided(self) -> None:
        """Return when the cause of the world's end is known."""
        await self._decided.wait()

    async def exchange(
        self,
        send: Callable[[Peer], Awaitable[None]],
        is_answer: Callable[[int, Message], bool],
        *,
        what: str,
        seconds: float,
        skew_s: float | None = None,
        ranks: Collection[int] | None = None,
        is_work: bool = False,
    ) -> dict[int, Message]:
        """Send something to ranks and wait for an answer from each.

        Runs to its end even when the caller is cancelled: half an exchange would leave ranks in
        different places. One exchange runs at a time.

        Args:
          send: sends to one rank.
          is_answer: whether a message is a rank's final answer; others, such as pieces of a
            snapshot, are for it to look at.
          what: for texts.
          seconds: bound.
          skew_s: bound on the last answer after the first.
          ranks: asked ranks; None is all.
          is_work: whether ranks wait for each other, so that only being late makes one lost.

        Raises:
          Ds4Error: why the world failed.
        """
        async with self._turn:
            return await self._exchange(send, is_answer, what, seconds, skew_s, ranks, is_work)

    async def _exchange(
        self,
        send: Callable[[Peer], Awaitable[None]],
        is_answer: Callable[[int, Message], bool],
        what: str,
        seconds: float,
        skew_s: float | None = None,
        ranks: Collection[int] | None = None,
        is_work: bool = False,
    ) -> dict[int, Message]:
        self.check_alive()
        waiting = set(self.peers if ranks is None else ranks)
        answers: dict[int, Message] = {}
        with trio.CancelScope(
            shield=True, deadline=trio.current_time() + seconds
        ) as self._exchange_scope:
            self._busy = set(waiting) if is_work else set()
            try:
                for rank in sorted(waiting):
                    await send(self.peers[rank])
                while waiting:
                    rank, message = await self._inbox.receive()
                    if not is_answer(rank, message):
                        continue
                    if rank not in waiting:
                        self._unexpected(rank, message, what)
                        break
                    waiting.discard(rank)
                    self._busy.discard(rank)
                    answers[rank] = message
                    if skew_s is not None and len(answers) == 1:
                        scope = self._exchange_scope
                        scope.deadline = min(scope.deadline, trio.current_time() + skew_s)
            finally:
                self._busy = set()
        self._exchange_scope = None
        if waiting:
            self._late(waiting, what, seconds)
            with trio.CancelScope(shield=True):
                await self._decided.wait()
        self.check_alive()
        return answers

    def _unexpected(self, rank: int, message: Message, what: str) -> None:
        reason = f"answered {message.NAME} during {what}, which was not asked"
        self.fail(Failure(error=RankLost(rank, reason), rank=rank))

    def _late(self, waiting: set[int], what: str, seconds: float) -> None:
        """Blame the rank that has been silent for longest."""
        if self._failures:
            return
        culprit = max(sorted(waiting), key=lambda rank: self.peers[rank].silence())
        silence = self.peers[culprit].silence()
        reason = f"no answer to {what} within {seconds:g} s (silent for {silence:.1f} s)"
        if len(waiting) > 1:
            reason += f"; also waiting for rank {sorted(waiting - {culprit})}"
        self.fail(Failure(error=RankLost(culprit, reason), rank=culprit))

    async def _ask(
        self,
        message: Message,
        kind: type[Message],
        *,
        seconds: float,
        is_work: bool = False,
        skew_s: float | None = None,
    ) -> dict[int, Message]:
        def is_answer(rank: int, answer: Message) -> bool:
            if not isinstance(answer, kind):
                self._unexpected(rank, answer, message.NAME)
                return False
            return True

        async with self._turn:
            return await self._exchange(
                lambda peer: peer.send(message),
                is_answer,
                message.NAME,
                seconds,
                skew_s,
                None,
                is_work,
            )

    # -- forming -----------------------------------------------------------------------------

    async def _form(self) -> None:
        await self._gather()
        if refusal := device_refusal({r: p.hello.device for r, p in self.peers.items()}):
            self._refused(refusal)
            await trio.sleep_forever()  # the judge ends this
        if self._preflight_only:
            self._phase = "preflight"
            return
        await self._configure()
        loaded = await self._load()
        await self._bootstrap(loaded)
        self._phase, self._silence_s = "ready", self.timeouts.rank_timeout_s

    async def _gather(self) -> None:
        timeouts = self.timeouts
        with trio.move_on_after(timeouts.dial_s):
            while self.gathering.missing() or len(self.peers) < self.geometry.world:
                arrival = self._arrival
                with trio.move_on_after(timeouts.report_s) as scope:
                    await arrival.wait()
                if scope.cancelled_caught:
                    _log.warning("gather.waiting ranks=%s", self.gathering.missing())
            self._phase = "agreed"
            # Whoever was accepted meanwhile and says hello now must not touch a complete world.
            self.gathering.close(
                Refuse(reason="complete", text="this world is complete; all its ranks have come")
            )
            self.peers = dict(sorted(self.peers.items()))
            return
        missing = self.gathering.missing()
        text = f"rank {missing} did not come within {timeouts.dial_s:g} s"
        self._refused(Refuse(reason="missing_ranks", text=text, rank=missing[0]))
        await trio.sleep_forever()

    async def _configure(self) -> None:
        timeouts, geometry = self.timeouts, self.geometry
        config = Config(
            window=_WINDOW,
            prefill_chunk=geometry.prefill_chunk,
            max_batch_rows=geometry.max_batch_rows,
            max_sessions=geometry.max_sessions,
            placement_digest=geometry.placement_digest,
            buckets=(),
            rank_timeout_ms=_ms(timeouts.rank_timeout_s),
            step_timeout_ms=_ms(timeouts.step_floor_s),
            bootstrap_timeout_ms=_ms(timeouts.bootstrap_s),
            drain_timeout_ms=_ms(timeouts.drain_s),
            ping_interval_ms=_ms(timeouts.ping_s),
        )
        await self._ask(config, ConfigOk, seconds=timeouts.setup_s)

    async def _load(self) -> dict[int, Message]:
        self._phase = "loading"
        # No bound on the whole: a model may take minutes. Silence is bounded by the heartbeat.
        return await self._ask(Load(), Loaded, seconds=float("inf"))

    async def _bootstrap(self, loaded: dict[int, Message]) -> None:
        timeouts = self.timeouts
        self._phase = "voting"
        transport = self.geometry.transport
        vote = NcclVote(usable=True, transport=transport, offer=secrets.token_bytes(SECRET_BYTES))
        votes = await self._ask(vote, NcclVote, seconds=timeouts.setup_s)
        offers: list[bytes] = []
        for rank, answer in sorted(votes.items()):
            if not isinstance(answer, NcclVote):
                continue
            if not answer.usable:
                text = f"rank {rank} cannot use the {answer.transport} data plane: {answer.reason}"
                self._refused(Refuse(reason="data_plane", text=text[:1000], rank=rank))
                await trio.sleep_forever()
            offers.append(answer.offer)
        self._phase = "bootstrap"
        offers = public_offers(transport, offers, [p.link.stream for p in self.peers.values()])
        ready = await self._start(NcclId(transport=transport, offers=tuple(offers)))
        self.report = WorldReport(
            geometry=self.geometry,
            ranks=tuple(
                RankReport.of(self.peers[rank].hello, loaded[rank], ready[rank])
                for rank in sorted(ready)
            ),
        )

    async def _start(self, message: NcclId) -> dict[int, Message]:
        """Data plane, then warm-up. A rank begins the second when it is done with the first."""
        connected: set[int] = set()

        def is_ready(rank: int, answer: Message) -> bool:
            if isinstance(answer, NcclOk) and rank not in connected:
                connected.add(rank)
                if len(connected) == len(self.peers) and self._exchange_scope is not None:
                    self._phase = "warming"
                    self._exchange_scope.deadline = trio.current_time() + self.timeouts.warm_up_s
                return False
            if not isinstance(answer, Ready):
                self._unexpected(rank, answer, self._phase)
                return False
            return True

        return await self.exchange(
            lambda peer: peer.send(message),
            is_ready,
            what="the start of the data plane",
            seconds=self.timeouts.bootstrap_s,
        )

    # -- the end -----------------------------------------------------------------------------

    async def _drain(self) -> None:
        self._phase = "draining"
        for peer in self.peers.values():
            peer.is_stopping = True
        stop = Stop(mode=int(StopMode.DRAIN))
        byes = await self._exchange(
            lambda peer: peer.send(stop),
            lambda rank, answer: isinstance(answer, Bye),
            "stop",
            self.timeouts.drain_s,
        )
        for rank, bye in sorted(byes.items()):
            _log.info("rank.bye rank=%d counters=%s", rank, getattr(bye, "counters", ()))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
