"""Finds the fuzz targets and runs one input through one of them.

A target is a module `fuzz/fuzz_*.py` with `test_one_input(data: bytes) -> None`, which returns for
every input that its invariant allows and raises for every other. It may also offer
`mutate(data: bytes, rng: random.Random) -> bytes`, which knows the structure of its inputs.
Its inputs of record are the files of `fuzz/corpus/<name>/`.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import attrs

from ds4.errors import ConfigError

__all__ = ["Escape", "Mutator", "Target", "attempt", "load", "names", "select"]

FOLDER: Final = Path(__file__).parent
# Arbitrary, and far above what any input should take; `run --timeout` sets another.
DEFAULT_TIMEOUT_S: Final = 30.0

Mutator = Callable[[bytes, random.Random], bytes]


class HangError(BaseException):
    """An input took too long. Not an `Exception`, so that no target can swallow it."""


@attrs.frozen
class Target:
    """One fuzz target.

    Attributes:
      name: module name, `fuzz_gguf`.
      test_one_input: raises when an input breaks the invariant.
      corpus: folder of its inputs of record; need not exist.
      mutate: structure-aware mutator, if the target has one.
    """

    name: str
    test_one_input: Callable[[bytes], object]
    corpus: Path
    mutate: Mutator | None = None

    def inputs(self) -> list[Path]:
        """Corpus files in a fixed order."""
        if not self.corpus.is_dir():
            return []
        return sorted(p for p in self.corpus.iterdir() if p.is_file() and p.name[0] != ".")

    def record(self, data: bytes) -> Path:
        """Add an input to the corpus; its name is its hash, so a second find is no second file."""
        self.corpus.mkdir(parents=True, exist_ok=True)
        path = self.corpus / f"crash-{hashlib.sha256(data).hexdigest()[:16]}"
        path.write_bytes(data)
        return path


@attrs.frozen
class Escape:
    """An input that broke a target's invariant."""

    target: str
    data: bytes
    error: BaseException

    def text(self) -> str:
        """Traceback, as for an uncaught exception."""
        return "".join(traceback.format_exception(self.error))


def names() -> list[str]:
    """Names of all targets, sorted."""
    return sorted(path.stem for path in FOLDER.glob("fuzz_*.py"))


def load(name: str) -> Target:
    """Import one target.

    Raises:
      ConfigError: there is no such target.
      TypeError: the module is not a target.
    """
    if name not in names():
        raise ConfigError(f"no fuzz target {name!r}; there are: {', '.join(names())}")
    module = importlib.import_module(f"fuzz.{name}")
    function = getattr(module, "test_one_input", None)
    if not callable(function):
        raise TypeError(f"fuzz.{name} has no test_one_input(data: bytes)")
    return Target(name, function, FOLDER / "corpus" / name, getattr(module, "mutate", None))


def select(wanted: list[str]) -> list[str]:
    """Full names of the wanted targets, `gguf` or `fuzz_gguf`; all of them for an empty list.

    Raises:
      ConfigError: there is no such target.
    """
    known = names()
    chosen = [name if name.startswith("fuzz_") else f"fuzz_{name}" for name in wanted]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"no fuzz target {name!r}; there are: {', '.join(known)}")
    return chosen or known


@contextmanager
def _deadline(timeout_s: float) -> Iterator[None]:
    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise HangError(f"no end after {timeout_s:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def attempt(target: Target, data: bytes, timeout_s: float = DEFAULT_TIMEOUT_S) -> Escape | None:
    """Run one input; whatever it raises, except an interrupt from the keyboard, is an escape.

    Must be called from the main thread, where the timer's signal arrives.
    """
    try:
        with _deadline(timeout_s):
            target.test_one_input(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - finding any exception at all is the purpose
        return Escape(target.name, data, error)
    return None
