"""What every executor does with its sessions, whatever device holds their state.

`SessionTable` is the base of `CpuExecutor` and `CudaExecutor`: it finds timelines, checks plans
against them before anything is launched, and cuts plans into forward passes. It knows tokens and
lengths, and nothing of weights or devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ds4.errors import InvalidRequest
from ds4.ids import Position, SessionId
from ds4.steps import Chunk, Decode, StepPlan, Want

__all__ = ["Piece", "SessionTable", "Timeline", "batches", "wanted_rows"]


class Timeline(Protocol):
    """State of one session on some device.

    Attributes:
      tokens: i32[n_ctx]; the first `length` are valid.
      length: tokens the timeline holds.
      n_ctx: tokens it can hold.
    """

    tokens: NDArray[np.int32]
    length: int
    n_ctx: int

    def digest(self) -> bytes:
        """Digest of the tokens, equal on all ranks that hold the same timeline."""

    def rewind(self, length: int) -> int:
        """Go back to the newest exact state at or before `length`; return its length."""

    def snapshot(self, identity: bytes) -> bytes:
        """Serialize the timeline."""

    def restore(self, identity: bytes, data: bytes) -> None:
        """Replace the timeline by a snapshot, or raise SnapshotError and leave it."""


State = TypeVar("State", bound=Timeline)


class SessionTable(Generic[State]):
    """Open sessions of one executor.

    Args:
      n_vocab: vocabulary of the model.
      identity: of model and switches; part of every snapshot.
    """

    def __init__(self, n_vocab: int, identity: bytes) -> None:
        self._n_vocab = n_vocab
        self._identity = identity
        self._sessions: dict[SessionId, State] = {}

    def _state(self, session: SessionId) -> State:
        state = self._sessions.get(session)
        if state is None:
            raise InvalidRequest(f"session {session} is not open")
        return state

    def _release(self, state: State) -> None:
        """Give back what a closed session held on the device."""

    def close_session(self, session: SessionId) -> None:
        """See `StepExecutor.close_session`."""
        self._release(self._state(session))
        del self._sessions[session]

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
            tokens = _tokens(entry)
            if int(tokens.min()) < 0 or int(tokens.max()) >= self._n_vocab:
                raise InvalidRequest(
                    f"step {plan.step}: session {entry.session}: token ids must be "
                    f"0 to {self._n_vocab - 1}"
                )

    def _digest(self, plan: StepPlan) -> bytes:
        """Digest over (session, tokens) of every session the plan touched."""
        total = hashlib.blake2b(digest_size=16)
        for session in sorted(entry.session for entry in plan.entries()):
            total.update(int(session).to_bytes(8, "little"))
            total.update(self._state(session).digest())
        return total.digest()


Piece = tuple[Chunk | Decode, NDArray[np.int32], bool]
"""An entry, the part of its tokens in one forward pass, and whether it is the last part."""


def _tokens(entry: Chunk | Decode) -> NDArray[np.int32]:
    return entry.tokens if isinstance(entry, Chunk) else np.array([entry.token], np.int32)


def batches(plan: StepPlan, max_rows: int) -> Iterator[list[Piece]]:
    """Cut a plan into forward passes of at most `max_rows` rows, in row order."""
    batch: list[Piece] = []
    room = max_rows
    for entry in plan.entries():
        tokens = _tokens(entry)
        at = 0
        while at < tokens.size:
            n = min(room, tokens.size - at)
            batch.append((entry, tokens[at : at + n], at + n == tokens.size))
            at += n
            room -= n
            if room == 0:
                yield batch
                batch, room = [], max_rows
    if batch:
        yield batch


def wanted_rows(want: int, n_rows: int, is_last: bool) -> range:
    """Rows of a piece whose logits are needed."""
    if want == Want.ALL_LOGITS:
        return range(n_rows)
    if want != Want.NOTHING and is_last:
        return range(n_rows - 1, n_rows)
    return range(0)
