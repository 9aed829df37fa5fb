"""A parser with help by topic, whose errors are values, and the types of option values.

Invariant: every flag that help prints is one that the parser accepts, because both come from the
same table; and parsing neither writes nor exits: it raises `UsageError` or `HelpRequested`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from ds4.errors import ConfigError

__all__ = [
    "TOPICS",
    "HelpRequested",
    "Parser",
    "UsageError",
    "file_name",
    "integer",
    "number",
    "text",
]

TOPICS = (
    "runtime",
    "prompt",
    "sampling",
    "thinking",
    "diagnostics",
    "commands",
    "distributed",
    "api",
    "kv-cache",
    "sessions",
    "tools",
    "benchmark",
    "evaluation",
    "all",
)
"""Topics that every program's `--help` accepts; a program says so where it has nothing on one."""


class UsageError(ConfigError):
    """The command line is wrong. The text names the option and the value."""


class HelpRequested(Exception):  # noqa: N818  # a request, not an error
    """`--help` was given.

    Attributes:
      topic: what about; None for the short help.
    """

    def __init__(self, topic: str | None) -> None:
        super().__init__(topic)
        self.topic = topic


class _Help(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        raise HelpRequested(values if isinstance(values, str) else None)


class Parser(argparse.ArgumentParser):
    """Parser of one program.

    Args:
      program: its name.
      description: one sentence.
      short: topics that plain `--help` shows.
    """

    def __init__(self, program: str, description: str, *, short: Sequence[str]) -> None:
        super().__init__(prog=program, description=description, add_help=False, allow_abbrev=False)
        self._short = tuple(short)
        self._topics: dict[str, list[argparse._ArgumentGroup]] = {}
        self._texts: dict[str, str] = {}
        self._help: argparse.Action | None = None

    def topic(self, topic: str, title: str) -> argparse._ArgumentGroup:
        """Open a titled group of options under a help topic."""
        group = self.add_argument_group(title)
        self._topics.setdefault(topic, []).append(group)
        return group

    def topic_text(self, topic: str, text: str) -> None:
        """Add prose to a help topic; it is shown as it is."""
        self._texts[topic] = text

    def add_help_option(self, group: argparse._ArgumentGroup) -> None:
        """Add `--help [TOPIC]`."""
        self._help = group.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            metavar="TOPIC",
            choices=TOPICS,
        )

    def _filled(self) -> list[str]:
        """Topics on which this program has something."""
        return [
            name for name in TOPICS if name == "all" or name in self._topics or name in self._texts
        ]

    def error(self, message: str) -> NoReturn:
        """Raise instead of writing and exiting."""
        raise UsageError(message)

    def help_text(self, topic: str | None) -> str:
        """Help on a topic, on `all`, or in short (None)."""
        if self._help is not None:
            self._help.help = f"show help and exit; TOPIC is one of {', '.join(self._filled())}"
        if topic is None:
            wanted = list(self._short)
        elif topic == "all":
            wanted = self._filled()[:-1]
        else:
            wanted = [topic]
        parts = [f"usage: {self.prog} [options]"]
        if topic is None or topic == "all":
            parts.append(str(self.description))
        for name in wanted:
            parts.extend(self._group_text(group) for group in self._topics.get(name, ()))
            if name in self._texts:
                parts.append(self._texts[name])
            if name not in self._topics and name not in self._texts:
                parts.append(f"{self.prog} has nothing on the topic {name}.")
        if topic is None:
            rest = ", ".join(name for name in self._filled() if name not in self._short)
            parts.append(f"More with {self.prog} --help TOPIC: {rest}.")
        return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"

    def _group_text(self, group: argparse._ArgumentGroup) -> str:
        formatter = self._get_formatter()
        formatter.start_section(group.title)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
        return formatter.format_help()


_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Type of a whole number from `low` to `high` (None: no upper end)."""
    accepted = f"a whole number >= {low}" if high is None else f"a whole number, {low} to {high}"

    def parse(value: str) -> int:
        if _INTEGER.fullmatch(value):
            n = int(value)
            if n >= low and (high is None or n <= high):
                return n
        raise argparse.ArgumentTypeError(f"expected {accepted}, got {value!r}")

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """Type of a finite number from `low` to `high`."""

    def parse(value: str) -> float:
        try:
            x = float(value)
        except ValueError:
            x = math.nan
        if low <= x <= high:  # false for a NaN
            return x
        raise argparse.ArgumentTypeError(f"expected a number, {low:g} to {high:g}, got {value!r}")

    return parse


def text(value: str) -> str:
    """Type of text. The shell passes bytes; whatever the locale makes of them, they are UTF-8."""
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeError:
        raise argparse.ArgumentTypeError(f"expected UTF-8 text, got {value!a}") from None


def file_name(value: str) -> str:
    """Type of a path."""
    if not value:
        raise argparse.ArgumentTypeError(f"expected a path, got {value!r}")
    return value
