"""The control protocol by hand: two `Connection` objects, no socket, no clock, no task.

    python examples/raw_protocol.py

A leader and a worker exchange bytes through two Python lists of events: they greet each other,
agree on a geometry, start a data plane, and run one step. Everything that a real head and a real
rank add to this is moving the bytes, watching the time, and doing the work.
"""

from __future__ import annotations

import hashlib

from ds4.ids import Position, SessionId, StepId, Token
from ds4.protocol.connection import Connection, PeerVersion
from ds4.protocol.identity import Geometry
from ds4.protocol.messages import (
    Ack,
    Bye,
    Config,
    ConfigOk,
    Hello,
    HelloOk,
    Load,
    Loaded,
    Message,
    NcclId,
    NcclOk,
    NcclVote,
    Ready,
    Role,
    SessionOpen,
    Step,
    StepMode,
    Stop,
    Subject,
)
from ds4.steps import Decode, RowResult, StepPlan, StepResult


def digest(text: str) -> bytes:
    """A digest to stand for a file or a table."""
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


GEOMETRY = Geometry(
    mode="expert-parallel",
    world=1,
    gguf_bytes=1_000_000,
    gguf_digest=digest("the file"),
    layout_fingerprint=digest("its tensors"),
    model_id="deepseek4",
    n_layers=43,
    width=4096,
    vocab=129_280,
    n_ctx=32_768,
    prefill_chunk=2048,
    max_sessions=1,
    max_batch_rows=2048,
    mixed_quantum=128,
    schedule_digest=digest("its collectives"),
    placement_digest=digest("its experts"),
    reduce_mode="tree8",
    fast_aligned=False,
    activation_dtype="f32",
    transport="tcp",
)


class Rank:
    """What a rank answers. A real one loads weights and computes where this one makes things up."""

    def __init__(self) -> None:
        self.hello = Hello.of(GEOMETRY, role=Role.WORKER, rank=0, pid=1, host="here")

    def answers(self, message: Message) -> list[Message]:
        """The messages that follow one from the leader."""
        match message:
            case HelloOk():
                return [HelloOk()]
            case Config():
                return [ConfigOk()]
            case Load():
                return [Loaded(mapped_bytes=0, device_bytes=0, seconds=0.0, expert_rows=0)]
            case NcclVote():
                return [NcclVote(usable=True, transport="tcp", offer=b"127.0.0.1:4000")]
            case NcclId():
                return [NcclOk(), Ready()]
            case SessionOpen():
                return [Ack(about=int(Subject.OP), id=message.op)]
            case Step():
                rows = tuple(
                    RowResult(session=row.session, token=Token(row.token + 1))
                    for row in message.plan.decode
                )
                return [Ack.of_step(StepResult(step=message.plan.step, rows=rows))]
            case Stop():
                return [Bye(counters=(("steps", 1),))]
        return []


def script() -> list[Message]:
    """What the leader says, each after the answer to the one before."""
    row = Decode(session=SessionId(1), position=Position(0), token=Token(41))
    return [
        Hello.of(GEOMETRY, role=Role.LEADER, rank=0, pid=2, host="here"),
        HelloOk(),
        Config(
            window=1,
            prefill_chunk=2048,
            max_batch_rows=2048,
            max_sessions=1,
            placement_digest=GEOMETRY.placement_digest,
            buckets=(1,),
            rank_timeout_ms=10_000,
            step_timeout_ms=10_000,
            bootstrap_timeout_ms=60_000,
            drain_timeout_ms=30_000,
            ping_interval_ms=1000,
        ),
        Load(),
        NcclVote(usable=True, transport="tcp"),
        NcclId(transport="tcp", offers=(b"127.0.0.1:4000",)),
        SessionOpen(op=1, session=1, n_ctx=4096),
        Step(plan=StepPlan(step=StepId(1), decode=(row,)), mode=int(StepMode.EAGER)),
        Stop(),
    ]


def events(connection: Connection, data: bytes) -> list[Message]:
    """Give bytes to one end and take its messages."""
    connection.receive_data(data)
    found: list[Message] = []
    while (event := connection.next_event()) is not None:
        if isinstance(event, PeerVersion):
            print(f"{connection.role.name.lower():6} sees protocol {event.version}")
        elif isinstance(event, Message):
            found.append(event)
    return found


def show(sender: str, message: Message, data: bytes, receiver: Connection) -> None:
    """One line for one message."""
    print(f"{sender:6} {message.NAME:12} {len(data):4} bytes -> {receiver.state.value}")


def main() -> None:
    """Hold the whole conversation."""
    leader, worker, rank = Connection(Role.LEADER), Connection(Role.WORKER), Rank()
    events(worker, leader.start())
    events(leader, worker.start())
    # The worker opens, as the side that dialled.
    first = worker.send(rank.hello)
    events(leader, first)
    show("worker", rank.hello, first, leader)
    for message in script():
        data = leader.send(message)
        for heard in events(worker, data):
            show("leader", heard, data, worker)
            for answer in rank.answers(heard):
                back = worker.send(answer)
                (reply,) = events(leader, back)
                show("worker", reply, back, leader)
                if isinstance(reply, Ack) and reply.rows:
                    print(f"       the token is {reply.rows[0].token}")


if __name__ == "__main__":
    main()
