"""Any model output gives the same events however it is cut, and no call that is not whole.

Invariant: for every policy, thinking state and block limit, the parser (1) never raises, (2) gives
the same merged events for the whole input, byte by byte and in uneven pieces, (3) shows nothing
that was not written: texts and sampled blocks spell a prefix of the input, all of it unless a block
ended the turn, (4) reports only calls whose arguments are a JSON object, ended by one `BlockEnd`,
(5) shows no block where calls are forbidden, and (6) stop strings end the text at the same place
for every cut, as their definition says.

The first byte of an input chooses policy, thinking and limit; the rest is the output.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Final

from ds4.model.toolcall import (
    BlockEnd,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    OutputParser,
    Reasoning,
    StopMatcher,
    ToolPolicy,
)

__all__ = ["mutate", "test_one_input"]

POLICIES: Final = tuple(ToolPolicy)
LIMITS: Final = (1 << 20, 64, 300, 1)
STOPS: Final = ("</", "END", "\n\n\n", "DSML｜", "ND", "\ufffd\ufffd")
PIECE_LENGTHS: Final = (1, 5, 2, 13, 3)

_GRAMMAR_TEXT: Final = (
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="f">',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="p" string="true">',
    '<｜DSML｜parameter name="q" string="false">',
    "</｜DSML｜parameter>",
    "<DSML｜tool_calls>",
    "</DSML｜parameter>",
    "<tool_calls>",
    "</tool_calls>",
    '<invoke name="g">',
    "</invoke>",
    '<parameter name="r">',
    "</parameter>",
    "&lt;/｜DSML｜parameter>",
    "&amp;lt;/｜DSML｜parameter>",
    "</think>",
    "<think>",
    "｜DSML｜",
    "\n",
    "\n\n",
    " ",
    '"',
    "<",
    ">",
    "{}",
    "[1, 2]",
    "NaN",
    "END",
    "é🚀",
)
GRAMMAR: Final = (*(text.encode() for text in _GRAMMAR_TEXT), b"\xff", b"\xe2\x82")


def _merged(events: Iterable[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        else:
            out.append(event)
    return out


def _uneven(data: bytes) -> Iterator[bytes]:
    at, turn = 0, 0
    while at < len(data):
        length = PIECE_LENGTHS[turn % len(PIECE_LENGTHS)]
        yield data[at : at + length]
        at, turn = at + length, turn + 1


def _parse(
    pieces: Iterable[bytes], *, thinking: bool, policy: ToolPolicy, limit: int
) -> list[Event]:
    parser = OutputParser(thinking=thinking, policy=policy, max_block_chars=limit)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    assert parser.finished
    assert parser.feed(b"more") == parser.finish() == []
    assert parser.n_calls == sum(isinstance(event, CallEnd) for event in events)
    return _merged(events)


def _shown(text: str) -> str:
    return "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in text)


def _check_text(events: list[Event], output: bytes, *, thinking: bool, policy: ToolPolicy) -> None:
    written = output.decode("utf-8", errors="surrogateescape")
    texts = [event for event in events if isinstance(event, Content | Reasoning)]
    kinds = [type(event) for event in texts]
    assert kinds in ([], [Reasoning], [Content], [Reasoning, Content]), kinds
    reasoning = "".join(event.text for event in texts if isinstance(event, Reasoning))
    content = "".join(event.text for event in texts if isinstance(event, Content))
    assert thinking or not reasoning
    if policy is ToolPolicy.DROP:
        for text in (reasoning, content):
            assert "<｜DSML｜tool_calls>" not in text, "markup was shown where calls are forbidden"
        return
    raw = b"".join(event.raw for event in events if isinstance(event, BlockEnd))
    assert raw in output
    block = _shown(raw.decode("utf-8", errors="surrogateescape"))
    closings = ("", "</think>") if thinking else ("",)
    spelled = [reasoning + closing + content + block for closing in closings]
    target = _shown(written)
    assert any(target.startswith(s) if raw else target == s for s in spelled)


def _check_calls(events: list[Event], policy: ToolPolicy) -> None:
    fragments: list[str] = []
    n_calls = 0
    for event in events:
        match event:
            case CallStart(index, name):
                assert policy is ToolPolicy.PARSE
                assert index == n_calls
                assert name
                fragments = []
            case CallArguments(index, fragment):
                assert index == n_calls
                fragments.append(fragment)
            case CallEnd(index, _, arguments, _):
                assert index == n_calls
                assert "".join(fragments) == arguments
                assert isinstance(json.loads(arguments), dict)
                n_calls += 1
            case BlockEnd(_, n):
                assert event is events[-1]
                assert n == n_calls > 0
    assert n_calls == 0 or isinstance(events[-1], BlockEnd)


def _stopped(pieces: Iterable[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(STOPS)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.matched


def _check_stops(text: str) -> None:
    hits = [(at + len(s), at, s) for s in STOPS if (at := text.find(s)) >= 0]
    _, at, stop = min(hits) if hits else (0, len(text), None)
    assert _stopped([text]) == _stopped(text) == (text[:at], stop)


def test_one_input(data: bytes) -> None:
    """Parse `data` in three cuts and check what the module promises."""
    choice, output = (data[0] if data else 0), data[1:]
    policy = POLICIES[choice % 3]
    thinking = bool(choice & 0x40)
    limit = LIMITS[(choice >> 4) & 3]
    events = _parse([output], thinking=thinking, policy=policy, limit=limit)
    for pieces in ([output[i : i + 1] for i in range(len(output))], list(_uneven(output))):
        assert _parse(pieces, thinking=thinking, policy=policy, limit=limit) == events
    _check_text(events, output, thinking=thinking, policy=policy)
    _check_calls(events, policy)
    _check_stops(_shown(output.decode("utf-8", errors="surrogateescape")))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Insert, remove, repeat or move pieces of the grammar."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(1, len(changed) + 1)
        end = min(len(changed), at + rng.choice((1, 2, 4, 16, 64)))
        match rng.randrange(6):
            case 0 | 1 | 2:
                changed[at:at] = rng.choice(GRAMMAR)
            case 3:
                del changed[at:end]
            case 4:
                changed[at:at] = changed[at:end] * rng.randint(1, 3)
            case _:
                changed[0] = rng.randrange(256)
    return bytes(changed)
