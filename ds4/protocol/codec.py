"""Message to frame body and back: one msgpack array `[tag, n, e, field, ...]`.

Invariant: `decode(encode(x)) == x`, and whatever else a body holds is a `RemoteProtocolError` with
a named reason. Errors of msgpack and of the message constructors are translated here and nowhere
else. Whether the message is legal now is not known here.

`n` is the frame's number in its direction and `e` the sender's epoch; both belong to the
conversation (`ds4.protocol.ledger`), not to the message. Arity is exact: both sides know the
negotiated minor before the first frame, so each message has exactly the fields of that minor.

Any msgpack form of a value is accepted (an integer need not be in its shortest form); what is sent
is always the shortest one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import msgpack

from ds4.errors import LocalProtocolError, RemoteProtocolError
from ds4.protocol.fields import Field, fields_of
from ds4.protocol.messages import MESSAGES, Message
from ds4.protocol.structure import check_structure

__all__ = ["CODEC", "Codec", "Envelope"]

_U64 = 2**64 - 1
_LEAD = 3
"""Array entries before the message's own fields: tag, n, e."""


@attrs.frozen
class Envelope:
    """A message with its place in the conversation.

    Attributes:
      n: frame number in its direction, from 0.
      epoch: the sender's epoch.
      message: the message.
    """

    n: int
    epoch: int
    message: Message


class _Layout:
    """The wire layout of one message class."""

    def __init__(self, cls: type[Message]) -> None:
        self.cls = cls
        self.fields = fields_of(cls)
        # Most fields travel as they are; only the others cost a call.
        self.names = tuple(name for name, _, _ in self.fields)
        self.packed = tuple(
            (index, field)
            for index, (_, field, _) in enumerate(self.fields)
            if type(field).pack is not Field.pack
        )
        self._arity: dict[int, int] = {}

    def arity(self, minor: int) -> int:
        found = self._arity.get(minor)
        if found is None:
            found = sum(since <= minor for _, _, since in self.fields)
            self._arity[minor] = found
        return found


class Codec:
    """Encodes and decodes a closed set of message classes.

    Args:
      messages: the classes; every tag once.

    Raises:
      TypeError: two classes share a tag, or a field has no field type.
    """

    def __init__(self, messages: Iterable[type[Message]]) -> None:
        self._by_tag: dict[int, _Layout] = {}
        self._by_class: dict[type[Message], _Layout] = {}
        for cls in messages:
            layout = _Layout(cls)
            if cls.TAG in self._by_tag:
                raise TypeError(f"tag {cls.TAG} is used by two messages")
            self._by_tag[cls.TAG] = layout
            self._by_class[cls] = layout

    def encode(self, envelope: Envelope, minor: int) -> bytes:
        """The frame body of a message, with the fields of protocol minor `minor`.

        Raises:
          LocalProtocolError: a class that is not in this codec, or a plan that cannot travel.
        """
        message = envelope.message
        layout = self._by_class.get(type(message))
        if layout is None:
            raise LocalProtocolError(f"{message!r:.60} is not a protocol message", reason="tag")
        arity = layout.arity(minor)
        values: list[object] = [getattr(message, name) for name in layout.names[:arity]]
        for index, field in layout.packed:
            if index < arity:
                values[index] = field.pack(values[index], minor)
        body: bytes = msgpack.packb([message.TAG, envelope.n, envelope.epoch, *values])
        return body

    def decode(self, body: bytes, minor: int) -> Envelope:
        """The message in a frame body.

        Raises:
          RemoteProtocolError: the reason names the rule: one of `msgpack_*`, `frame_shape`, `tag`,
            `arity`, `field`, or a rule of the message itself.
        """
        check_structure(body)
        try:
            values: Any = msgpack.unpackb(body, raw=False, strict_map_key=True)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            # After check_structure only bad UTF-8 is left, but msgpack's errors share no base.
            raise RemoteProtocolError(f"not msgpack: {error}", reason="msgpack_text") from error
        if type(values) is not list or len(values) < _LEAD:
            raise RemoteProtocolError(
                f"a frame must be an array that opens with tag, n and e, got {values!r:.60}",
                reason="frame_shape",
            )
        tag, n, epoch = values[:_LEAD]
        for name, value in (("tag", tag), ("n", n), ("e", epoch)):
            if type(value) is not int or not 0 <= value <= _U64:
                raise RemoteProtocolError(
                    f"{name} must be a whole number from 0 to 2**64 - 1, got {value!r:.60}",
                    reason="frame_shape",
                )
        layout = self._by_tag.get(tag)
        if layout is None:
            raise RemoteProtocolError(f"no message has tag {tag}", reason="tag")
        return Envelope(n, epoch, self._build(layout, values[_LEAD:], minor))

    def _build(self, layout: _Layout, values: list[object], minor: int) -> Message:
        arity = layout.arity(minor)
        if len(values) != arity:
            raise RemoteProtocolError(
                f"{layout.cls.NAME} has {len(values)} fields, protocol minor {minor} has {arity}",
                reason="arity",
            )
        try:
            for index, field in layout.packed:
                if index < arity:
                    values[index] = field.unpack(values[index], minor)
            return layout.cls(**dict(zip(layout.names, values, strict=False)))
        except LocalProtocolError as error:
            # The constructors cannot know whose fault a bad value is. Here it is the peer's.
            raise RemoteProtocolError(f"{layout.cls.NAME}: {error}", reason=error.reason) from error


CODEC = Codec(MESSAGES)
