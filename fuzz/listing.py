"""`python -m fuzz list`: the targets, their invariants and the size of their corpora."""

from __future__ import annotations

import argparse
import ast
from typing import Final

from fuzz.targets import FOLDER, Target, names

__all__ = ["HELP", "add_arguments", "main"]

HELP: Final = "list the targets"


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """This command has no options."""


def main(_args: argparse.Namespace) -> int:
    """Print one line for each target; nothing is imported."""
    for name in names():
        source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        doc = ast.get_docstring(ast.parse(source)) or ""
        first = " ".join(doc.split("\n\n", 1)[0].split())
        count = len(Target(name, lambda _: None, FOLDER / "corpus" / name).inputs())
        print(f"{name}: {count} inputs: {first}")
    return 0
