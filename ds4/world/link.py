"""One Trio stream that carries one protocol conversation: whole frames out, events in.

Invariant: bytes reach the stream in the order in which the connection counted them, and a write
that was cut short ends the conversation, because the peer stands in the middle of a frame then. A
lock serves as the writer: `trio.Lock` is fair, and unlike a writer task with a queue it shows a
caller the failure of its own frame.

Every write is bounded here; how long to wait for the peer's words is the caller's business, since
it depends on what was asked.
"""

from __future__ import annotations

import socket as stdlib_socket

import trio

from ds4.errors import LocalProtocolError
from ds4.protocol.connection import Closed, Connection, Event
from ds4.protocol.messages import Message

__all__ = ["Link", "LinkLost", "tune"]

_READ_BYTES = 1 << 18


class LinkLost(Exception):  # noqa: N818  # what happened; callers turn it into a RankLost
    """The stream broke or the peer did not take a frame in time. The text says which."""


def tune(stream: trio.SocketStream) -> None:
    """Send frames at once, and let the kernel notice a host that vanished."""
    stream.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NODELAY, 1)
    stream.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_KEEPALIVE, 1)


class Link:
    """One end of a conversation.

    Args:
      stream: to the peer. A stream that can close one direction does so in `finish`.
      connection: this end's state machine.
      write_s: see below.

    Attributes:
      heard: Trio time of the last event.
      write_s: bound on one write.
    """

    def __init__(self, stream: trio.abc.Stream, connection: Connection, *, write_s: float) -> None:
        self.stream = stream
        self.connection = connection
        self.heard = trio.current_time()
        self.write_s = write_s
        self._lock = trio.Lock()

    async def greet(self) -> None:
        """Send the preface.

        Raises:
          LinkLost: the stream broke.
        """
        async with self._lock:
            await self._write(self.connection.start(), "the preface")

    async def send(self, message: Message) -> None:
        """Send a message.

        Raises:
          LocalProtocolError: it is illegal now.
          LinkLost: the stream broke, or the peer did not take it in time.

        Cancellation: while waiting for its turn, nothing is sent; while writing, the conversation
          is over.
        """
        async with self._lock:
            await self._write(self.connection.send(message), message.NAME)

    async def _write(self, data: bytes, what: str) -> None:
        whole = False
        try:
            with trio.move_on_after(self.write_s) as scope:
                await self.stream.send_all(data)
                whole = True
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkLost(f"connection closed while sending {what}") from error
        finally:
            if not whole:
                self.connection.poison(f"{what} was not sent completely")
        if scope.cancelled_caught:
            raise LinkLost(f"{what} was not taken within {self.write_s:g} s")

    async def receive(self) -> Event:
        """The next event.

        Raises:
          RemoteProtocolError: the peer broke a rule, or closed where it may not.
          LocalProtocolError: an earlier write was cut.
          LinkLost: the stream broke.
        """
        while (event := self.connection.next_event()) is None:
            try:
                data = await self.stream.receive_some(_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise LinkLost("connection reset") from error
            if data:
                self.connection.receive_data(data)
            else:
                self.connection.receive_eof()
                return self.connection.next_event() or Closed()
        self.heard = trio.current_time()
        return event

    async def finish(self) -> None:
        """Say that nothing follows; the peer's last words can still be read.

        Closing at once could destroy what was sent: TCP resets a connection that is closed with
        unread data, and a reset overtakes bytes that the peer has not read yet.
        """
        if isinstance(self.stream, trio.abc.HalfCloseableStream):
            try:
                async with self._lock:
                    await self.stream.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # then there is no peer to tell

    async def aclose(self) -> None:
        """Close the stream, without waiting for anything."""
        with trio.CancelScope(shield=True), trio.move_on_after(0):
            await trio.aclose_forcefully(self.stream)

    async def last_word(self, message: Message) -> bool:
        """Send a final `Fail` or `Refuse` if the conversation still allows one; whether it went."""
        try:
            await self.send(message)
        except (LocalProtocolError, LinkLost):
            return False
        return True
