"""`python -m fuzz replay`: every corpus file through its target."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Final

from fuzz.targets import Escape, Target, attempt, load, select

__all__ = ["HELP", "add_arguments", "main", "replay"]

HELP: Final = "run every corpus file through its target; exit 1 if one escapes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all")


def replay(target: Target) -> list[Escape]:
    """Escapes among the target's corpus."""
    outcomes = (attempt(target, path.read_bytes()) for path in target.inputs())
    return [escape for escape in outcomes if escape is not None]


def main(args: argparse.Namespace) -> int:
    """Replay and report; returns the exit status."""
    n_inputs = n_escapes = 0
    for name in select(args.targets):
        target = load(name)
        start = time.perf_counter()
        escapes = replay(target)
        elapsed = time.perf_counter() - start
        count = len(target.inputs())
        print(f"{name}: {count} inputs, {len(escapes)} escapes, {elapsed:.2f} s")
        for escape in escapes:
            print(escape.text(), file=sys.stderr)
        n_inputs += count
        n_escapes += len(escapes)
    print(f"replayed {n_inputs} inputs, {n_escapes} escapes")
    return 1 if n_escapes else 0
