"""Streaming parser of what a DeepSeek V4 model writes: reasoning, answer, tool calls.

Invariants, for any input: however it is cut into pieces, the events are the same once adjacent text
is joined; a call is reported only after its whole block was well-formed, so no partial call is ever
delivered; text that turns out not to be a block comes out unchanged in the channel it stood in; the
parser always advances, and what it buffers is bounded.

It works on text. A byte that is not UTF-8 becomes U+FFFD in events and stays itself in `raw` bytes.
It knows no sockets, no sampling, and no stop strings (`ds4.model.toolcall.stop`).

Source of the grammar: `ds4.model.toolcall.dsml`. Tolerated dialects: the marker without its first
bar, and tags without any marker.
"""

from __future__ import annotations

import codecs
import enum
import json
import re
from typing import NoReturn

import attrs

from ds4.errors import ConfigError
from ds4.model.tokenizer import Tokenizer
from ds4.model.toolcall.dsml import Mark, unescape_attribute, unescape_value
from ds4.model.toolcall.events import (
    BlockEnd,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from ds4.model.toolcall.stop import held_length

__all__ = ["OutputParser", "ToolPolicy", "piece_of"]

MAX_TAG_CHARS = 4096
"""A tag longer than this is not one. Arbitrary; names are short."""

MAX_ATTEMPTS = 8
"""Failed blocks after which markers are plain text: bounds the rescans of hostile output."""

_END_THINK = Mark.END_THINK.value
_OPENINGS_MARKED = ("<｜DSML｜tool_calls>", "<DSML｜tool_calls>")
_OPENINGS = (*_OPENINGS_MARKED, "<tool_calls>")
_CLOSINGS = ("</｜DSML｜parameter>", "</DSML｜parameter>")
_CLOSINGS_PLAIN = (*_CLOSINGS, "</parameter>")
_WHITESPACE = " \t\r\n"
_TAG = re.compile(r'<(/?)(｜?DSML｜)?([a-z_]+)((?:\s+[a-z_]+\s*=\s*"[^"]*")*)\s*>')
_ATTRIBUTE = re.compile(r'([a-z_]+)\s*=\s*"([^"]*)"')
# How undecodable bytes travel inside text (PEP 383), and how clients see them.
_SHOWN = {0xDC00 + byte: "\ufffd" for byte in range(0x80, 0x100)}


class ToolPolicy(enum.Enum):
    """What to do with tool-call markup."""

    PARSE = "parse"
    """Tools were offered: report calls."""
    TEXT = "text"
    """The request has no tools: markup is ordinary text."""
    DROP = "drop"
    """Tools may not be called: a block, even a broken one, ends the turn and is never shown."""


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    BLOCK = enum.auto()  # inside tool_calls, between calls
    INVOKE = enum.auto()  # inside a call, between parameters
    PAYLOAD = enum.auto()  # inside a parameter


_TEXT_STATES = (_State.REASONING, _State.CONTENT)


class _MalformedError(Exception):
    """Internal: the block under way is not one."""


@attrs.define
class _Call:
    name: str
    raw_start: int  # index into the block's raw pieces
    fragments: list[str] = attrs.Factory(list)
    names: set[str] = attrs.Factory(set)
    raw: str = ""


@attrs.frozen
class _Parameter:
    name: str
    string: str | None  # the attribute as written
    plain: bool  # whether its tag had no marker


def piece_of(tokenizer: Tokenizer, token: int) -> bytes | Mark | None:
    """What to feed the parser for a sampled token; None for tokens that are never text."""
    special = tokenizer.special
    if token == special.think:
        return Mark.THINK
    if token == special.end_think:
        return Mark.END_THINK
    if token == special.dsml:
        return Mark.DSML
    return None if tokenizer.is_control(token) else tokenizer.token_bytes(token)


class OutputParser:
    """Feed it pieces of a sampled turn; it returns events.

    Text is held back only while it may begin a marker: at most two newlines and one unfinished tag.
    A block is held until it ends, because a client must never see half a call.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        policy: ToolPolicy,
        max_block_chars: int = 4 << 20,
    ) -> None:
        """Start at the beginning of a turn.

        Args:
          thinking: whether the prompt ended with the opening think marker.
          policy: what tool markup means in this turn.
          max_block_chars: a longer block is treated as text.

        Raises:
          ConfigError: `max_block_chars` is not positive.
        """
        if max_block_chars < 1:
            raise ConfigError(f"max_block_chars must be at least 1, got {max_block_chars}")
        self._policy = policy
        self._max_block_chars = max_block_chars
        self._decoder = _byte_decoder()
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._origin = self._state
        self._buffer = ""  # not yet consumed
        self._events: list[Event] = []
        self._attempts = 0
        self._finished = False
        self._n_calls = 0
        self._raw: list[str] = []  # everything of the block consumed so far
        self._raw_chars = 0
        self._calls: list[_Call] = []
        self._parameter = _Parameter("", None, plain=False)
        self._payload: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether a block ended the turn, or `finish` was called; later input is ignored."""
        return self._finished

    @property
    def n_calls(self) -> int:
        """Calls reported so far. Positive means that the turn ends for tool calls."""
        return self._n_calls

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning. After the end: it was never closed."""
        return self._state is _State.REASONING

    @property
    def in_block(self) -> bool:
        """Whether a block of calls is being held back."""
        return self._state not in _TEXT_STATES

    @property
    def in_structure(self) -> bool:
        """Whether the next token is markup rather than text or payload, so best sampled greedily.

        True between the tags of a block, inside a tag, and where a marker has begun.
        """
        if self._finished or self._policy is ToolPolicy.TEXT:
            return False
        if self._state in (_State.BLOCK, _State.INVOKE):
            return True
        return "DSML" in self._buffer[self._buffer.rfind("<") :] if self._buffer else False

    def feed(self, piece: bytes | Mark) -> list[Event]:
        """Take the next piece of output.

        Args:
          piece: decoded bytes of one or more tokens, cut anywhere, or a special token. A marker
            spelled in bytes means the same, except that `<think>` reopens reasoning only as a token
            and `</think>` is dropped from an answer only as a token.
        """
        if self._finished:
            return []
        if isinstance(piece, Mark):
            self._buffer += self._decoder.decode(b"", final=True)
            self._decoder.reset()
            self._take_mark(piece)
        else:
            self._buffer += self._decoder.decode(piece)
        self._advance()
        return self._taken()

    def finish(self) -> list[Event]:
        """End the turn: what was held comes out, and an unfinished block as text."""
        if self._finished:
            return []
        self._buffer += self._decoder.decode(b"", final=True)
        self._advance()
        while self.in_block:
            self._give_up()
            self._advance()
        self._emit(self._buffer)
        self._buffer = ""
        self._finished = True
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take_mark(self, mark: Mark) -> None:
        self._advance()
        if mark is Mark.DSML or self.in_block:
            self._buffer += mark.value
            return
        # The mark ends whatever marker the held text may have begun.
        self._emit(self._buffer)
        self._buffer = ""
        self._state = _State.REASONING if mark is Mark.THINK else _State.CONTENT

    def _advance(self) -> None:
        try:
            while not self._finished and self._step():
                pass
        except _MalformedError:
            self._give_up()
            self._advance()

    def _step(self) -> bool:
        """Consume one unit; False when more input is needed."""
        match self._state:
            case _State.REASONING | _State.CONTENT:
                return self._text_step()
            case _State.PAYLOAD:
                return self._payload_step()
            case _:
                return self._tag_step()

    # Text ---------------------------------------------------------------------------------------

    def _openings(self) -> tuple[str, ...]:
        """Markers that begin a block here."""
        if self._policy is ToolPolicy.TEXT or self._attempts == MAX_ATTEMPTS:
            return ()
        # Where no call was asked for, a tag without the marker is far likelier to be prose.
        return _OPENINGS_MARKED if self._policy is ToolPolicy.DROP else _OPENINGS

    def _text_step(self) -> bool:
        text = self._buffer
        openings = self._openings()
        markers = (*openings, _END_THINK) if self._state is _State.REASONING else openings
        found = min(((at, m) for m in markers if (at := text.find(m)) >= 0), default=None)
        if found is None:
            held = held_length(text, markers)
            if openings:
                held += _newlines_before(text, len(text) - held)
            self._emit(text[: len(text) - held])
            self._buffer = text[len(text) - held :]
            return False
        at, marker = found
        if marker == _END_THINK:
            self._emit(text[:at])
            self._buffer = text[at + len(marker) :]
            self._state = _State.CONTENT
            return True
        lead = _newlines_before(text, at)
        self._emit(text[: at - lead])
        self._buffer = text[at - lead :]
        self._origin = self._state
        self._state = _State.BLOCK
        self._raw, self._raw_chars, self._calls = [], 0, []
        self._consume(lead + len(marker))
        return True

    def _emit(self, text: str) -> None:
        if not text:
            return
        kind = Reasoning if self._state is _State.REASONING else Content
        text = text.translate(_SHOWN)
        last = self._events[-1] if self._events else None
        if isinstance(last, Reasoning | Content) and type(last) is kind:
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))

    # Blocks -------------------------------------------------------------------------------------

    def _consume(self, n: int) -> str:
        """Move `n` characters from the buffer to the block under way."""
        text, self._buffer = self._buffer[:n], self._buffer[n:]
        self._raw.append(text)
        self._raw_chars += n
        if self._raw_chars > self._max_block_chars:
            raise _MalformedError
        return text

    def _give_up(self) -> None:
        """Turn the block under way back into text, beginning with its opening marker."""
        opening, *rest = self._raw
        self._attempts += 1
        self._state = self._origin
        self._raw, self._calls, self._payload = [], [], []
        if self._policy is ToolPolicy.DROP:
            # Its tags must not reach the client, and where a broken block ends nobody can say: the
            # rest of the turn goes with it.
            self._buffer = ""
            self._finished = True
        else:
            self._emit(opening)
            self._buffer = "".join(rest) + self._buffer

    def _tag_step(self) -> bool:
        blank = len(self._buffer) - len(self._buffer.lstrip(_WHITESPACE))
        if blank:
            self._consume(blank)
        if not self._buffer:
            return False
        if not self._buffer.startswith("<"):
            raise _MalformedError
        end = _tag_end(self._buffer)
        if end is None and len(self._buffer) <= MAX_TAG_CHARS:
            return False
        if end is None or end > MAX_TAG_CHARS:
            raise _MalformedError
        match = _TAG.fullmatch(self._consume(end))
        if match is None:
            raise _MalformedError
        self._tag(match)
        return True

    def _tag(self, match: re.Match[str]) -> None:
        slash, marker, name, attributes = match.groups()
        pairs = _ATTRIBUTE.findall(attributes)
        given = {key: unescape_attribute(value.translate(_SHOWN)) for key, value in pairs}
        if len(given) < len(pairs):
            raise _MalformedError
        match self._state, slash + name:
            case _State.BLOCK, "invoke" if given.keys() == {"name"} and given["name"]:
                self._calls.append(_Call(given["name"], raw_start=len(self._raw) - 1))
                self._state = _State.INVOKE
            case _State.BLOCK, "/tool_calls" if self._calls and not given:
                self._end_block()
            case _State.INVOKE, "parameter" if (
                given.keys() <= {"name", "string"} and "name" in given
            ):
                self._parameter = _Parameter(
                    given["name"], given.get("string"), plain=marker is None
                )
                self._payload = []
                self._state = _State.PAYLOAD
            case _State.INVOKE, "/invoke" if not given:
                call = self._calls[-1]
                call.raw = "".join(self._raw[call.raw_start :])
                call.fragments.append("}" if call.fragments else "{}")
                self._state = _State.BLOCK
            case _:
                raise _MalformedError

    def _payload_step(self) -> bool:
        text = self._buffer
        closings = _CLOSINGS_PLAIN if self._parameter.plain else _CLOSINGS
        found = min(((at, c) for c in closings if (at := text.find(c)) >= 0), default=None)
        end = len(text) - held_length(text, closings) if found is None else found[0]
        if end:
            self._payload.append(self._consume(end))
        if found is None:
            return False
        self._consume(len(found[1]))
        self._end_parameter()
        self._state = _State.INVOKE
        return True

    def _end_parameter(self) -> None:
        call, parameter = self._calls[-1], self._parameter
        if parameter.name in call.names:
            raise _MalformedError
        call.names.add(parameter.name)
        text = "".join(self._payload).translate(_SHOWN)
        self._payload = []
        value: str | None
        match parameter.string:
            case "true":
                value = _string_value(text, plain=parameter.plain)
            case "false":
                value = _json_value(text)
            case None:
                value = _json_value(text) or _string_value(text, plain=parameter.plain)
            case _:
                value = None
        if value is None:
            raise _MalformedError
        key = json.dumps(parameter.name, ensure_ascii=False)
        call.fragments.append(f"{', ' if call.fragments else '{'}{key}: {value}")

    def _end_block(self) -> None:
        self._state = _State.CONTENT
        self._buffer = ""
        self._finished = True
        if self._policy is ToolPolicy.DROP:
            return
        for index, call in enumerate(self._calls):
            self._events.append(CallStart(index, call.name))
            self._events.extend(CallArguments(index, fragment) for fragment in call.fragments)
            arguments = "".join(call.fragments)
            self._events.append(CallEnd(index, call.name, arguments, _to_bytes(call.raw)))
        self._n_calls = len(self._calls)
        self._events.append(BlockEnd(_to_bytes("".join(self._raw)), self._n_calls))


def _byte_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")


def _newlines_before(text: str, end: int) -> int:
    """How many newlines, at most two, stand right before `end`: they belong to a block there."""
    n = 0
    while n < 2 and end - n > 0 and text[end - n - 1] == "\n":
        n += 1
    return n


def _tag_end(text: str) -> int | None:
    """Index behind the `>` that ends the tag at the start of `text`, outside of quotes."""
    quoted = False
    for index, character in enumerate(text[: MAX_TAG_CHARS + 1]):
        if character == '"':
            quoted = not quoted
        elif character == ">" and not quoted:
            return index + 1
    return None


def _string_value(text: str, *, plain: bool) -> str:
    return json.dumps(unescape_value(text, plain=plain), ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _json_value(text: str) -> str | None:
    """The JSON text without surrounding whitespace, or None if it is not JSON."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return text.strip(_WHITESPACE)
