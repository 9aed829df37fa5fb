"""`python -m fuzz run`: new inputs for a while, by Atheris where it is installed.

Without Atheris a loop here mutates the corpus, keeps what reaches new lines of `ds4`, and is
repeatable by its seed. Both leave a crasher in the target's corpus, where `replay` and the test
suite find it.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import attrs

from fuzz.mutation import Coverage, mutate, shrink
from fuzz.targets import DEFAULT_TIMEOUT_S, Escape, Target, attempt, load, select

__all__ = ["HELP", "Outcome", "add_arguments", "fuzz", "main"]

HELP: Final = "try new inputs; a crasher goes into the corpus and gives exit 1"
_SHRINK_TIMEOUT_S: Final = 2.0


@attrs.frozen
class Outcome:
    """What a run of the built-in loop found.

    Attributes:
      n_inputs: inputs tried, the corpus included.
      n_kept: inputs that reached new lines.
      n_lines: lines of `ds4` reached.
      escape: the first escape, shrunk; the run ends with it.
    """

    n_inputs: int
    n_kept: int
    n_lines: int
    escape: Escape | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all, one by one")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (%(default)s)")
    parser.add_argument(
        "--seed", type=int, help="of the mutations (default: a random one, printed)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        help="seconds after which one input counts as hanging (%(default)s)",
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "atheris", "builtin"),
        default="auto",
        help="auto: Atheris where it can be imported (%(default)s)",
    )


def fuzz(
    target: Target,
    *,
    seconds: float,
    seed: int,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    most_inputs: int | None = None,
) -> Outcome:
    """Mutate the target's corpus until time is up, `most_inputs` were tried, or one escapes."""
    rng = random.Random(seed)
    coverage = Coverage()
    pool: list[bytes] = []
    n_inputs = 0
    end = time.monotonic() + seconds
    waiting = [path.read_bytes() for path in target.inputs()] or [b""]
    waiting.reverse()
    while waiting or (time.monotonic() < end and (most_inputs is None or n_inputs < most_inputs)):
        known = bool(waiting)
        data = waiting.pop() if waiting else _next(target, rng, pool)
        with coverage:
            escape = attempt(target, data, timeout_s)
        n_inputs += 1
        if escape is not None:
            escape = _shrunk(target, escape, timeout_s)
            return Outcome(n_inputs, len(pool), coverage.n_lines, escape)
        if coverage.grew or known:
            pool.append(data)
    return Outcome(n_inputs, len(pool), coverage.n_lines, None)


def _next(target: Target, rng: random.Random, pool: list[bytes]) -> bytes:
    data = min(rng.choice(pool), rng.choice(pool), key=len)  # short inputs are quick
    if target.mutate is not None and rng.random() < 0.7:
        return target.mutate(data, rng)
    return mutate(data, rng, pool)


def _shrunk(target: Target, escape: Escape, timeout_s: float) -> Escape:
    """The same failure with fewer bytes; a hang stays as it is, because each try would hang."""
    kind = type(escape.error)
    if not issubclass(kind, Exception):
        return escape
    last = escape

    def still_fails(data: bytes) -> bool:
        nonlocal last
        found = attempt(target, data, min(timeout_s, _SHRINK_TIMEOUT_S))
        if found is None or type(found.error) is not kind:
            return False
        last = found
        return True

    shrink(escape.data, still_fails)
    return last


def _run_builtin(target: Target, args: argparse.Namespace, seed: int) -> int:
    start = time.monotonic()
    outcome = fuzz(target, seconds=args.seconds, seed=seed, timeout_s=args.timeout)
    elapsed = time.monotonic() - start
    print(
        f"{target.name}: {outcome.n_inputs} inputs in {elapsed:.0f} s, {outcome.n_kept} kept, "
        f"{outcome.n_lines} lines reached, seed {seed}"
    )
    if outcome.escape is None:
        return 0
    path = target.record(outcome.escape.data)
    print(outcome.escape.text(), file=sys.stderr)
    print(f"{target.name}: crasher written to {path}", file=sys.stderr)
    return 1


def _run_atheris(target: Target, args: argparse.Namespace, seed: int) -> int:
    """Atheris ends its process when it is done, so it gets one of its own."""
    with tempfile.TemporaryDirectory(prefix="ds4-fuzz-") as grown:
        folders = [grown, str(target.corpus)] if target.corpus.is_dir() else [grown]
        target.corpus.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "fuzz.atheris_child", target.name, *folders]
        command += [
            f"-max_total_time={max(int(args.seconds), 1)}",
            f"-timeout={max(int(args.timeout), 1)}",
            f"-seed={seed % (1 << 31) or 1}",
            f"-artifact_prefix={target.corpus}/",
            "-print_final_stats=1",
        ]
        root = Path(__file__).parents[1]
        status = subprocess.run(command, check=False, cwd=root).returncode
    print(f"{target.name}: Atheris ended with status {status}, seed {seed}")
    return 1 if status else 0


def main(args: argparse.Namespace) -> int:
    """Fuzz each target in turn; returns the exit status."""
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 31)
    atheris = args.engine == "atheris" or (
        args.engine == "auto" and importlib.util.find_spec("atheris") is not None
    )
    run = _run_atheris if atheris else _run_builtin
    failed = [name for name in select(args.targets) if run(load(name), args, seed)]
    if failed:
        print(f"escapes in {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
