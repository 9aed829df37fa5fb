"""Interactive commands: what a line of the user's means. Pure; `repl` carries them out."""

from __future__ import annotations

import re

import attrs

__all__ = ["COMMANDS", "COMMANDS_HELP", "Command", "UnknownCommand", "parse_line"]

COMMANDS: dict[str, tuple[str, str]] = {
    "/help": ("", "list the commands"),
    "/status": ("", "model, context used, mode, rates, ranks"),
    "/think": ("", "reason before answering, from the next turn on"),
    "/think-max": ("", "reason as hard as the model can"),
    "/nothink": ("", "answer at once"),
    "/ctx": ("N", "start again with a context of N tokens"),
    "/read": ("FILE", "send the text of a file as the next turn"),
    "/quit": ("", "leave; also /exit and Ctrl+D"),
    "/exit": ("", "leave"),
}
"""Name to (argument, meaning)."""

COMMANDS_HELP = "\n".join(
    [
        "Commands of the interactive mode:",
        *(f"  {f'{name} {argument}':<14}  {what}" for name, (argument, what) in COMMANDS.items()),
        "",
        "Enter sends; Alt+Enter starts a new line; a paste of several lines is one turn.",
        "Ctrl+C stops an answer and keeps what was written. A turn that should begin with a slash",
        "is written with a space before it.",
    ]
)

_COMMAND = re.compile(r"/([A-Za-z][A-Za-z-]*)(?:[ \t]+(.*))?")


class UnknownCommand(Exception):  # noqa: N818  # says what happened, shown as a hint
    """A line that begins with a slash and is no command, or a command with a wrong argument."""


@attrs.frozen
class Command:
    """A command and its argument ("" where it takes none)."""

    name: str
    argument: str


def parse_line(line: str) -> Command | str | None:
    """What the user entered.

    Returns:
      A command, the text of a turn, or None for nothing at all. A slash opens a command only in the
      first column of an entry of one line.

    Raises:
      UnknownCommand: see there; the text is the hint to show.
    """
    if not line.strip():
        return None
    if not line.startswith("/") or "\n" in line:
        return line.removeprefix(" ") if line.startswith(" /") else line
    match = _COMMAND.fullmatch(line.rstrip())
    name = f"/{match[1].lower()}" if match else line.split()[0]
    if match is None or name not in COMMANDS:
        raise UnknownCommand(f"unknown command {name}; /help lists the commands")
    argument = (match[2] or "").strip()
    wanted = COMMANDS[name][0]
    if bool(argument) != bool(wanted):
        problem = f"needs {wanted}" if wanted else f"takes no argument, got {argument!r}"
        raise UnknownCommand(f"{name} {problem}")
    return Command(name, argument)
