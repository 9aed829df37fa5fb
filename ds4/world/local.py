"""A whole world from one call: listener, head, local rank processes, and an end for all of them.

Invariant: when `serve` returns or raises, no process it started is left. A rank is spawned, never
forked, and gets its configuration, key included, through a pipe.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import subprocess
import sys
from pathlib import Path

import trio

import ds4
from ds4.errors import Ds4Error, RankLost, WorldRefused
from ds4.protocol.identity import Geometry
from ds4.protocol.membership import ClusterKey
from ds4.world.config import HeadConfig, RankConfig
from ds4.world.exit_codes import ExitCode
from ds4.world.head import Head
from ds4.world.link import tune
from ds4.world.offers import WILDCARDS

__all__ = ["KEY_BYTES", "Supervisor", "serve"]

_log = logging.getLogger(__name__)

KEY_BYTES = 32
_ACCEPT_RETRY_S = 0.1
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Supervisor:
    """Lifetimes of the local rank processes.

    Args:
      head: told when a process ends.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._processes: dict[int, trio.Process] = {}
        self.statuses: dict[int, int] = {}

    async def start(self, config: RankConfig, nursery: trio.Nursery) -> None:
        """Start one rank."""
        root = str(Path(ds4.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "ds4.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            # Ctrl+C in a terminal is for the head, which then stops its ranks in order.
            start_new_session=True,
        )
        self._processes[config.rank] = process
        if process.stdin is not None:
            async with process.stdin:
                try:
                    await process.stdin.send_all(config.dumps().encode() + b"\n")
                except trio.BrokenResourceError:
                    _log.warning("rank.spawn rank=%d: ended at once", config.rank)
        _log.info("rank.spawn rank=%d pid=%d", config.rank, process.pid)
        nursery.start_soon(self._watch, config.rank, process)

    async def _watch(self, rank: int, process: trio.Process) -> None:
        status = await process.wait()
        self.statuses[rank] = status
        _log.info("rank.exit rank=%d pid=%d status=%d", rank, process.pid, status)
        # The link often says more; this counts only if nothing else does.
        self._head.process_ended(rank, status)

    async def end(self, patience_s: float) -> None:
        """Wait for all processes to end, and kill those that take longer than `patience_s`."""
        with trio.CancelScope(shield=True):
            for rank, process in self._processes.items():
                with trio.move_on_after(patience_s):
                    await process.wait()
                if process.returncode is None:
                    _log.warning("rank.kill rank=%d pid=%d", rank, process.pid)
                    process.kill()
                    await process.wait()
                self.statuses[rank] = process.returncode or 0


async def serve(
    config: HeadConfig,
    geometry: Geometry,
    *,
    task_status: trio.TaskStatus[Head] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Form a world, serve it until `Head.stop`, and end it.

    Args:
      config: how.
      geometry: of this head's model file.
      task_status: started with the head when all ranks are ready.

    Raises:
      WorldRefused, RankLost, Desync, CollectiveError: why it ended.
    """
    key_bytes = config.key
    if key_bytes is None and not config.remote:
        # All members are our own children, so nobody else has any business on the port.
        key_bytes = secrets.token_bytes(KEY_BYTES)
    for warning in config.warnings():
        _log.warning("world.warning %s", warning)
    listeners = await _listen(config)
    head = Head(
        geometry,
        key=None if key_bytes is None else ClusterKey(key_bytes),
        timeouts=config.timeouts,
        preflight_only=config.preflight_only,
    )
    supervisor = Supervisor(head)
    error: Ds4Error | None = None
    patience_s = config.timeouts.kill_s
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_accept_until_formed, listeners, head, nursery)
            port = listeners[0].socket.getsockname()[1]
            for rank in config.local_ranks:
                await supervisor.start(_rank_config(config, rank, port, key_bytes), nursery)
            try:
                await head.run(task_status=task_status)
                # All have said goodbye: a busy machine's slow exits are no reason to kill.
                patience_s = max(patience_s, config.timeouts.drain_s)
            except Ds4Error as failure:
                error = failure  # raised below: a nursery would wrap it
            nursery.cancel_scope.cancel()
    finally:
        await supervisor.end(patience_s)
    if error is not None:
        raise error
    bad = {r: s for r, s in supervisor.statuses.items() if s != ExitCode.CLEAN}
    if bad:
        rank = min(bad)
        raise RankLost(rank, f"its process ended with status {bad[rank]} after an orderly stop")


def _rank_config(config: HeadConfig, rank: int, port: int, key: bytes | None) -> RankConfig:
    host = config.listen[0]
    is_wildcard = host in WILDCARDS
    return RankConfig(
        run=config.run,
        rank=rank,
        address=("127.0.0.1" if is_wildcard else host, port),
        key=key,
        threads=config.rank_threads,
        # Peers on other hosts must reach this rank too; the head knows by which address.
        collective_host=host if config.remote else "127.0.0.1",
        timeouts=config.timeouts,
        log_level=config.log_level,
    )


async def _listen(config: HeadConfig) -> list[trio.SocketListener]:
    host, port = config.listen
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        where = f"--listen {host} {port}"
        if error.errno == errno.EADDRINUSE:
            raise WorldRefused(
                "port_in_use", f"{where}: the port is in use; is another head running?"
            ) from error
        raise WorldRefused("listen", f"{where}: {error.strerror or error}") from error


async def _accept_until_formed(
    listeners: list[trio.SocketListener], head: Head, meetings: trio.Nursery
) -> None:
    """Accept until all ranks have come. A world that is complete needs no open port."""
    try:
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(_accept, listener, head, meetings)
            await head.formed.wait()
            nursery.cancel_scope.cancel()
    finally:
        for listener in listeners:
            listener.socket.close()


async def _accept(listener: trio.SocketListener, head: Head, meetings: trio.Nursery) -> None:
    while True:
        try:
            stream = await listener.accept()
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                raise
            # Strangers leave within a bound, and their descriptors with them.
            _log.warning("gather.accept reason=%s", error)
            await trio.sleep(_ACCEPT_RETRY_S)
            continue
        meetings.start_soon(_meet, stream, head)


async def _meet(stream: trio.SocketStream, head: Head) -> None:
    try:
        tune(stream)
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        await trio.aclose_forcefully(stream)  # it has gone already
        return
    await head.gathering.meet(stream, f"{host}:{port}")
