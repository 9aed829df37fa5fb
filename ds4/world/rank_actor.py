"""`RankActor`: one rank's side of the conversation, over whatever stream and device it is given.

Invariants: everything the head asks for is done in the order it was asked; an ack means that the
device is done; nothing is launched for a step that does not fit what this rank holds; and a rank
that lost its head, or broke, ends within a bound and says why if anyone listens.

One task reads, so that a ping is answered and an end is noticed while the device works; one task
works. What a device is, is not known here.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypeVar

import attrs
import trio

from ds4.backend import RankBackend
from ds4.errors import (
    CollectiveError,
    ConfigError,
    Desync,
    Ds4Error,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
)
from ds4.protocol.connection import Closed, Connection, Event, PeerVersion
from ds4.protocol.handshake import refusal
from ds4.protocol.identity import Geometry
from ds4.protocol.membership import NONCE_BYTES, ClusterKey
from ds4.protocol.messages import (
    Bye,
    Challenge,
    Config,
    ConfigOk,
    Fail,
    Hello,
    HelloOk,
    Load,
    Loaded,
    LoadProgress,
    Message,
    NcclId,
    NcclOk,
    NcclVote,
    Ping,
    Pong,
    Ready,
    Refuse,
    Response,
    Role,
    Stop,
    StopMode,
)
from ds4.protocol.state import State
from ds4.world.device_thread import Device
from ds4.world.exit_codes import ExitCode, exit_code_of_fail
from ds4.world.link import Link, LinkLost
from ds4.world.peer import TERMINATED
from ds4.world.pulse import Pulse
from ds4.world.rank_work import SessionWork, is_operation
from ds4.world.timeouts import Timeouts

__all__ = ["Ending", "RankActor"]

_log = logging.getLogger(__name__)

_QUEUE = 16

E = TypeVar("E")
T = TypeVar("T")


@attrs.frozen
class Ending:
    """How a rank ended.

    Attributes:
      code: exit status.
      reason: one line.
    """

    code: ExitCode
    reason: str


class RankActor:
    """Serves one head.

    Args:
      stream: to the head.
      rank: which rank this is.
      geometry: what it would run; None when it cannot run anything, and `refusal` says why.
      backend: the device.
      device: where the backend's functions run.
      key: cluster key, if any.
      timeouts: bounds; those that shape the world arrive from the head.
      collective_host: address that other ranks reach this one by.
      refusal: sent in place of a hello.
      watchdog: entered when everything should be over soon; it ends the process if it is not.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        rank: int,
        geometry: Geometry | None,
        backend: RankBackend,
        device: Device,
        key: ClusterKey | None,
        timeouts: Timeouts,
        collective_host: str = "127.0.0.1",
        refusal: Refuse | None = None,
        watchdog: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.rank = rank
        self._geometry = geometry
        self._backend = backend
        self._device = device
        self._key = key
        self._timeouts = timeouts
        self._host = collective_host
        self._refusal = refusal
        self._watchdog = watchdog
        self._link = Link(stream, Connection(Role.WORKER, key=key), write_s=timeouts.write_s)
        self._work = SessionWork(backend, device, rank)
        self._send_jobs, self._jobs = trio.open_memory_channel[Message](_QUEUE)
        self._ending: Ending | None = None
        self._own_failure: Ending | None = None
        self._secret = b""
        self._armed = ExitStack()
        self._is_armed = False
        self._scope = trio.CancelScope()
        self._reading = trio.CancelScope()

    async def run(self) -> Ending:
        """Serve until the end. Never raises but for cancellation."""
        with ExitStack() as self._armed, self._scope:
            try:
                with trio.move_on_after(self._timeouts.hello_s) as greeting:
                    await self._introduce()
                if not greeting.cancelled_caught:
                    await self._serve()
            finally:
                await self._clean_up()
        return self._ending or Ending(ExitCode.LEADER_LOST, "the head did not answer in time")

    async def _clean_up(self) -> None:
        with trio.CancelScope(shield=True):
            self._arm()
            if self._ending is None or self._ending.code != ExitCode.CLEAN:
                self._backend.abort()
            await self._device.run(self._backend.close)
            await self._link.finish()
            await self._link.aclose()

    def _arm(self) -> None:
        """From now on the watchdog runs: a job that does not return keeps every task here."""
        if not self._is_armed:
            self._is_armed = True
            self._armed.enter_context(self._watchdog())

    def terminate(self, nursery: trio.Nursery) -> None:
        """End because a signal asked for it: tell the head, then abort."""
        nursery.start_soon(self._terminate)

    async def _terminate(self) -> None:
        with trio.move_on_after(self._timeouts.farewell_s):
            await self._link.last_word(
                Fail(code=TERMINATED, rank=self.rank, text="terminated by a signal")
            )
        self._finish(ExitCode.INTERRUPTED, "terminated by a signal")

    def _finish(self, code: ExitCode, reason: str) -> None:
        if self._ending is None:
            self._ending = Ending(code, reason)
            level = logging.INFO if code == ExitCode.CLEAN else logging.ERROR
            _log.log(level, "rank.end rank=%d exit=%d reason=%s", self.rank, code, reason)
        if self._ending.code != ExitCode.CLEAN:
            self._arm()
            # Wakes a device job that waits for a peer; the job itself cannot be cancelled.
            self._backend.abort()
        self._scope.cancel()

    # -- introduction ------------------------------------------------------------------------

    async def _introduce(self) -> None:
        try:
            await self._link.greet()
            await self._expect(PeerVersion)
            if self._key is not None:
                await self._prove()
            await self._hello()
        except LinkLost as error:
            self._finish(ExitCode.LEADER_LOST, f"head lost: {error}")
        except ProtocolError as error:
            code = ExitCode.REFUSED if error.reason == "version" else ExitCode.LEADER_LOST
            await self._explain(error)
            self._finish(code, f"{error} ({error.reason})")
        await trio.lowlevel.checkpoint()

    async def _prove(self) -> None:
        ours = Challenge(
            role=int(Role.WORKER),
            rank=self.rank,
            geometry_hash=bytes(32) if self._geometry is None else self._geometry.geometry_hash(),
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        await self._link.send(ours)
        theirs = await self._expect(Challenge)
        if theirs is not None:
            await self._link.send(self._link.connection.prove(theirs))
            await self._expect(Response)

    async def _hello(self) -> None:
        if self._refusal is not None or self._geometry is None:
            word = self._refusal or Refuse(reason="unusable", text="this rank can run nothing")
            await self._link.send(word)
            self._finish(ExitCode.REFUSED, word.text)
            await trio.lowlevel.checkpoint()
            return
        hello = Hello.of(
            self._geometry,
            role=Role.WORKER,
            rank=self.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=self._backend.device(),
        )
        await self._link.send(hello)
        theirs = await self._expect(Hello)
        await self._expect(HelloOk)
        # The head has compared; this side does too, because it is this side that would compute.
        ours = None if theirs is None else refusal(theirs, hello)
        if ours is not None:
            await self._link.send(ours)
            self._finish(ExitCode.REFUSED, ours.text)
            return
        await self._link.send(HelloOk())

    async def _expect(self, kind: type[E]) -> E | None:
        event = await self._link.receive()
        if isinstance(event, Refuse):
            self._finish(ExitCode.REFUSED, event.text)
            await trio.lowlevel.checkpoint()
        if not isinstance(event, kind):
            raise RemoteProtocolError(
                f"{type(event).__name__} where {kind.__name__} was expected", reason="state"
            )
        return event

    async def _explain(self, error: ProtocolError) -> None:
        if isinstance(error, RemoteProtocolError) and error.reason != "eof":
            await self._link.last_word(
                Fail(code=error.code, rank=self.rank, text=str(error)[:1000])
            )

    # -- service -----------------------------------------------------------------------------

    async def _serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._do_jobs)
            nursery.start_soon(self._watch)
            with self._reading:
                await self._read()
            if self._ending is None and self._own_failure is not None:
                self._finish(self._own_failure.code, self._own_failure.reason)
            nursery.cancel_scope.cancel()

    async def _watch(self) -> None:
        """End when the head has been silent for too long: it pings whatever else it does."""
        pulse = Pulse(self._timeouts.ping_s)
        while True:
            await pulse.wait()
            if pulse.was_late:
                continue
            silence = trio.current_time() - self._link.heard
            if silence > self._timeouts.rank_timeout_s:
                self._finish(ExitCode.LEADER_LOST, f"head silent for {silence:.1f} s")

    async def _read(self) -> None:
        try:
            while self._ending is None:
                await self._take(await self._link.receive())
        except LinkLost as error:
            self._lost(f"head lost: {error}")
        except LocalProtocolError as error:
            self._lost(f"head lost: {error}")
        except RemoteProtocolError as error:
            if error.reason == "eof":
                self._lost("head lost: it closed the connection")
                return
            await self._explain(error)
            self._lost(f"protocol violation by the head: {error} ({error.reason})")

    def _lost(self, reason: str) -> None:
        connection = self._link.connection
        if connection.state is State.STOPPED and connection.error is None:
            # The goodbye went out whole, and the head closed before this side noticed.
            self._finish(ExitCode.CLEAN, "stopped")
        elif self._own_failure is not None:
            self._finish(self._own_failure.code, self._own_failure.reason)
        else:
            self._finish(ExitCode.LEADER_LOST, reason)

    async def _take(self, event: Event) -> None:
        match event:
            case Ping():
                await self._link.send(
                    Pong(time_ns=event.time_ns, begun=self._work.begun, ended=self._work.ended)
                )
            case Pong():
                pass
            case Refuse():
                self._finish(ExitCode.REFUSED, event.text)
            case Fail() if event.sticky:
                self._finish(exit_code_of_fail(event.code), f"{event.code}: {event.text}")
            case Fail():
                _log.warning("head.fail rank=%d text=%s", self.rank, event.text)
            case Stop() if event.mode == StopMode.NOW:
                self._backend.abort()
                await self._link.send(Bye(counters=self._work.counters()))
                self._finish(ExitCode.CLEAN, "stopped")
            case Closed():
                self._lost("head lost: it closed the connection")
            case PeerVersion():
                pass
            case _:
                await self._send_jobs.send(event)

    # -- work --------------------------------------------------------------------------------

    async def _do_jobs(self) -> None:
        async for message in self._jobs:
            try:
                await self._do(message)
            except LinkLost:
                return  # the reader sees it too, and knows what it means
            except LocalProtocolError as error:
                await self._broke("protocol_local", str(error), ExitCode.DATA_PLANE)
                return
            except Desync as error:
                await self._broke(error.code, error.reason, ExitCode.DESYNC)
                return
            except Ds4Error as error:
                await self._broke(error.code, str(error), ExitCode.DATA_PLANE)
                return
            except Exception as error:  # noqa: BLE001  # a bug must not leave the others waiting
                _log.exception("rank.crash rank=%d", self.rank)
                text = f"{type(error).__name__}: {error}"
                await self._broke("internal", text, ExitCode.DATA_PLANE)
                return

    async def _broke(self, code: str, text: str, exit_code: ExitCode) -> None:
        """Report a failure of our own, and wait for what the head makes of it."""
        _log.error("rank.broke rank=%d code=%s text=%s", self.rank, code, text)
        self._own_failure = Ending(exit_code, f"{code}: {text}")
        await self._link.last_word(Fail(code=code, rank=self.rank, text=text[:1000]))
        timeouts = self._timeouts
        self._reading.deadline = trio.current_time() + timeouts.blame_s + 3 * timeouts.farewell_s

    async def _do(self, message: Message) -> None:
        match message:
            case Config():
                self._configure(message)
                await self._link.send(ConfigOk())
            case Load():
                await self._load()
            case NcclVote():
                await self._vote(message)
            case NcclId():
                await self._connect(message)
            case Stop():
                await self._device.run(self._backend.close)
                await self._link.send(Bye(counters=self._work.counters()))
                self._finish(ExitCode.CLEAN, "stopped")
            case _ if is_operation(message):
                for answer in await self._work.do(message):
                    await self._link.send(answer)
            case _:
                raise LocalProtocolError(f"nothing handles {message.NAME}", reason="state")

    def _configure(self, config: Config) -> None:
        if self._geometry and config.placement_digest != self._geometry.placement_digest:
            raise ConfigError("the head's configuration has another --ep-placement")
        self._timeouts = attrs.evolve(
            self._timeouts,
            rank_timeout_s=config.rank_timeout_ms / 1000,
            bootstrap_s=config.bootstrap_timeout_ms / 1000,
            ping_s=config.ping_interval_ms / 1000,
        )

    async def _load(self) -> None:
        begin = time.monotonic()
        report = await self._with_progress("weights", self._backend.load)
        await self._link.send(
            Loaded(
                mapped_bytes=report.mapped_bytes,
                device_bytes=report.device_bytes,
                seconds=time.monotonic() - begin,
                expert_rows=report.expert_rows,
            )
        )

    async def _with_progress(
        self, stage: str, job: Callable[[Callable[[str, int, int], None]], T]
    ) -> T:
        """Run a job that takes long, and keep saying so."""
        latest = [(stage, 0, 0)]

        def note(stage: str, done: int, total: int) -> None:
            latest[0] = (stage, done, total)

        async def say() -> None:
            while True:
                await trio.sleep(self._timeouts.load_progress_s)
                stage, done, total = latest[0]
                # The job's end cancels this task, and a frame cut short would end the world.
                with trio.CancelScope(shield=True):
                    await self._link.send(LoadProgress(stage=stage, done=done, total=total))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(say)
            result = await self._device.run(job, note)
            nursery.cancel_scope.cancel()
        return result

    async def _vote(self, vote: NcclVote) -> None:
        self._secret = vote.offer
        offer = await self._device.run(self._backend.offer, self._host)
        reason = offer.reason
        if not reason and offer.transport != vote.transport:
            reason = f"this rank has {offer.transport}, the head asks for {vote.transport}"
        await self._link.send(
            NcclVote(
                usable=not reason,
                transport=offer.transport,
                version=offer.version,
                reason=reason,
                offer=offer.data,
            )
        )

    async def _connect(self, message: NcclId) -> None:
        try:
            await self._device.run(
                self._backend.connect,
                message.offers,
                self._secret,
                self._timeouts.bootstrap_s,
            )
        except CollectiveError as error:
            raise CollectiveError(f"data plane: {error}") from error
        await self._link.send(NcclOk())
        report = await self._with_progress("warm-up", lambda _: self._backend.warm_up())
        await self._link.send(Ready(report=report))
