"""What head and rank both know of a session: its tokens, and a digest of them.

Invariant: two timelines with equal digests hold the same tokens. The head sends the digest of all
sessions a step touches before the step; a rank whose own differs answers instead of running. The
digest of a prefix is kept running, so a step costs its new tokens and not the whole history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ds4.ids import Position, SessionId
from ds4.steps import Chunk, StepPlan

__all__ = ["Timeline", "check_digest", "entry_tokens"]


def _packed(tokens: Sequence[int] | NDArray[np.int32]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


class Timeline:
    """Tokens of one session.

    Args:
      n_ctx: most tokens it may hold.
    """

    def __init__(self, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self._tokens = bytearray()
        self._hash = hashlib.blake2b(digest_size=16)

    def __len__(self) -> int:
        return len(self._tokens) // 4

    def tokens(self) -> list[int]:
        """The ids."""
        return [int(t) for t in np.frombuffer(bytes(self._tokens), "<i4")]

    def extend(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Append ids."""
        data = _packed(tokens)
        self._tokens += data
        self._hash.update(data)

    def cut(self, length: int) -> None:
        """Keep the first `length` ids."""
        del self._tokens[4 * length :]
        self._hash = hashlib.blake2b(self._tokens, digest_size=16)

    def replace(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Hold other ids."""
        self._tokens = bytearray(_packed(tokens))
        self._hash = hashlib.blake2b(self._tokens, digest_size=16)

    def digest(self) -> bytes:
        """Sixteen bytes over the ids."""
        return self._hash.copy().digest()


def entry_tokens(plan: StepPlan) -> Iterable[tuple[SessionId, Position, NDArray[np.int32]]]:
    """(session, position of the first token, i32[n] tokens) of every entry."""
    for entry in plan.entries():
        if isinstance(entry, Chunk):
            yield entry.session, entry.start, entry.tokens
        else:
            yield entry.session, entry.position, np.array([entry.token], np.int32)


def check_digest(timelines: Mapping[SessionId, Timeline], sessions: Iterable[SessionId]) -> bytes:
    """Digest over (session, length, tokens) of the named sessions, in ascending order.

    Raises:
      KeyError: a session that is not open.
    """
    total = hashlib.blake2b(b"ds4 timelines 1", digest_size=16)
    for session in sorted(sessions):
        timeline = timelines[session]
        total.update(int(session).to_bytes(8, "little"))
        total.update(len(timeline).to_bytes(8, "little"))
        total.update(timeline.digest())
    return total.digest()
