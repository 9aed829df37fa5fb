"""Decode rate of several sessions together against one alone, on this machine's CPU.

usage: python benchmarks/batch_decode.py [-m FILE] [--sessions N] [--rounds N] [--json OUT]

Both run in one process on one executor, greedy, in rounds that alternate: a round is some steps of
one session, then as many of all sessions in one batch. The ratio is that of tokens per second, and
is taken within each round, so that what else the machine does falls on both sides; the median over
rounds is reported. Every session's tokens must be those it has when it runs alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import ds4
from ds4.cpu.executor import CpuExecutor
from ds4.gguf import GGUFFile
from ds4.steps import Chunk, Decode, StepPlan, Want

N_PROMPT = 24
LONE = 10**6
"""Added to a session's number for its twin that runs alone."""


class Streams:
    """Greedy streams over one executor.

    Args:
      executor: of the model.
      sessions: their ids.
      n_ctx: context of each.
    """

    def __init__(self, executor: CpuExecutor, sessions: list[int], n_ctx: int) -> None:
        self.executor = executor
        self.tokens: dict[int, list[int]] = {}
        for session in sessions:
            executor.open_session(session, n_ctx)
            seed = session % LONE
            ids = [(37 * seed + 11 * i) % 400 + 3 for i in range(N_PROMPT)]
            chunk = Chunk(session=session, start=0, tokens=ids, want=Want.TOKEN)
            row = executor.step(StepPlan(step=1, prefill=(chunk,))).rows[0]
            self.tokens[session] = [int(row.token)]

    def step(self) -> None:
        """One token for every session, in one batch."""
        plan = StepPlan(
            step=1,
            decode=tuple(
                Decode(
                    session=session,
                    position=self.executor.session_length(session),
                    token=tokens[-1],
                )
                for session, tokens in self.tokens.items()
            ),
        )
        for row in self.executor.step(plan).rows:
            self.tokens[row.session].append(int(row.token))

    def timed(self, n: int) -> float:
        """Seconds of `n` steps."""
        begin = time.perf_counter()
        for _ in range(n):
            self.step()
        return time.perf_counter() - begin


def measure(path: str, threads: int, n_sessions: int, rounds: int, n_steps: int) -> dict:
    """Rates of each round, and whether batching changed any token."""
    n_ctx = N_PROMPT + (rounds + 1) * n_steps + 2
    executor = CpuExecutor(GGUFFile.open(path), threads=threads)
    try:
        together = Streams(executor, list(range(1, n_sessions + 1)), n_ctx)
        alone = [Streams(executor, [LONE + i], n_ctx) for i in range(1, n_sessions + 1)]
        for streams in (together, *alone):
            streams.timed(n_steps)  # compile, or load what is compiled
        one, many = [], []
        for number in range(rounds):
            # Whoever goes first changes from round to round.
            pair = [(one, alone[0], 1), (many, together, n_sessions)]
            for rates, streams, n in pair if number % 2 else reversed(pair):
                rates.append(n * n_steps / streams.timed(n_steps))
        for streams in alone[1:]:
            streams.timed(rounds * n_steps)
        different = [
            i
            for i, streams in enumerate(alone, 1)
            if streams.tokens[LONE + i] != together.tokens[i]
        ]
    finally:
        executor.close()
    ratios = sorted(b / a for a, b in zip(one, many, strict=True))
    return {
        "sessions": n_sessions,
        "rounds": rounds,
        "steps_per_round": n_steps,
        "alone_tokens_per_s": median(one),
        "together_tokens_per_s": median(many),
        "ratio_median": median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "sessions_with_other_tokens": different,
    }


def commit() -> str:
    """Of this checkout; `unknown` outside of one."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Measure and print; fails when batching changed a token."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default=str(ds4.bundled_model()))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json")
    args = parser.parse_args()
    load = os.getloadavg()
    found = measure(args.model, args.threads, args.sessions, args.rounds, args.steps)
    print(f"alone          {found['alone_tokens_per_s']:8.1f} tokens/s")
    print(f"{args.sessions} together     {found['together_tokens_per_s']:8.1f} tokens/s")
    print(
        f"ratio          {found['ratio_median']:8.2f}   "
        f"({found['ratio_min']:.2f} to {found['ratio_max']:.2f} over {args.rounds} rounds)"
    )
    if found["sessions_with_other_tokens"]:
        print(f"other tokens in sessions {found['sessions_with_other_tokens']}")
    if args.json:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "commit": commit(),
            "machine": {
                "cpu": platform.machine(),
                "cores": len(os.sched_getaffinity(0)),
                "load_before": load,
            },
            "threads": args.threads,
            "model": os.path.basename(args.model),
            **found,
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if found["sessions_with_other_tokens"] else 0


if __name__ == "__main__":
    sys.exit(main())
