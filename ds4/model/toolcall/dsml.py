"""DSML, the tool-call markup of DeepSeek V4: its tags, its escapes, and how calls are written.

A rendered call is a sequence of pieces: plain text, and marks that stand for one special token. So
the caller can encode payloads, which come from outside, with special matching off. Escaping is
reversible: `unescape_value(escape_value(text)) == text` for every text, and an escaped value never
holds a closing parameter tag. This module knows neither tokens nor streams.

Source: the model's published prompt format. Its only escape is the first character of a literal
closing parameter tag inside a payload; the escape of an escape, and of attribute values, are ds4's.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Sequence

import attrs

from ds4.errors import InvalidRequest

__all__ = [
    "Mark",
    "Piece",
    "ToolCall",
    "escape_attribute",
    "escape_value",
    "pieces_text",
    "render_call_opening",
    "render_calls",
    "unescape_attribute",
    "unescape_value",
]


class Mark(enum.Enum):
    """A special token inside rendered or sampled text; the value is its spelling."""

    THINK = "<think>"
    END_THINK = "</think>"
    DSML = "｜DSML｜"


Piece = str | Mark


@attrs.frozen(kw_only=True)
class ToolCall:
    """One call of a tool.

    Attributes:
      name: the tool.
      arguments: JSON text of an object, parameters in the order they were written.
      id: the client's name for the call; empty when there is none.
    """

    name: str
    arguments: str
    id: str = ""


# A closing parameter tag, bare or with its first character escaped any number of times. ds4 writes
# the full dialect, whose payloads may hold `</parameter>` as ordinary text.
_CLOSING = re.compile(r"(?:<|&((?:amp;)*)lt;)(/｜?DSML｜parameter>)")
_CLOSING_PLAIN = re.compile(r"(?:<|&((?:amp;)*)lt;)(/(?:｜?DSML｜)?parameter>)")
_ATTRIBUTE_ESCAPES = {"&": "&amp;", '"': "&quot;", "<": "&lt;", ">": "&gt;"}
_ATTRIBUTE_ENTITY = re.compile("|".join(_ATTRIBUTE_ESCAPES.values()))
_ATTRIBUTE_UNESCAPES = {entity: text for text, entity in _ATTRIBUTE_ESCAPES.items()}


def escape_value(text: str) -> str:
    """Escape a raw string payload so that it cannot close its own parameter."""

    def escaped(match: re.Match[str]) -> str:
        if match[0].startswith("<"):
            return "&lt;" + match[2]
        return "&amp;" + match[0][1:]

    return _CLOSING.sub(escaped, text)


def unescape_value(text: str, *, plain: bool = False) -> str:
    """Undo `escape_value`.

    Args:
      text: the payload as written.
      plain: whether its tags are of the plain dialect, which also escapes `</parameter>`.
    """

    def bare(match: re.Match[str]) -> str:
        if match[0].startswith("<"):
            return match[0]
        if match[1]:
            return "&" + match[0][len("&amp;") :]
        return "<" + match[2]

    return (_CLOSING_PLAIN if plain else _CLOSING).sub(bare, text)


def escape_attribute(text: str) -> str:
    """Escape a tool or parameter name for use between double quotes."""
    return "".join(_ATTRIBUTE_ESCAPES.get(character, character) for character in text)


def unescape_attribute(text: str) -> str:
    """Undo `escape_attribute`; other ampersands stay as they are."""
    return _ATTRIBUTE_ENTITY.sub(lambda match: _ATTRIBUTE_UNESCAPES[match[0]], text)


def _json_value(name: str, value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"argument {name!r} holds a number that JSON cannot write") from error
    # In JSON the tag can only stand inside a string, where an escape means the same character.
    return _CLOSING.sub(
        lambda match: "\\u003c" + match[2] if match[0].startswith("<") else match[0], text
    )


def _parameters(call: ToolCall) -> dict[str, object]:
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    # History may hold what a model once got wrong. It is shown as it was, under the name that the
    # published encoder uses for it.
    return {"arguments": call.arguments}


def _open(tag: str) -> Iterator[Piece]:
    yield "<"
    yield Mark.DSML
    yield tag + ">"


def _close(tag: str) -> Iterator[Piece]:
    yield "</"
    yield Mark.DSML
    yield tag + ">"


def render_call_opening(name: str | None) -> Iterator[Piece]:
    """Pieces that open a block and its first call, up to the tool's name or past it.

    Putting them after a prompt forces the model to call a tool.

    Args:
      name: the tool to call, or None to let the model choose: then the pieces end right before the
        name.
    """
    yield "\n\n"
    yield from _open("tool_calls")
    yield "\n"
    if name is None:
        yield "<"
        yield Mark.DSML
        yield 'invoke name="'
    else:
        yield from _open(f'invoke name="{escape_attribute(name)}"')
        yield "\n"


def render_calls(calls: Sequence[ToolCall]) -> Iterator[Piece]:
    """Pieces of one block of calls, with the blank line that goes before it.

    Raises:
      InvalidRequest: an argument holds a number that JSON cannot write (as 1e999).
    """
    yield "\n\n"
    yield from _open("tool_calls")
    yield "\n"
    for index, call in enumerate(calls):
        if index:
            yield "\n"
        yield from _open(f'invoke name="{escape_attribute(call.name)}"')
        yield "\n"
        for place, (name, value) in enumerate(_parameters(call).items()):
            if place:
                yield "\n"
            raw = isinstance(value, str)
            flag = "true" if raw else "false"
            yield from _open(f'parameter name="{escape_attribute(name)}" string="{flag}"')
            yield escape_value(value) if isinstance(value, str) else _json_value(name, value)
            yield from _close("parameter")
        yield "\n"
        yield from _close("invoke")
    yield "\n"
    yield from _close("tool_calls")


def pieces_text(pieces: Iterator[Piece]) -> str:
    """The text that pieces spell."""
    return "".join(piece.value if isinstance(piece, Mark) else piece for piece in pieces)
