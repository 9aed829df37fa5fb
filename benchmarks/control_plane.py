"""Time of one step from the head to N rank processes and back, with nothing computed.

usage: python benchmarks/control_plane.py [--worlds 1,2,4] [--steps N] [--json OUT]

Head, frames, digests, device threads and loopback TCP are the real ones, and every rank is a
process; only the executor does nothing. A step decodes one token of one session, or of eight. What
is timed is `World.step`, in the head's own loop.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import trio

from ds4.steps import Decode, RowResult, StepPlan, StepResult
from ds4.world.device_thread import DeviceThread
from ds4.world.handle import World
from ds4.world.head import Head
from ds4.world.link import tune
from ds4.world.rank_actor import RankActor
from ds4.world.timeouts import DEFAULT_TIMEOUTS
from tests.fakes import FakeBackend, Mesh, geometry

ROOT = Path(__file__).parent.parent
N_CTX = 1 << 16
SESSIONS = (1, 8)
WARM_UP_STEPS = 100


class IdleExecutor:
    """Answers every row with the same token. What the head needs of a step, and no more."""

    def open_session(self, session: int, n_ctx: int) -> None:
        """Nothing to keep."""

    def close_session(self, session: int) -> None:
        """Nothing was kept."""

    def check(self, plan: StepPlan) -> None:
        """The head has checked already."""

    def step(self, plan: StepPlan) -> StepResult:
        """One token for each row."""
        rows = tuple(RowResult(session=entry.session, token=1) for entry in plan.entries())
        return StepResult(step=plan.step, rows=rows, digest=bytes(16), device_s=0.0)

    def close(self) -> None:
        """Nothing to free."""


class IdleBackend(FakeBackend):
    """A backend whose steps take no time."""

    executor = IdleExecutor()  # stateless, so one does for the class

    def connect(self, offers, secret, timeout_s) -> None:
        """There is no data plane."""


def world_geometry(world: int):
    """Of the toy world, with room for the run."""
    return geometry(world, n_ctx=N_CTX, max_sessions=max(SESSIONS))


async def rank_main(rank: int, world: int, port: int) -> int:
    """One rank process."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    tune(stream)
    async with DeviceThread() as device:
        actor = RankActor(
            stream,
            rank=rank,
            geometry=world_geometry(world),
            backend=IdleBackend(rank, Mesh(world)),
            device=device,
            key=None,
            timeouts=DEFAULT_TIMEOUTS,
        )
        ending = await actor.run()
    return int(ending.code)


async def time_steps(world: World, n_sessions: int, n_steps: int) -> list[float]:
    """Seconds of each step."""
    sessions = range(1, n_sessions + 1)
    for session in sessions:
        await world.open_session(session, N_CTX)
    times = []
    for position in range(WARM_UP_STEPS + n_steps):
        entries = tuple(Decode(session=s, position=position, token=1) for s in sessions)
        plan = StepPlan(step=position + 1, decode=entries)
        begin = time.perf_counter()
        result = await world.step(plan)
        times.append(time.perf_counter() - begin)
        assert len(result.rows) == n_sessions
    for session in sessions:
        await world.close_session(session)
    return times[WARM_UP_STEPS:]


async def measure(n: int, n_steps: int) -> dict[int, list[float]]:
    """Form a world of `n` rank processes and time it; sessions to seconds of each step."""
    found: dict[int, list[float]] = {}
    head = Head(world_geometry(n), key=None, timeouts=DEFAULT_TIMEOUTS)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    command = [sys.executable, __file__, "--worlds", str(n), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        await trio.lowlevel.open_process([*command, "--rank", str(rank)], env=environment)
        for rank in range(n)
    ]
    try:
        async with trio.open_nursery() as nursery:

            async def meet() -> None:
                for _ in range(n):
                    stream = await listener.accept()
                    tune(stream)
                    nursery.start_soon(head.gathering.meet, stream, "loopback")

            nursery.start_soon(meet)
            with trio.fail_after(120):
                await nursery.start(lambda task_status: head.run(task_status=task_status))
            world = World(head)
            for n_sessions in SESSIONS:
                found[n_sessions] = await time_steps(world, n_sessions, n_steps)
            head.stop()
        with trio.fail_after(30):
            statuses = [await rank.wait() for rank in ranks]
    finally:
        listener.socket.close()
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
    if any(statuses):
        raise RuntimeError(f"rank processes ended with {statuses}")
    return found


def commit() -> str:
    """Of this checkout; `unknown` outside of one."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if not 1 <= args.steps <= N_CTX - WARM_UP_STEPS:
        parser.error(f"--steps must be from 1 to {N_CTX - WARM_UP_STEPS}")
    if args.rank is not None:
        return trio.run(rank_main, args.rank, int(args.worlds), args.port)
    load = os.getloadavg()
    rows = []
    print("ranks sessions   p10 ms   median ms   p90 ms   p99 ms")
    for n in map(int, args.worlds.split(",")):
        for n_sessions, times in trio.run(measure, n, args.steps).items():
            p10, p50, p90, p99 = (float(x) for x in np.percentile(times, [10, 50, 90, 99]) * 1e3)
            print(f"{n:5} {n_sessions:8} {p10:8.3f} {p50:11.3f} {p90:8.3f} {p99:8.3f}", flush=True)
            rows.append(
                {
                    "ranks": n,
                    "sessions": n_sessions,
                    "p10_ms": p10,
                    "median_ms": p50,
                    "p90_ms": p90,
                    "p99_ms": p99,
                    "min_ms": min(times) * 1e3,
                }
            )
    if args.json:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "commit": commit(),
            "machine": {
                "cpu": platform.machine(),
                "cores": len(os.sched_getaffinity(0)),
                "load_before": load,
            },
            "steps": args.steps,
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
