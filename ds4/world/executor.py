"""`WorldExecutor`: a world of ranks behind the interface of one executor.

Trio runs in a thread of its own and every call crosses over to it, so a program that knows nothing
of Trio, ranks or frames uses a world as it uses a device. Errors travel: a bad request leaves the
world as it was, anything else ends it, and every later call says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

import trio

from ds4.errors import Ds4Error, RankLost
from ds4.gguf import GGUFFile
from ds4.ids import Position, SessionId
from ds4.steps import StepPlan, StepResult
from ds4.world.config import HeadConfig
from ds4.world.handle import World, WorldStatistics
from ds4.world.head import Head
from ds4.world.identity import Identity
from ds4.world.local import serve
from ds4.world.report import WorldReport

__all__ = ["WorldExecutor", "open_world"]

_log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class WorldExecutor:
    """Runs steps on a world. Implements `ds4.executor.StepExecutor`.

    Args:
      config: how to form the world.
      identity: of this head's model file.

    Raises:
      WorldRefused, RankLost, CollectiveError: no world could be formed; every rank has ended.
    """

    def __init__(self, config: HeadConfig, identity: Identity) -> None:
        self._config = config
        self._identity = identity
        self._ready: Future[World] = Future()
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope: trio.CancelScope | None = None
        self._error: Ds4Error | None = None
        self._is_closed = False
        self._was_told = False
        self._thread = threading.Thread(target=self._run, name="ds4-world", daemon=True)
        self._thread.start()
        try:
            self._world = self._ready.result()
        except BaseException:
            self.abort()
            raise

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except Ds4Error as error:
            self._error = error
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                _log.error("world.end text=%s", error)
        except BaseException as error:  # noqa: BLE001  # the thread has no one else to tell
            self._error = RankLost(0, f"the head failed: {error!r}")
            if not self._ready.done():
                self._ready.set_exception(error)
            _log.exception("world.crash")
        finally:
            if not self._ready.done():
                self._ready.set_exception(RankLost(0, "the world was given up"))

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        error: Ds4Error | None = None
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:

                async def run(
                    task_status: trio.TaskStatus[Head] = trio.TASK_STATUS_IGNORED,
                ) -> None:
                    nonlocal error
                    try:
                        await serve(self._config, self._identity.geometry, task_status=task_status)
                    except Ds4Error as failure:
                        error = failure  # a nursery would wrap it

                try:
                    head = await nursery.start(run)
                except RuntimeError:
                    if error is None:
                        raise
                else:
                    self._ready.set_result(World(head))
        if error is not None:
            raise error

    def _call(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        if self._is_closed:
            raise RankLost(0, "the world has been closed")
        try:
            return trio.from_thread.run(function, *args, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            self._thread.join()
            self._was_told = True
            raise self._error or RankLost(0, "the world has been closed") from None
        except (RankLost, Ds4Error) as error:
            self._was_told = self._was_told or self._world.head.failure is not None
            raise error

    # -- StepExecutor ------------------------------------------------------------------------

    def open_session(self, session: SessionId, n_ctx: int) -> None:
        """See `World.open_session`."""
        self._call(self._world.open_session, session, n_ctx)

    def close_session(self, session: SessionId) -> None:
        """See `World.close_session`."""
        self._call(self._world.close_session, session)

    def session_length(self, session: SessionId) -> Position:
        """Number of tokens the timeline holds."""
        return Position(len(self._world.timeline(session)))

    def session_tokens(self, session: SessionId) -> list[int]:
        """The ids the timeline holds."""
        return self._world.timeline(session).tokens()

    def check(self, plan: StepPlan) -> None:
        """See `World.check`."""
        self._world.check(plan)

    def step(self, plan: StepPlan) -> StepResult:
        """See `World.step`."""
        return self._call(self._world.step, plan)

    def snapshot(self, session: SessionId) -> bytes:
        """See `World.snapshot`."""
        return self._call(self._world.snapshot, session)

    def restore(self, session: SessionId, data: bytes) -> None:
        """See `World.restore`."""
        self._call(self._world.restore, session, data)

    def rewind(self, session: SessionId, length: Position) -> Position:
        """See `World.rewind`."""
        return self._call(self._world.rewind, session, length)

    def close(self) -> None:
        """End the world in order. Safe to call twice.

        Raises:
          RankLost, Desync, CollectiveError: it ended otherwise, and no call has said so yet.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._soon(self._world.head.stop)
            self._thread.join()
        except KeyboardInterrupt:
            # Asked to end while ending: no more patience with anybody.
            self.abort()
            raise
        if self._error is not None and not self._was_told:
            raise self._error

    # -- more --------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The async handle, for programs that run in the world's own Trio loop."""
        return self._world

    @property
    def report(self) -> WorldReport | None:
        """What every rank said it holds; None after a preflight."""
        return self._world.head.report

    def statistics(self) -> WorldStatistics:
        """Counters so far."""
        return self._world.statistics()

    def abort(self) -> None:
        """End the world now: local ranks are killed, remote ones see the connection close."""
        scope = self._scope
        if scope is not None:
            self._soon(scope.cancel)
        self._thread.join()

    def _soon(self, function: Callable[[], object]) -> None:
        if self._token is None:
            return
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return  # it has ended already


@contextmanager
def open_world(config: HeadConfig) -> Iterator[WorldExecutor]:
    """Form a world for the length of a block.

    Args:
      config: how.

    Raises:
      ModelFileError: the model file cannot be used.
      WorldRefused: no world can be formed.
      RankLost, Desync, CollectiveError: it ended before the block did.
    """
    with GGUFFile.open(config.run.model) as file:
        identity = Identity.of(file, config.run)
    executor = WorldExecutor(config, identity)
    try:
        yield executor
    finally:
        executor.close()
