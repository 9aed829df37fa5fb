"""Speed at growing context lengths: the measurement behind `ds4-bench`.

At every frontier the new part of the prompt is prefilled, a snapshot is taken, a fixed number of
tokens is decoded, and the snapshot is restored, so that the next frontier continues the prompt.
Snapshots are outside all timers. Any `StepExecutor` can be measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError
from ds4.executor import StepExecutor
from ds4.ids import Position, SessionId, StepId, Token
from ds4.steps import Chunk, Decode, StepPlan, Want

__all__ = ["Frontier", "Measurement", "Sweep", "frontiers"]


def frontiers(start: int, maximum: int, *, increment: int, factor: float) -> list[int]:
    """Context lengths to measure, ascending; the last is always `maximum`.

    With factor > 1 the next one is ceil(current * factor), at least one more; else `increment`
    more.

    Raises:
      ConfigError: start is not from 1 to maximum.
    """
    if not 1 <= start <= maximum:
        raise ConfigError(f"--ctx-start must be from 1 to --ctx-max {maximum}, got {start}")
    found = [start]
    while found[-1] < maximum:
        here = found[-1]
        there = max(here + 1, math.ceil(here * factor)) if factor > 1 else here + increment
        found.append(min(there, maximum))
    return found


@attrs.frozen(kw_only=True)
class Frontier:
    """What one frontier took.

    Attributes:
      ctx_tokens: tokens of context of each session.
      prefill_tokens: of those, new since the frontier before.
      prefill_s: seconds of their prefill, all sessions together.
      gen_tokens: tokens decoded by each session.
      steps_s: seconds of every decode step.
      kv_bytes: bytes of a session's snapshot.
      tokens: ids that session 0 decoded.
      logits: f32[V] of session 0 after the last prompt token, if asked for.
    """

    ctx_tokens: int
    prefill_tokens: int
    prefill_s: float
    gen_tokens: int
    steps_s: tuple[float, ...]
    kv_bytes: int
    tokens: tuple[int, ...]
    logits: NDArray[np.float32] | None = None

    def prefill_rate(self, sessions: int) -> float:
        """Prompt tokens per second, all sessions together."""
        return sessions * self.prefill_tokens / self.prefill_s

    def decode_rate(self, sessions: int) -> float:
        """Decoded tokens per second, all sessions together; 0 without decoding."""
        return sessions * self.gen_tokens / sum(self.steps_s) if self.steps_s else 0.0


@attrs.frozen(kw_only=True)
class Measurement:
    """What to measure.

    Attributes:
      frontiers: context lengths, ascending.
      gen_tokens: tokens to decode at each; 0 for prefill only.
      sessions: sessions that run side by side, all with the same prompt.
      n_ctx: context each session gets.
      prefill_chunk: most prompt tokens of a session in one step.
      eos: the token that is never chosen.
      wants_logits: keep the logits at every frontier.
    """

    frontiers: Sequence[int]
    gen_tokens: int
    sessions: int
    n_ctx: int
    prefill_chunk: int
    eos: int
    wants_logits: bool = False


class Sweep:
    """Runs a measurement on an executor; owns its sessions while it runs.

    Args:
      executor: with room for the sessions.
      prompt: ids, at least as many as the last frontier.
      what: the measurement.
    """

    def __init__(
        self, executor: StepExecutor, prompt: NDArray[np.int32], what: Measurement
    ) -> None:
        self.executor = executor
        self.prompt = prompt
        self.what = what
        self._ids = [SessionId(1 + i) for i in range(what.sessions)]
        self._step = 0

    def run(self) -> Iterator[Frontier]:
        """Measure frontier after frontier.

        Raises: as the executor's methods.
        """
        for session in self._ids:
            self.executor.open_session(session, self.what.n_ctx)
        try:
            done = 0
            for length in self.what.frontiers:
                yield self._frontier(done, length)
                done = length
        finally:
            for session in self._ids:
                self.executor.close_session(session)

    def _frontier(self, done: int, length: int) -> Frontier:
        begin = time.perf_counter()
        first, logits = self._prefill(done, length)
        prefill_s = time.perf_counter() - begin
        snapshots = [self.executor.snapshot(session) for session in self._ids]
        tokens, seconds = self._decode(length, first, exclude_eos=False)
        if self.what.eos in tokens[: self.what.gen_tokens]:
            # Rare: decode once more, choosing from the logits without that token.
            self._restore(snapshots)
            tokens, seconds = self._decode(length, first, exclude_eos=True)
        self._restore(snapshots)
        return Frontier(
            ctx_tokens=length,
            prefill_tokens=length - done,
            prefill_s=prefill_s,
            gen_tokens=self.what.gen_tokens,
            steps_s=tuple(seconds),
            kv_bytes=len(snapshots[0]),
            tokens=tuple(tokens[: self.what.gen_tokens]),
            logits=logits if self.what.wants_logits else None,
        )

    def _restore(self, snapshots: Sequence[bytes]) -> None:
        for session, data in zip(self._ids, snapshots, strict=True):
            self.executor.restore(session, data)

    def _next_step(self) -> StepId:
        self._step += 1
        return StepId(self._step)

    def _prefill(self, done: int, length: int) -> tuple[list[int], NDArray[np.float32] | None]:
        """Feed prompt[done:length] to every session; the token that follows, and logits."""
        # The last logits tell the best token that is not end-of-sequence.
        for at in range(done, length, self.what.prefill_chunk):
            end = min(at + self.what.prefill_chunk, length)
            want = Want.TOKEN_AND_LOGITS if end == length else Want.NOTHING
            chunks = tuple(
                Chunk(session=session, start=Position(at), tokens=self.prompt[at:end], want=want)
                for session in self._ids
            )
            rows = self.executor.step(StepPlan(step=self._next_step(), prefill=chunks)).rows
        return [self._best(row.logits) for row in rows], (
            rows[0].logits[0] if rows[0].logits is not None else None
        )

    def _best(self, logits: NDArray[np.float32] | None) -> int:
        """Greedy token other than end-of-sequence, of f32[1, V] logits."""
        if logits is None:
            raise AssertionError("logits were asked for")
        row = logits[0].copy()
        if 0 <= self.what.eos < row.size:
            row[self.what.eos] = -np.inf
        return int(row.argmax())

    def _decode(
        self, length: int, first: Sequence[int], *, exclude_eos: bool
    ) -> tuple[list[int], list[float]]:
        """Decode gen_tokens steps; ids of session 0, the fed ones first, and seconds per step."""
        fed = list(first)
        tokens = [fed[0]]
        seconds: list[float] = []
        want = Want.TOKEN_AND_LOGITS if exclude_eos else Want.TOKEN
        for i in range(self.what.gen_tokens):
            rows = tuple(
                Decode(session=session, position=Position(length + i), token=Token(t), want=want)
                for session, t in zip(self._ids, fed, strict=True)
            )
            plan = StepPlan(step=self._next_step(), decode=rows)
            begin = time.perf_counter()
            found = self.executor.step(plan).rows
            seconds.append(time.perf_counter() - begin)
            if exclude_eos:
                fed = [self._best(row.logits) for row in found]
            else:
                fed = [int(row.token) for row in found if row.token is not None]
            tokens.append(fed[0])
        return tokens, seconds
