"""Earlier turns of a conversation, written by hand in a text file.

A line that starts with `USER:` or `ASSISTANT:` opens a turn; the rest of that line and the lines up
to the next marker are its text. Turns alternate, the first is the user's, the last the assistant's.
"""

from __future__ import annotations

from ds4.frontends.files import FileError
from ds4.model.chat import Message, Role

__all__ = ["parse_prefix"]

_MARKERS: dict[str, Role] = {"USER:": "user", "ASSISTANT:": "assistant"}


def parse_prefix(option: str, path: str, text: str) -> list[Message]:
    """Messages of a prefix file.

    One space after a marker and the line breaks at the end of a turn do not belong to its text.

    Raises:
      FileError: text before the first marker, turns that do not alternate, or no complete pair;
        names the line.
    """
    turns: list[tuple[Role, list[str]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        marker = next((m for m in _MARKERS if line.startswith(m)), None)
        if marker is None:
            if turns:
                turns[-1][1].append(line)
            elif line.strip():
                raise FileError(option, path, f"line {number}: expected USER: first")
            continue
        role = _MARKERS[marker]
        expected: Role = "assistant" if turns and turns[-1][0] == "user" else "user"
        if role != expected:
            wanted = expected.upper()
            raise FileError(option, path, f"line {number}: expected {wanted}:, found {marker}")
        turns.append((role, [line.removeprefix(marker).removeprefix(" ")]))
    if not turns:
        raise FileError(option, path, "expected USER: and ASSISTANT: turns, found none")
    if turns[-1][0] != "assistant":
        raise FileError(option, path, "the last turn must be ASSISTANT:")
    return [Message(role=role, content="\n".join(lines).rstrip("\n")) for role, lines in turns]
