"""`StepPlan` and `StepResult`: the values that scheduler, protocol and executor share.

A step is one batched forward pass: several prefill chunks and decode rows of different sessions,
every session at most once. The plan says everything that decides what is computed; no rank adds a
decision of its own. This module knows nothing of transport, devices or time.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import InvalidRequest
from ds4.ids import Position, SessionId, StepId, Token
from ds4.sampling import GREEDY, SamplingParams

__all__ = ["Chunk", "Decode", "RowResult", "StepPlan", "StepResult", "Want"]


class Want:
    """What a step has to return for one entry. Plain integers, because they travel on the wire."""

    NOTHING = 0
    """Advance the session only (all but the last chunk of a prompt)."""
    TOKEN = 1
    """Sample one token after the entry's last row."""
    TOKEN_AND_LOGITS = 2
    """The same, and the float32 logits of the last row."""
    ALL_LOGITS = 3
    """Float32 logits of every row of the entry, and a sampled token after the last."""

    ALL = (NOTHING, TOKEN, TOKEN_AND_LOGITS, ALL_LOGITS)


def _tokens(value: object) -> NDArray[np.int32]:
    array = np.ascontiguousarray(value, dtype=np.int32)
    if array.ndim != 1 or array.size == 0:
        raise InvalidRequest(
            f"a chunk needs a non-empty list of token ids, got shape {array.shape}"
        )
    array.flags.writeable = False
    return array


@attrs.frozen(kw_only=True, eq=False)
class Chunk:
    """A slice of one session's prompt.

    Attributes:
      session: whose prompt.
      start: position of the first token; must equal the session's length.
      tokens: i32[n], n >= 1.
      want: a `Want` value.
      sampling: how to sample when `want` asks for a token.
    """

    session: SessionId
    start: Position
    tokens: NDArray[np.int32] = attrs.field(converter=_tokens)
    want: int = attrs.field(default=Want.NOTHING, validator=attrs.validators.in_(Want.ALL))
    sampling: SamplingParams = GREEDY

    @property
    def n_rows(self) -> int:
        """Rows this entry adds to the batch."""
        return int(self.tokens.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chunk):
            return NotImplemented
        return (self.session, self.start, self.want, self.sampling) == (
            other.session,
            other.start,
            other.want,
            other.sampling,
        ) and np.array_equal(self.tokens, other.tokens)

    def __hash__(self) -> int:
        return hash((self.session, self.start, self.tokens.tobytes(), self.want))


@attrs.frozen(kw_only=True)
class Decode:
    """One token of one session: feed `token` at `position`, then sample the next.

    Attributes:
      session: whose timeline.
      position: must equal the session's length.
      token: the id fed.
      want: a `Want` value; `TOKEN` unless the caller needs logits or forces the next token.
      sampling: how to sample.
    """

    session: SessionId
    position: Position
    token: Token
    want: int = attrs.field(default=Want.TOKEN, validator=attrs.validators.in_(Want.ALL))
    sampling: SamplingParams = GREEDY

    @property
    def n_rows(self) -> int:
        """Rows this entry adds to the batch: always one."""
        return 1


@attrs.frozen(kw_only=True)
class StepPlan:
    """One batched forward pass. Row order: prefill entries as listed, then decode entries.

    Attributes:
      step: strictly one more than the step before it.
      prefill: prompt chunks.
      decode: single-token rows.
    """

    step: StepId
    prefill: tuple[Chunk, ...] = ()
    decode: tuple[Decode, ...] = ()

    def __attrs_post_init__(self) -> None:
        seen = [entry.session for entry in self.entries()]
        if len(seen) != len(set(seen)):
            raise InvalidRequest(f"step {self.step} names a session twice: {sorted(seen)}")

    def entries(self) -> Iterator[Chunk | Decode]:
        """All entries in row order."""
        yield from self.prefill
        yield from self.decode

    @property
    def n_rows(self) -> int:
        """Rows of the whole batch."""
        return sum(entry.n_rows for entry in self.entries())


@attrs.frozen(kw_only=True, eq=False)
class RowResult:
    """What one entry of a plan produced.

    Attributes:
      session: whose entry.
      token: the sampled token, or None where the plan wanted nothing.
      logits: f32[n, V] when wanted (n = 1 for `TOKEN_AND_LOGITS`), else None.
    """

    session: SessionId
    token: Token | None = None
    logits: NDArray[np.float32] | None = None


@attrs.frozen(kw_only=True, eq=False)
class StepResult:
    """The outcome of one step on one rank.

    Attributes:
      step: the plan's step id.
      rows: one per entry that wanted something, in row order. Only rank 0 fills it.
      digest: digest over (session, length, token hash) of all sessions touched, after the step.
      device_s: seconds the device spent, as measured on the rank.
    """

    step: StepId
    rows: tuple[RowResult, ...] = ()
    digest: bytes = b""
    device_s: float = 0.0
