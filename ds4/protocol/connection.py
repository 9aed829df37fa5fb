"""`Connection`: the one class that users of the protocol touch. Bytes in, events and bytes out.

Invariant: `next_event` returns only legal messages in order, or raises the one error that ended the
conversation, again and again. How the bytes were cut into `receive_data` calls changes nothing.

It does no I/O, knows no clock and starts nothing. The caller moves the bytes, watches the time, and
closes the stream after an error. Order of use at both ends:

    out = connection.start()             # 8 bytes, before anything else
    connection.receive_data(data)        # whatever the stream gave
    while (event := connection.next_event()) is not None: ...
    out = connection.send(message)       # whole frame; hand it to the stream completely or close

A frame that was handed over only in part leaves the peer in the middle of nowhere: call `poison`.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from ds4.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from ds4.protocol.codec import CODEC, Envelope
from ds4.protocol.frame import FrameBuffer, frame
from ds4.protocol.ledger import Illegal, Ledger
from ds4.protocol.limits import DEFAULT_LIMITS, Limits
from ds4.protocol.membership import ClusterKey
from ds4.protocol.messages import Challenge, Fail, Hello, Message, Refuse, Response, Role, Subject
from ds4.protocol.state import TABLE, Key, Move, State, legal_now
from ds4.protocol.version import CURRENT, Version, negotiate

__all__ = ["Closed", "Connection", "Event", "PeerVersion"]


@attrs.frozen
class PeerVersion:
    """The peer's preface has arrived and its major version is ours.

    Attributes:
      version: what the peer announced.
      minor: the minor both sides speak from now on.
    """

    version: Version
    minor: int


@attrs.frozen
class Closed:
    """The peer closed the stream where the protocol allows it: after a goodbye or a failure."""


Event: TypeAlias = PeerVersion | Message | Closed

_CLOSABLE = (State.STOPPED, State.REFUSED, State.FAILED, State.DISMISSED)


class Connection:
    """One end of a link.

    Args:
      role: which end.
      limits: bounds on what the peer may make this side hold.
      key: the cluster key. With one, both sides prove that they hold it before anything else.
      version: the version this side speaks; other values are for tests of version skew.
    """

    def __init__(
        self,
        role: Role,
        limits: Limits = DEFAULT_LIMITS,
        *,
        key: ClusterKey | None = None,
        version: Version = CURRENT,
    ) -> None:
        self._role = role
        self._limits = limits
        self._key = key
        self._version = version
        self._buffer = FrameBuffer(limits.max_frame_bytes)
        self._ledger = Ledger(limits, key)
        self._state = State.HELLO if key is None else State.CHALLENGE
        self._minor: int | None = None
        self._started = False
        self._error: ProtocolError | None = None
        self._farewell_sent = False
        self._eof = False
        self._closed_delivered = False

    @property
    def role(self) -> Role:
        """Which end this is."""
        return self._role

    @property
    def state(self) -> State:
        """Where the conversation stands, as seen from this end."""
        return self._state

    @property
    def epoch(self) -> int:
        """The epoch of frames sent from here: 0 before the first data plane."""
        return self._ledger.epoch(self._role)

    @property
    def window(self) -> int:
        """Most steps that may be outstanding; 1 until a `config` says otherwise."""
        return self._ledger.window

    @property
    def steps_outstanding(self) -> int:
        """Steps without an answer."""
        return self._ledger.steps_outstanding

    @property
    def outstanding(self) -> tuple[tuple[Subject, int], ...]:
        """Steps and operations without an answer, oldest first."""
        return self._ledger.outstanding

    @property
    def buffered_bytes(self) -> int:
        """Received bytes that are not events yet. Below one frame plus the last read."""
        return len(self._buffer)

    @property
    def peer_hello(self) -> Hello | None:
        """The peer's hello, once it has arrived."""
        return self._ledger.hello(self._role.peer)

    @property
    def error(self) -> ProtocolError | None:
        """The error that ended the conversation, if one did."""
        return self._error

    def start(self) -> bytes:
        """The 8 bytes that open this direction.

        Raises:
          LocalProtocolError: called twice (reason `preface`).
        """
        if self._started:
            raise LocalProtocolError("the preface was sent already", reason="preface")
        self._started = True
        return self._version.preface()

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes from the stream. Take all events before giving more.

        After an error the bytes are dropped; `next_event` keeps raising the error.

        Raises:
          LocalProtocolError: a whole frame is waiting unread (reason `unread`), or data after
            `receive_eof` (reason `eof`).
        """
        if self._eof:
            raise LocalProtocolError("data after the end of the stream", reason="eof")
        if self._error is None:
            self._buffer.feed(data)

    def receive_eof(self) -> None:
        """Note that the peer closed its direction. `next_event` tells whether it was allowed to."""
        self._eof = True

    def next_event(self) -> Event | None:
        """The next event, or None when more bytes are needed.

        Raises:
          ProtocolError: the conversation is over; the same error on every call. A
            `RemoteProtocolError` when the peer broke a rule or vanished (reason `eof`), or the
            `LocalProtocolError` that an earlier call here raised.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._next_event()
        except RemoteProtocolError as error:
            self._break(error)
            raise

    def send(self, message: Message) -> bytes:
        """Count a message as sent and return its frame.

        After an error one last `Fail` or `Refuse` may still be sent, so that the peer learns why.

        Raises:
          LocalProtocolError: the message is illegal now; the reason names the rule. The
            conversation is over, except when the message just does not fit the limits (reasons
            `frame_length` and `field`): nothing has changed then.
        """
        if self._minor is None or not self._started:
            raise LocalProtocolError(
                f"{message.NAME} before the prefaces were exchanged", reason="preface"
            )
        last_word = isinstance(message, (Fail, Refuse)) and not self._farewell_sent
        if self._error is not None and not last_word:
            raise LocalProtocolError(
                f"{message.NAME} after the conversation failed: {self._error}", reason="failed"
            )
        n, epoch = self._ledger.next_header(self._role, message)
        data = frame(
            CODEC.encode(Envelope(n, epoch, message), self._minor), self._limits.max_frame_bytes
        )
        try:
            move = self._move(self._role, message)
            self._ledger.apply(self._role, message)
        except Illegal as illegal:
            error = LocalProtocolError(
                f"{self._role.name.lower()} may not send {message.NAME} in state "
                f"{self._state.value}: {illegal}",
                reason=illegal.reason,
            )
            if self._error is None:
                self._break(error)
            raise error from illegal
        self._state = move.target
        if self._error is not None:
            self._farewell_sent = True
        return data

    def prove(self, challenge: Challenge) -> Response:
        """Answer the peer's challenge with the cluster key.

        Raises:
          LocalProtocolError: there is no key, or this side has sent no challenge of its own.
        """
        ours = self._ledger.challenge(self._role)
        if self._key is None or ours is None:
            raise LocalProtocolError(
                "a response needs a cluster key and a challenge of our own", reason="membership"
            )
        return self._key.respond(ours, challenge)

    def poison(self, why: str) -> None:
        """End the conversation because of something outside it, such as a write that was cut.

        The first error stays.
        """
        # Not even a farewell may follow: the peer would read it as the rest of a cut frame.
        self._farewell_sent = True
        if self._error is None:
            self._break(LocalProtocolError(why, reason="poisoned"))

    def _break(self, error: ProtocolError) -> None:
        self._error = error
        self._buffer.clear()

    def _next_event(self) -> Event | None:
        if self._minor is None:
            theirs = self._buffer.next_preface()
            if theirs is not None:
                self._minor = negotiate(self._version, theirs)
                return PeerVersion(theirs, self._minor)
        else:
            while (body := self._buffer.next_frame()) is not None:
                message = self._receive(body, self._minor)
                if message is not None:
                    return message
        return self._at_eof() if self._eof else None

    def _at_eof(self) -> Closed | None:
        if self._state not in _CLOSABLE:
            cut = f", {len(self._buffer)} bytes into a frame" if len(self._buffer) else ""
            raise RemoteProtocolError(
                f"the peer closed the connection in state {self._state.value}{cut}", reason="eof"
            )
        if self._closed_delivered:
            return None
        self._closed_delivered = True
        return Closed()

    def _receive(self, body: bytes, minor: int) -> Message | None:
        """Check one frame; None when it was in flight and no longer counts."""
        peer = self._role.peer
        envelope = CODEC.decode(body, minor)
        message = envelope.message
        try:
            self._ledger.check_header(peer, message, envelope.n, envelope.epoch)
            move = self._move(peer, message)
            self._ledger.apply(peer, message)
        except Illegal as illegal:
            raise RemoteProtocolError(
                f"{peer.name.lower()} sent {message.NAME} in state {self._state.value}: {illegal}",
                reason=illegal.reason,
            ) from illegal
        self._state = move.target
        return None if move.drop else message

    def _move(self, sender: Role, message: Message) -> Move:
        label = self._ledger.label(sender, message)
        move = TABLE.get(Key(self._role, self._state, sender, label))
        if move is None:
            legal = ", ".join(legal_now(self._role, self._state, sender)) or "nothing"
            raise Illegal("state", f"{label} is not legal now; legal: {legal}")
        return move
