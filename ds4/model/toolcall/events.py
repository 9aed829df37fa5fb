"""What the output parser reports: frozen values, in the order in which a client should see them."""

from __future__ import annotations

import attrs

__all__ = ["BlockEnd", "CallArguments", "CallEnd", "CallStart", "Content", "Event", "Reasoning"]


@attrs.frozen
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@attrs.frozen
class Content:
    """Text of the visible answer."""

    text: str


@attrs.frozen
class CallStart:
    """A call begins.

    Attributes:
      index: place of the call in its turn, from 0.
      name: the tool.
    """

    index: int
    name: str


@attrs.frozen
class CallArguments:
    """A fragment of a call's arguments; all fragments of a call join to one JSON object."""

    index: int
    fragment: str


@attrs.frozen
class CallEnd:
    """A call is complete.

    Attributes:
      index: place of the call in its turn.
      name: the tool.
      arguments: JSON text of an object, parameters in sampled order, values as sampled.
      raw: the exact bytes the model wrote for this call, from its opening tag to its closing tag.
    """

    index: int
    name: str
    arguments: str
    raw: bytes


@attrs.frozen
class BlockEnd:
    """The block of calls is complete, and with it the turn.

    Attributes:
      raw: the exact bytes from the newlines before the block to its closing tag. Rendered again in
        a later prompt (`Message.tool_block`), they make that prompt continue the session.
      n_calls: how many calls the block held.
    """

    raw: bytes
    n_calls: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd | BlockEnd
