"""How ranks come together: who dials in, whether it belongs here, and what it is told.

Invariant: nothing a stranger does disturbs the world or blocks the next connection. Every
connection has a task of its own, a bound of `hello_s` on becoming a rank, and a place among a
limited number of strangers. The verdict on a hello does not depend on the order of arrival.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import TypeVar

import trio

from ds4.errors import ProtocolError, RemoteProtocolError
from ds4.protocol.connection import Connection, PeerVersion
from ds4.protocol.handshake import refusal, refusals
from ds4.protocol.identity import warnings_between
from ds4.protocol.membership import NONCE_BYTES, ClusterKey
from ds4.protocol.messages import Challenge, Hello, HelloOk, Message, Refuse, Response, Role
from ds4.world.link import Link, LinkLost
from ds4.world.timeouts import Timeouts

__all__ = ["MAX_STRANGERS", "Gathering"]

_log = logging.getLogger(__name__)

E = TypeVar("E")

MAX_STRANGERS = 64
"""Connections that may be unknown at one time; more are closed at once."""


class Gathering:
    """Meets whoever connects.

    Args:
      hello: the head's.
      key: the cluster key, if the world has one.
      timeouts: bounds.
      agreed: called with (link, hello) for every rank that was accepted.
      dropped: called with a rank that was accepted before and is refused now.
      refuse_world: called with a refusal that no arrival can cure.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        key: ClusterKey | None,
        timeouts: Timeouts,
        agreed: Callable[[Link, Hello], None],
        dropped: Callable[[int], None],
        refuse_world: Callable[[Refuse], None],
    ) -> None:
        self._hello = hello
        self._key = key
        self._timeouts = timeouts
        self._agreed = agreed
        self._dropped = dropped
        self._refuse_world = refuse_world
        self._links: dict[int, Link] = {}
        self._claims: dict[int, Hello] = {}
        self._strangers = 0
        self._verdict: Refuse | None = None

    def missing(self) -> list[int]:
        """Ranks that have not come, ascending."""
        return [r for r in range(self._hello.geometry.world) if r not in self._links]

    def forget(self, rank: int) -> None:
        """A rank went away before the world was complete; its place is free again."""
        self._links.pop(rank, None)
        self._claims.pop(rank, None)

    def close(self, verdict: Refuse) -> None:
        """Refuse everyone who comes from now on, with this reason."""
        self._verdict = verdict

    async def meet(self, stream: trio.abc.Stream, where: str) -> None:
        """Handle one connection until it is a rank or gone. Raises nothing but `Cancelled`.

        Args:
          stream: accepted.
          where: address of the peer, for logs.
        """
        if self._strangers >= MAX_STRANGERS:
            _log.warning("gather.crowded peer=%s strangers=%d", where, self._strangers)
            await trio.aclose_forcefully(stream)
            return
        connection = Connection(Role.LEADER, key=self._key)
        link = Link(stream, connection, write_s=self._timeouts.hello_s)
        self._strangers += 1
        is_rank = False
        try:
            with trio.move_on_after(self._timeouts.hello_s) as scope:
                is_rank = await self._introduce(link, where)
            if scope.cancelled_caught:
                _log.info("gather.silent peer=%s seconds=%g", where, self._timeouts.hello_s)
        finally:
            self._strangers -= 1
            if not is_rank:
                await link.aclose()

    async def _introduce(self, link: Link, where: str) -> bool:
        try:
            await link.greet()
            hello = await self._hear(link)
        except LinkLost as error:
            _log.info("gather.left peer=%s reason=%s", where, error)
            return False
        except ProtocolError as error:
            _log.info("gather.stranger peer=%s reason=%s text=%s", where, error.reason, error)
            if isinstance(error, RemoteProtocolError) and error.reason != "eof":
                await self._tell(link, self._explanation(error))
            return False
        try:
            return await self._answer(link, hello, where)
        except (LinkLost, ProtocolError) as error:
            _log.info("gather.left peer=%s rank=%d reason=%s", where, hello.rank, error)
            return False

    async def _hear(self, link: Link) -> Hello:
        await self._expect(link, PeerVersion)
        if self._key is not None:
            theirs = await self._expect(link, Challenge)
            await link.send(
                Challenge(
                    role=int(Role.LEADER),
                    rank=0,
                    geometry_hash=self._hello.geometry_hash,
                    nonce=secrets.token_bytes(NONCE_BYTES),
                )
            )
            await self._expect(link, Response)
            await link.send(link.connection.prove(theirs))
        return await self._expect(link, Hello)

    @staticmethod
    async def _expect(link: Link, kind: type[E]) -> E:
        event = await link.receive()
        if not isinstance(event, kind):
            raise RemoteProtocolError(
                f"{type(event).__name__} where {kind.__name__} was expected", reason="state"
            )
        return event

    def _explanation(self, error: RemoteProtocolError) -> Refuse:
        text = str(error)
        reason = error.reason
        flag = ""
        if reason in ("state", "membership"):
            # So early, only one thing makes a message of the right version illegal.
            flag, reason = "--cluster-key-file", "membership"
            text = "this world has no cluster key, the rank was given one"
            if self._key is not None:
                text = "this world has a cluster key, the rank has none or another"
            text += f"; set by {flag}"
        return Refuse(reason=reason, text=text[:1000], flag=flag)

    async def _tell(self, link: Link, message: Message) -> None:
        if await link.last_word(message):
            await link.finish()
            # Until the peer has read it and closed; the caller's scope bounds this.
            try:
                while await link.stream.receive_some(4096):
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async def _answer(self, link: Link, hello: Hello, where: str) -> bool:
        verdict = self._verdict or refusal(self._hello, hello)
        await link.send(self._hello)
        if verdict is not None:
            _log.warning("gather.refused peer=%s rank=%d text=%s", where, hello.rank, verdict.text)
            if self._verdict is None:
                self._refuse_world(verdict)
            await self._tell(link, verdict)
            return False
        other = self._claims.get(hello.rank)
        if other is not None:
            both = refusals(self._hello, [other, hello])
            _log.warning("gather.rank_taken peer=%s rank=%d", where, hello.rank)
            first = self._links.get(hello.rank)
            self.forget(hello.rank)
            if first is not None and both[0] is not None:
                await first.last_word(both[0])
                await first.finish()
                self._dropped(hello.rank)
            if both[1] is not None:
                await self._tell(link, both[1])
            return False
        self._claims[hello.rank] = hello
        try:
            await link.send(HelloOk())
            event = await link.receive()
        except BaseException:
            self.forget(hello.rank)
            raise
        if self._claims.get(hello.rank) is not hello:
            # Someone else claimed the rank meanwhile, and was refused for it.
            both = refusals(self._hello, [hello, hello])
            if both[0] is not None:
                await self._tell(link, both[0])
            return False
        if isinstance(event, Refuse):
            self.forget(hello.rank)
            self._refuse_world(event)
            return False
        for difference in warnings_between(self._hello.geometry, hello.geometry):
            _log.warning("gather.differs rank=%d %s", hello.rank, difference.text(hello.rank))
        self._links[hello.rank] = link
        link.write_s = self._timeouts.write_s
        _log.info("gather.joined rank=%d host=%s pid=%d", hello.rank, hello.host, hello.pid)
        self._agreed(link, hello)
        return True
