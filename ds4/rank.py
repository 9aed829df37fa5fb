"""The rank process: `python -m ds4.rank` with its configuration as one line on standard input.

The configuration holds the cluster key, which must not show in a process list. A rank started by
hand on another host comes here through a frontend with `--role worker`. The exit status is one of
`ds4.world.exit_codes`.
"""

from __future__ import annotations

import functools
import logging
import signal
import sys

import trio

from ds4.backend import RankBackend, RefusedBackend
from ds4.errors import ConfigError, ModelFileError, WorldRefused
from ds4.gguf import GGUFFile
from ds4.protocol.membership import ClusterKey
from ds4.protocol.messages import Refuse
from ds4.world.config import RankConfig
from ds4.world.device_thread import DeviceThread
from ds4.world.exit_codes import ExitCode
from ds4.world.identity import Identity
from ds4.world.link import tune
from ds4.world.offers import pack_address, unpack_address
from ds4.world.preflight import memory_verdict
from ds4.world.rank_actor import Ending, RankActor
from ds4.world.watchdog import hard_exit_after

__all__ = ["main", "run_rank"]

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    """Run the rank whose configuration is on standard input; returns the exit status."""
    try:
        config = RankConfig.loads(sys.stdin.readline())
    except ConfigError as error:
        logging.basicConfig()
        _log.error("rank.config text=%s", error)
        return ExitCode.REFUSED
    logging.basicConfig(
        level=config.log_level, format=f"ds4 rank {config.rank}: %(levelname)s: %(message)s"
    )
    return run_rank(config).code


def run_rank(config: RankConfig) -> Ending:
    """Serve as one rank until the world ends.

    Args:
      config: which rank, of what, and where its head is.

    Returns:
      How it ended; never raises for what a peer does.
    """
    return trio.run(_serve, config)


async def _serve(config: RankConfig) -> Ending:
    stream = await _dial(config)
    if stream is None:
        host, port = config.address
        reason = f"no head at {host}:{port} within {config.timeouts.dial_s:g} s"
        _log.error("rank.end rank=%d exit=%d reason=%s", config.rank, ExitCode.LEADER_LOST, reason)
        return Ending(ExitCode.LEADER_LOST, reason)
    tune(stream)
    file, identity, refusal = None, None, None
    backend: RankBackend | None = None
    try:
        file = GGUFFile.open(config.run.model)
        identity = Identity.of(file, config.run)
        verdict = memory_verdict(identity, config.run, who=f"rank {config.rank}")
        if not verdict.admitted:
            refusal = Refuse(
                reason="memory", text=verdict.text[:1000], rank=config.rank, flag="--ctx"
            )
        backend = _backend(config, file, identity)
    except WorldRefused as error:
        refusal = Refuse(reason=error.reason, text=str(error)[:1000], rank=config.rank)
    except (ModelFileError, ConfigError) as error:
        refusal = Refuse(reason=error.code, text=str(error)[:1000], rank=config.rank)
    if backend is None or refusal is not None:
        backend = RefusedBackend(None if file is None else file.close)
    key = None if config.key is None else ClusterKey(config.key)
    host = config.collective_host or str(stream.socket.getsockname()[0])
    async with DeviceThread() as device:
        actor = RankActor(
            stream,
            rank=config.rank,
            geometry=None if identity is None else identity.geometry,
            backend=backend,
            device=device,
            key=key,
            timeouts=config.timeouts,
            collective_host=host,
            refusal=refusal,
            watchdog=functools.partial(hard_exit_after, config.timeouts.abort_s),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_signals, actor, nursery)
            ending = await actor.run()
            nursery.cancel_scope.cancel()
    return ending


async def _watch_signals(actor: RankActor, nursery: trio.Nursery) -> None:
    with trio.open_signal_receiver(*_SIGNALS) as signals:
        async for number in signals:
            _log.warning("rank.signal rank=%d signal=%d", actor.rank, number)
            actor.terminate(nursery)
            break
    # A second one has the usual effect, for a process that is stuck.
    await trio.sleep_forever()


async def _dial(config: RankConfig) -> trio.SocketStream | None:
    host, port = config.address
    timeouts = config.timeouts
    next_line = trio.current_time() + timeouts.report_s
    with trio.move_on_after(timeouts.dial_s):
        while True:
            try:
                return await trio.open_tcp_stream(host, port)
            except OSError as error:
                if trio.current_time() >= next_line:
                    _log.warning("rank.dialing address=%s:%d reason=%s", host, port, error)
                    next_line += timeouts.report_s
            await trio.sleep(timeouts.dial_retry_s)
    return None


def _backend(config: RankConfig, file: GGUFFile, identity: Identity) -> RankBackend:
    if config.run.backend == "cuda":
        raise ConfigError("--backend cuda is not available in this build; use auto or cpu")
    # Numba is imported only where something is computed.
    from ds4.cpu.backend import Addresses, CpuBackend

    return CpuBackend(
        file,
        identity.shape,
        mode=config.run.mode,
        world=config.run.world,
        rank=config.rank,
        placement=identity.placement,
        rounding=config.run.rounding,
        threads=config.threads,
        addresses=Addresses(pack_address, unpack_address),
    )


if __name__ == "__main__":
    sys.exit(main())
