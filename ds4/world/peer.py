"""The head's end of one rank's link, once both sides have agreed.

Invariant: everything a rank says is looked at as it arrives. Pings are answered and failures are
reported even while nobody waits for an answer; answers go to the inbox that all peers share, which
is bounded by what can be outstanding, so a peer that floods it blocks only itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import attrs
import trio

from ds4.errors import (
    CollectiveError,
    Ds4Error,
    ProtocolError,
    RankLost,
    WorldRefused,
)
from ds4.protocol.connection import Closed, PeerVersion
from ds4.protocol.messages import (
    Bye,
    Fail,
    Hello,
    LoadProgress,
    Message,
    Ping,
    Pong,
    Refuse,
    Subject,
)
from ds4.world.link import Link, LinkLost

__all__ = ["TERMINATED", "Failure", "Peer"]

_log = logging.getLogger(__name__)

TERMINATED = "TERM"
"""Code of the `fail` of a rank that was told to end by a signal."""


@attrs.frozen(kw_only=True)
class Failure:
    """Why a world ends.

    Attributes:
      error: what the caller of the world gets.
      rank: the rank it is about; None when it is the head.
      is_consequence: another rank's end may be the cause. When a rank dies, the others' collectives
        break at the same moment, and their reports can arrive first.
    """

    error: Ds4Error
    rank: int | None = None
    is_consequence: bool = False


class Peer:
    """One rank as the head sees it.

    Args:
      link: agreed on.
      hello: the rank's.
      inbox: where answers go, as (rank, message).
      report: called with the failure, once, when the link ends where it may not.
    """

    def __init__(
        self,
        link: Link,
        hello: Hello,
        inbox: trio.MemorySendChannel[tuple[int, Message]],
        report: Callable[[Failure], None],
    ) -> None:
        self.link = link
        self.hello = hello
        self.rank = hello.rank
        self.gone = trio.Event()
        self.is_stopping = False
        self._inbox = inbox
        self._report = report
        self._next_op = 1
        self._pinged = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.hello.host} pid {self.hello.pid})"

    def next_op(self) -> int:
        """A new operation id on this link."""
        op = self._next_op
        self._next_op += 1
        return op

    def silence(self) -> float:
        """Seconds since the last frame."""
        return trio.current_time() - self.link.heard

    async def ping(self) -> None:
        """Send a ping unless one is still unanswered."""
        if self._pinged or self.gone.is_set():
            return
        self._pinged = True
        await self.send(Ping(time_ns=time.monotonic_ns()))

    async def send(self, message: Message) -> None:
        """Send, and report a broken link as a lost rank."""
        try:
            await self.link.send(message)
        except LinkLost as error:
            self._lost(str(error))
        except ProtocolError as error:
            self._lost(f"{error} ({error.reason})")

    def _lost(self, reason: str) -> None:
        self._report(Failure(error=RankLost(self.rank, reason), rank=self.rank))

    async def pump(self) -> None:
        """Read until the link ends. Never raises but for cancellation."""
        try:
            while await self._take_one():
                pass
        except LinkLost as error:
            self._lost(str(error))
        except ProtocolError as error:
            if error.reason == "eof":
                self._lost(f"{self} closed its connection")
            else:
                self._lost(f"protocol violation: {error} ({error.reason})")
                await self.link.last_word(
                    Fail(code=error.code, rank=self.rank, text=str(error)[:1000])
                )
        finally:
            self.gone.set()

    async def _take_one(self) -> bool:
        event = await self.link.receive()
        match event:
            case Ping():
                await self.send(Pong(time_ns=event.time_ns))
            case Pong():
                self._pinged = False
            case LoadProgress():
                _log.info(
                    "rank.progress rank=%d stage=%s done=%d total=%d",
                    self.rank, event.stage, event.done, event.total,
                )  # fmt: skip
            case Refuse():
                self._report(Failure(error=WorldRefused(event.reason, event.text), rank=self.rank))
            case Fail() if event.sticky or event.about == Subject.NOTHING:
                self._failed(event)
            case Closed():
                if not self.is_stopping:
                    self._lost(f"{self} closed its connection")
                return False
            case Bye():
                self.is_stopping = True
                await self._inbox.send((self.rank, event))
            case PeerVersion():
                pass
            case _:
                await self._inbox.send((self.rank, event))
        return True

    def _failed(self, event: Fail) -> None:
        text = f"{event.code}: {event.text}"
        _log.warning("rank.fail rank=%d code=%s text=%s", self.rank, event.code, event.text)
        if not event.sticky:
            return
        if event.code == CollectiveError.code:
            error: Ds4Error = CollectiveError(f"rank {self.rank}: {event.text}")
            self._report(Failure(error=error, rank=self.rank, is_consequence=True))
        elif event.code == TERMINATED:
            self._lost(f"{self} was terminated by a signal")
        else:
            self._lost(text)
