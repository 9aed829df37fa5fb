"""`python -m fuzz COMMAND`. A command is a module with `HELP`, `add_arguments` and `main`."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from typing import Final, Protocol

from ds4.errors import ConfigError
from fuzz import listing, live, replay, run


class Command(Protocol):
    """What a module must offer to be a command."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Add the command's options."""

    def main(self, args: argparse.Namespace, /) -> int:
        """Run it; returns the exit status."""


COMMANDS: Final[dict[str, Command]] = {
    "list": listing,
    "live": live,
    "replay": replay,
    "run": run,
}


def main(argv: list[str] | None = None) -> int:
    """Dispatch; status 2 for a wrong option, otherwise the command's own."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Fuzz ds4.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP))
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command].main(args)
    except ConfigError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
