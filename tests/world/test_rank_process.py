"""A rank's process ends when its head's connection does: real sockets, a device that is a toy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from ds4.protocol.connection import Connection, PeerVersion
from ds4.protocol.messages import Hello, HelloOk, Ping, Role
from ds4.world.exit_codes import ExitCode
from ds4.world.link import Link
from tests.fakes import geometry

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 45.0

RANK = """
import sys, trio
from ds4.world.rank_actor import RankActor
from ds4.world.timeouts import Timeouts
from tests.fakes import FakeBackend, Mesh, SimDevice, geometry

async def main():
    stream = await trio.open_tcp_stream("127.0.0.1", int(sys.argv[1]))
    backend = FakeBackend(1, Mesh(2))
    actor = RankActor(
        stream, rank=1, geometry=geometry(2), backend=backend, device=SimDevice(backend),
        key=None, timeouts=Timeouts(),
    )
    return (await actor.run()).code

sys.exit(int(trio.run(main)))
"""


async def meet(stream):
    """Play the head up to the end of the introduction."""
    link = Link(stream, Connection(Role.LEADER), write_s=WAIT_S)
    await link.greet()
    assert isinstance(await link.receive(), PeerVersion)
    theirs = await link.receive()
    assert isinstance(theirs, Hello)
    await link.send(
        Hello.of(geometry(2), role=Role.LEADER, rank=0, pid=os.getpid(), host="here", device=())
    )
    await link.send(HelloOk())
    assert isinstance(await link.receive(), HelloOk)
    return link


@pytest.mark.parametrize("abrupt", [False, True])
def test_a_rank_does_not_outlive_its_head(abrupt):
    async def main():
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        process = await trio.lowlevel.open_process(
            [sys.executable, "-c", RANK, str(port)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        stream = None
        try:
            with trio.fail_after(WAIT_S):
                stream = await listener.accept()
                link = await meet(stream)
                await link.send(Ping(time_ns=1))
                await link.receive()
            assert process.poll() is None
            if abrupt:
                await link.aclose()
            else:
                await link.stream.send_eof()
            with trio.move_on_after(WAIT_S) as scope:
                await process.wait()
            assert not scope.cancelled_caught, "the rank lingers"
            assert process.returncode == ExitCode.LEADER_LOST
        finally:
            await listener.aclose()
            if stream is not None:
                await trio.aclose_forcefully(stream)
            if process.poll() is None:
                process.kill()
            await process.wait()

    trio.run(main)
