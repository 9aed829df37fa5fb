"""The one thread that touches a device, and how a Trio task waits for it.

Invariant: jobs run one after another, in the order they were handed over, all on the same thread;
and every waiter gets an outcome, also when the loop dies. A wait is shielded, because a launched
step cannot be recalled: cancellation lands after it, and what ends a job that never returns is
`RankBackend.abort` from outside, or in the end the process.

A thread of its own, not `trio.to_thread.run_sync` per job: contexts, communicators and Numba's
thread count belong to a thread, and Trio's cache gives no affinity.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, TypeVarTuple

import outcome
import trio

__all__ = ["Device", "DeviceThread"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Device(Protocol):
    """Where a rank's executor runs."""

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function on the device's thread; returns or raises what it does.

        Cancellation: takes effect when the job is done.
        """


class _Job:
    def __init__(
        self, call: Callable[[], Any], done: Callable[[outcome.Outcome[Any]], None]
    ) -> None:
        self.call = call
        self.done = done


class DeviceThread:
    """A running device thread. Use as an async context manager.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str = "ds4-device") -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped: trio.Event | None = None

    async def __aenter__(self) -> DeviceThread:
        self._token = trio.lowlevel.current_trio_token()
        self._stopped = trio.Event()
        # A daemon: a job that never returns must not keep a failed process alive.
        self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._jobs.put(None)
        if self._stopped is not None:
            with trio.CancelScope(shield=True):
                await self._stopped.wait()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """See `Device.run`.

        Raises:
          RuntimeError: the thread has ended.
        """
        finished = trio.Event()
        box: list[outcome.Outcome[T]] = []

        def done(result: outcome.Outcome[T]) -> None:
            def deliver() -> None:
                box.append(result)
                finished.set()

            self._post(deliver)

        self._jobs.put(_Job(lambda: function(*args), done))
        with trio.CancelScope(shield=True):
            await finished.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        return box[0].unwrap()

    def _post(self, call: Callable[[], object]) -> None:
        try:
            self._token.run_sync_soon(call)
        except trio.RunFinishedError:
            return  # nobody is left to be told

    def _loop(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job.done(outcome.capture(job.call))
        finally:
            stopped = self._stopped
            if stopped is not None:
                self._post(stopped.set)
