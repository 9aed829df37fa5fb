"""`CpuExecutor`: the step executor of a rank without a GPU."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

import numba
import numpy as np
from numpy.typing import NDArray

from ds4.collectives import Collective, SoloCollective
from ds4.cpu.forward import Forward, Segment
from ds4.cpu.state import SessionState
from ds4.cpu.weights import Weights
from ds4.errors import ConfigError, InvalidRequest
from ds4.gguf import GGUFFile
from ds4.ids import Position, SessionId
from ds4.model.deepseek4.rounding import Rounding
from ds4.model.deepseek4.tensors import load_shape
from ds4.partition.ownership import Ownership
from ds4.sampling import sample
from ds4.steps import Chunk, Decode, RowResult, StepPlan, StepResult, Want

__all__ = ["MAX_ROWS", "CpuExecutor"]

MAX_ROWS = 256
"""Most rows of one forward pass; longer plans run as several. Bounds memory, not results."""


class CpuExecutor:
    """Runs steps on the CPU. Implements `ds4.executor.StepExecutor`.

    Args:
      file: an opened file; closed by `close`.
      rounding: activation rounding switch.
      threads: most worker threads; None takes every core this process may use. Small batches
        use one, whatever the limit.
      own: this rank's shards; None for a world of one.
      collective: how ranks join; None for a world of one.

    Raises:
      ModelFileError: the file is not a usable model.
      ConfigError: more threads than Numba was started with.
    """

    def __init__(
        self,
        file: GGUFFile,
        *,
        rounding: Rounding = Rounding.NONE,
        threads: int | None = None,
        own: Ownership | None = None,
        collective: Collective | None = None,
    ) -> None:
        self.file = file
        self.shape = load_shape(file)
        self.rounding = rounding
        self.collective: Collective = collective or SoloCollective()
        limit = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]  # set at import
        threads = limit if threads is None else threads
        if not 1 <= threads <= limit:
            raise ConfigError(f"threads must be from 1 to {limit} here, got {threads}")
        self.forward = Forward(
            Weights(file, self.shape),
            own or Ownership.of(self.shape),
            self.collective,
            rounding,
            threads,
        )
        self._sessions: dict[SessionId, SessionState] = {}
        self._identity = hashlib.blake2b(
            file.header_digest() + rounding.encode(), digest_size=16
        ).digest()

    # -- sessions ----------------------------------------------------------------------------

    def open_session(self, session: SessionId, n_ctx: int) -> None:
        """See `StepExecutor.open_session`."""
        if session in self._sessions:
            raise ConfigError(f"session {session} is open already")
        if not 1 <= n_ctx <= self.shape.n_ctx_train:
            raise ConfigError(
                f"context must be from 1 to {self.shape.n_ctx_train} for this model, got {n_ctx}"
            )
        self._sessions[session] = SessionState(self.shape, n_ctx, min(MAX_ROWS, n_ctx))

    def close_session(self, session: SessionId) -> None:
        """See `StepExecutor.close_session`."""
        self._state(session)
        del self._sessions[session]

    def _state(self, session: SessionId) -> SessionState:
        state = self._sessions.get(session)
        if state is None:
            raise InvalidRequest(f"session {session} is not open")
        return state

    def session_length(self, session: SessionId) -> Position:
        """See `StepExecutor.session_length`."""
        return Position(self._state(session).length)

    def session_tokens(self, session: SessionId) -> list[int]:
        """See `StepExecutor.session_tokens`."""
        state = self._state(session)
        return [int(t) for t in state.tokens[: state.length]]

    def rewind(self, session: SessionId, length: Position) -> Position:
        """See `StepExecutor.rewind`."""
        state = self._state(session)
        if not 0 <= length <= state.length:
            raise InvalidRequest(f"cannot rewind session {session} of {state.length} to {length}")
        return Position(state.rewind(length))

    def snapshot(self, session: SessionId) -> bytes:
        """See `StepExecutor.snapshot`."""
        return self._state(session).snapshot(self._identity)

    def restore(self, session: SessionId, data: bytes) -> None:
        """See `StepExecutor.restore`."""
        self._state(session).restore(self._identity, data)

    def close(self) -> None:
        """See `StepExecutor.close`."""
        self._sessions.clear()
        self.collective.close()
        self.file.close()

    # -- steps -------------------------------------------------------------------------------

    def check(self, plan: StepPlan) -> None:
        """See `StepExecutor.check`."""
        for entry in plan.entries():
            state = self._state(entry.session)
            start = entry.start if isinstance(entry, Chunk) else entry.position
            if start != state.length:
                raise InvalidRequest(
                    f"step {plan.step}: session {entry.session} is at {state.length}, "
                    f"the plan continues it at {start}"
                )
            if start + entry.n_rows > state.n_ctx:
                raise InvalidRequest(
                    f"step {plan.step}: session {entry.session} holds {state.n_ctx} tokens, "
                    f"the plan needs {start + entry.n_rows}"
                )
            tokens = entry.tokens if isinstance(entry, Chunk) else np.array([entry.token])
            if int(tokens.min()) < 0 or int(tokens.max()) >= self.shape.n_vocab:
                raise InvalidRequest(
                    f"step {plan.step}: session {entry.session}: token ids must be "
                    f"0 to {self.shape.n_vocab - 1}"
                )

    def step(self, plan: StepPlan) -> StepResult:
        """See `StepExecutor.step`."""
        self.check(plan)
        begin = time.perf_counter()
        logits: dict[SessionId, list[NDArray[np.float32]]] = {}
        for batch in _batches(plan):
            segments: list[Segment] = []
            wanted: list[NDArray[np.int64]] = []
            owners: list[tuple[SessionId, int]] = []
            first = 0
            for entry, tokens, is_last in batch:
                segments.append(Segment(self._state(entry.session), tokens, first))
                rows = _wanted_rows(entry.want, tokens.size, is_last)
                wanted.append(first + rows)
                owners.append((entry.session, rows.size))
                first += int(tokens.size)
            out = self.forward.run(segments, np.concatenate(wanted))
            at = 0
            for session, n in owners:
                if n:
                    logits.setdefault(session, []).append(out[at : at + n])
                    at += n
        rows_out = tuple(
            self._result(entry, logits[entry.session])
            for entry in plan.entries()
            if entry.want != Want.NOTHING
        )
        for entry in plan.prefill:
            self._state(entry.session).checkpoint()
        return StepResult(
            step=plan.step,
            rows=rows_out,
            digest=self._digest(plan),
            device_s=time.perf_counter() - begin,
        )

    def _result(self, entry: Chunk | Decode, pieces: list[NDArray[np.float32]]) -> RowResult:
        logits = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        token = sample(logits[-1], entry.sampling, self._state(entry.session).length)
        if entry.want == Want.TOKEN:
            return RowResult(session=entry.session, token=token)
        if entry.want == Want.TOKEN_AND_LOGITS:
            logits = logits[-1:]
        return RowResult(session=entry.session, token=token, logits=logits)

    def _digest(self, plan: StepPlan) -> bytes:
        """Digest over (session, tokens) of every session the plan touched."""
        total = hashlib.blake2b(digest_size=16)
        for session in sorted(entry.session for entry in plan.entries()):
            total.update(int(session).to_bytes(8, "little"))
            total.update(self._state(session).digest())
        return total.digest()


_Piece = tuple[Chunk | Decode, NDArray[np.int32], bool]


def _batches(plan: StepPlan) -> Iterator[list[_Piece]]:
    """Cut a plan into forward passes of at most MAX_ROWS rows; (entry, tokens, last piece?)."""
    batch: list[_Piece] = []
    room = MAX_ROWS
    for entry in plan.entries():
        tokens = entry.tokens if isinstance(entry, Chunk) else np.array([entry.token], np.int32)
        at = 0
        while at < tokens.size:
            n = min(room, tokens.size - at)
            batch.append((entry, tokens[at : at + n], at + n == tokens.size))
            at += n
            room -= n
            if room == 0:
                yield batch
                batch, room = [], MAX_ROWS
    if batch:
        yield batch


def _wanted_rows(want: int, n_rows: int, is_last: bool) -> NDArray[np.int64]:
    """Rows of a piece whose logits are needed."""
    if want == Want.ALL_LOGITS:
        return np.arange(n_rows)
    if want != Want.NOTHING and is_last:
        return np.array([n_rows - 1])
    return np.arange(0)
