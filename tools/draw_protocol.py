"""Writes the generated parts of docs/PROTOCOL.md from the tables that the code runs.

    python tools/draw_protocol.py            # rewrite the document's generated parts
    python tools/draw_protocol.py --check    # exit 1 if they are out of date

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from ds4.protocol import fields as f
from ds4.protocol import steps_wire
from ds4.protocol.identity import Geometry
from ds4.protocol.messages import MESSAGES, Message, Role
from ds4.protocol.state import ROWS, TABLE, Side, State, legal_now

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "PROTOCOL.md"

SETUP = (
    State.CHALLENGE, State.CHALLENGED, State.COUNTERED, State.PROVEN, State.HELLO, State.GREETED,
    State.COMPARING, State.APPROVED, State.AGREED, State.CONFIGURING, State.CONFIGURED,
    State.LOADING, State.LOADED, State.VOTING, State.VOTED, State.OUTVOTED, State.BOOTSTRAP,
    State.WARMING, State.READY,
)  # fmt: skip
INTERRUPTING = {"stop", "fail.sticky", "ack.bad", "refuse"}
ARROW = {Role.LEADER: "L", Role.WORKER: "W"}


def _edges(*, setup: bool) -> list[tuple[State, State, str]]:
    """State changes, with all labels that cause each."""
    causes: dict[tuple[State, State], list[str]] = {}
    for row in ROWS:
        if row.target is None or row.side is not Side.BOTH:
            continue
        for state in row.states:
            for label in row.labels:
                ending = label in INTERRUPTING or label == "bye"
                if state is row.target or ending == setup:
                    continue
                who = "".join(ARROW[sender] for sender in row.sender)
                causes.setdefault((state, row.target), []).append(f"{who} {label}")
    return [(a, b, ", ".join(dict.fromkeys(labels))) for (a, b), labels in causes.items()]


def _diagram(edges: list[tuple[State, State, str]], starts: tuple[State, ...]) -> str:
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {state.value}" for state in starts]
    lines += [f"    {a.value} --> {b.value}: {label}" for a, b, label in edges]
    return "\n".join([*lines, "```"])


def setup_diagram() -> str:
    """The conversation without interruptions."""
    return _diagram(_edges(setup=True), (State.CHALLENGE, State.HELLO))


def ending_diagram() -> str:
    """How a conversation ends. States that end alike are drawn as one."""
    groups: dict[tuple[tuple[State, str], ...], list[State]] = {}
    for state in State:
        moves = tuple((b, label) for a, b, label in _edges(setup=False) if a is state)
        if moves:
            groups.setdefault(moves, []).append(state)
    lines = ["```mermaid", "stateDiagram-v2"]
    for index, (moves, states) in enumerate(groups.items()):
        name = states[0].value if len(states) == 1 else f"group{index}"
        if len(states) > 1:
            lines.append(f'    state "{", ".join(s.value for s in states)}" as {name}')
        lines += [f"    {name} --> {target.value}: {label}" for target, label in moves]
    return "\n".join([*lines, "```"])


def legality() -> str:
    """For each state, what each side may send, and what it must still accept."""
    lines = [
        "| State | Leader may send | Worker may send | Accepted late and dropped or delivered |",
        "|---|---|---|---|",
    ]
    for state in State:
        sends = [", ".join(legal_now(role, state, role)) or "-" for role in Role]
        late = []
        for sender in Role:
            extra = set(legal_now(sender.peer, state, sender)) - set(
                legal_now(sender, state, sender)
            )
            dropped = all(
                move.drop for key, move in TABLE.items()
                if key.state is state and key.sender is sender and key.label in extra
            )  # fmt: skip
            if extra:
                verb = "dropped" if dropped else "delivered or dropped"
                late.append(f"from the {sender.name.lower()}: {len(extra)} kinds, {verb}")
        lines.append(f"| {state.value} | {sends[0]} | {sends[1]} | {'; '.join(late) or '-'} |")
    return "\n".join(lines)


def _kind(field: f.Field[Any]) -> str:
    match field:
        case f.Int():
            return {2**64 - 1: "u64", 2**32 - 1: "u32", 2**16 - 1: "u16"}.get(
                field.high if not field.low else -1, f"{field.low}..{field.high}"
            )
        case f.Choice():
            return " / ".join(map(str, field.accepted))
        case f.Bool():
            return "bool"
        case f.Float():
            return "float64 >= 0"
        case f.Text():
            return f"text <= {field.max_bytes} B"
        case f.Octets() if field.low == field.high:
            return f"bytes[{field.low}]"
        case f.Octets():
            return f"bytes[{field.low}..{field.high}]"
        case f.Pair():
            return "[" + ", ".join(_kind(part) for part in field.parts) + "]"
        case f.ListOf():
            return f"list of {_kind(field.item)}, <= {field.high}"
        case f.Record():
            return field.cls.__name__.lower()
        case steps_wire.PlanField():
            return "plan"
        case steps_wire.RowsField():
            return "list of row"
    raise AssertionError(f"no name for {field}")


def _direction(cls: type[Message]) -> str:
    base = {"nccl_vote": "vote"}.get(cls.NAME, cls.NAME)
    senders = {
        key.sender
        for key in TABLE
        if key.role is key.sender and key.label.partition(".")[0] == base
    }
    return "both" if len(senders) == 2 else ("L to W" if Role.LEADER in senders else "W to L")


def messages() -> str:
    """Every message with its tag, direction and fields."""
    lines = ["| Tag | Message | Direction | Fields after `tag, n, e` |", "|---|---|---|---|"]
    for cls in MESSAGES:
        fields = "; ".join(
            f"`{name}` {_kind(field)}" + (f" (since minor {since})" if since else "")
            for name, field, since in f.fields_of(cls)
        )
        lines.append(f"| {cls.TAG} | `{cls.NAME}` | {_direction(cls)} | {fields or 'none'} |")
    return "\n".join(lines)


def geometry() -> str:
    """The fields of a geometry."""
    lines = ["| Field | Type | Compared | Set by |", "|---|---|---|---|"]
    for attribute in attrs.fields(Geometry):
        assert isinstance(attribute.validator, f.Field)
        compared = "warns" if attribute.metadata.get("warn_only") else "equal"
        lines.append(
            f"| `{attribute.name}` | {_kind(attribute.validator)} | {compared} "
            f"| {attribute.metadata['flag']} |"
        )
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "setup diagram": setup_diagram,
    "ending diagram": ending_diagram,
    "legality": legality,
    "messages": messages,
    "geometry": geometry,
}


def rewrite(text: str) -> str:
    """The document with its generated parts made new.

    Raises:
      ValueError: a part has no place in the document.
    """
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"the document needs one place for {name!r}")
        body = make()
        text = pattern.sub(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
    return text


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Generate parts of docs/PROTOCOL.md.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    text = DOCUMENT.read_text()
    new = rewrite(text)
    if args.check:
        if text != new:
            print(f"{DOCUMENT}: out of date; run python tools/draw_protocol.py", file=sys.stderr)
        return int(text != new)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
