"""Time of encoding and decoding the frames that matter. Prints microseconds, best of several.

python benchmarks/time_protocol.py
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np

from ds4.ids import Position, SessionId, StepId, Token
from ds4.protocol.codec import CODEC, Envelope
from ds4.protocol.connection import Connection
from ds4.protocol.messages import Ack, Message, Role, Step, Subject
from ds4.steps import Chunk, RowResult, StepPlan
from fuzz.conversation import SETUP, Pair, step


def best_us(work: Callable[[], object], number: int = 2000, repeats: int = 7) -> float:
    """Microseconds of one call, the best of some repeats."""
    return min(timeit.repeat(work, number=number, repeat=repeats)) / number * 1e6


def prefill(n_tokens: int) -> Step:
    """A step with one chunk."""
    tokens = np.arange(n_tokens, dtype=np.int32)
    chunk = Chunk(session=SessionId(1), start=Position(0), tokens=tokens)
    return Step(plan=StepPlan(step=StepId(1), prefill=(chunk,)))


def ack(n_rows: int, vocab: int = 0) -> Ack:
    """The answer of rank 0, with logits when `vocab` is given."""
    logits = np.zeros((1, vocab), np.float32) if vocab else None
    rows = tuple(
        RowResult(session=SessionId(i), token=Token(i), logits=logits) for i in range(n_rows)
    )
    return Ack(about=int(Subject.STEP), id=1, digest=bytes(32), device_s=0.002, rows=rows)


CASES: dict[str, Message] = {
    "decode step, 1 session": step(1),
    "decode step, 8 sessions": step(1, rows=8),
    "decode step, 64 sessions": step(1, rows=64),
    "prefill step, 2048 tokens": prefill(2048),
    "ack, 8 tokens": ack(8),
    "ack, 1 token and 129,280 logits": ack(1, 129_280),
}


def round_trip() -> float:
    """Microseconds of a whole step and its answer through both connections."""
    pair = Pair().play(SETUP)
    numbers = iter(range(1, 10**9))

    def once() -> None:
        number = next(numbers)
        pair.send(Role.LEADER, step(number, rows=8))
        pair.send(Role.WORKER, Ack(about=int(Subject.STEP), id=number))

    return best_us(once, 500)


def main() -> None:
    """Print the table."""
    print(f"{'frame':34} {'bytes':>8} {'encode us':>10} {'decode us':>10}")
    for name, message in CASES.items():
        envelope = Envelope(1, 1, message)
        body = CODEC.encode(envelope, 0)
        number = 200 if len(body) > 100_000 else 2000
        encode = best_us(lambda envelope=envelope: CODEC.encode(envelope, 0), number)
        decode = best_us(lambda body=body: CODEC.decode(body, 0), number)
        print(f"{name:34} {len(body):8} {encode:10.1f} {decode:10.1f}")
    print(f"step of 8 and its ack, through both {Connection.__name__}s: {round_trip():.0f} us")


if __name__ == "__main__":
    main()
