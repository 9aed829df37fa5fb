"""Wire form of `StepPlan` and of the rows of a `StepResult`.

Invariant: unpacking builds the values through their own constructors, so whatever the scheduler
could not have planned is refused here too. Tokens are packed little-endian int32 and logits packed
little-endian float32, both as bytes: four bytes a value and no object per token.

  plan    [step, [chunk, ...], [decode, ...]]
  chunk   [session, start, tokens, want, temperature, top_k, top_p, min_p, seed]
  decode  [session, position, token, want, temperature, top_k, top_p, min_p, seed]
  row     [session, token or nil, number of logit rows, logits or nil]

Sampling parameters are float64 on the wire, because they are float64 in `SamplingParams`, and a
rounded one would sample another token. They identify nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ds4.errors import Ds4Error, LocalProtocolError
from ds4.ids import Position, SessionId, StepId, Token
from ds4.protocol.fields import Field, pack_f32, pack_i32, unpack_f32, unpack_i32
from ds4.sampling import SamplingParams
from ds4.steps import Chunk, Decode, RowResult, StepPlan

__all__ = ["MAX_ROWS", "PLAN", "ROWS"]

MAX_ROWS = 4096
"""Entries in one step."""

_U64 = 2**64 - 1
_TOKEN = 2**31 - 1
_ENTRY_FIELDS = 9
_ROW_FIELDS = 4


def _refuse(text: str) -> LocalProtocolError:
    return LocalProtocolError(text, reason="field")


def _whole(value: object, high: int, name: str) -> int:
    if type(value) is not int or not 0 <= value <= high:
        raise _refuse(f"{name} must be a whole number from 0 to {high}, got {value!r:.60}")
    return value


# Sessions keep their parameters from step to step, so a step usually meets only known ones.
# The key is typed: True, 1 and 1.0 are equal to Python but not to the protocol.
@functools.lru_cache(maxsize=1024, typed=True)
def _sampling(
    temperature: object, top_k: object, top_p: object, min_p: object, seed: object
) -> SamplingParams:
    if (
        type(temperature) is not float
        or type(top_p) is not float
        or type(min_p) is not float
        or type(top_k) is not int
        or type(seed) is not int
    ):
        raise _refuse(
            "sampling must be (float, int, float, float, int), got "
            f"{(temperature, top_k, top_p, min_p, seed)!r:.120}"
        )
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def _entry(value: object, name: str) -> list[Any]:
    if type(value) is not list or len(value) != _ENTRY_FIELDS:
        raise _refuse(f"{name} must be an array of {_ENTRY_FIELDS}, got {value!r:.60}")
    if type(value[3]) is not int:
        raise _refuse(f"{name}.want must be a whole number, got {value[3]!r:.60}")
    return value


def _chunk(value: object) -> Chunk:
    session, start, tokens, want, *sampling = _entry(value, "chunk")
    if type(tokens) is not bytes:
        raise _refuse(f"chunk.tokens must be bytes, got {tokens!r:.60}")
    ids = unpack_i32(tokens)
    if ids.size and int(ids.min()) < 0:
        raise _refuse(f"chunk.tokens has the negative id {int(ids.min())}")
    return Chunk(
        session=SessionId(_whole(session, _U64, "chunk.session")),
        start=Position(_whole(start, _U64, "chunk.start")),
        tokens=ids,
        want=want,
        sampling=_sampling(*sampling),
    )


def _decode(value: object) -> Decode:
    session, position, token, want, *sampling = _entry(value, "decode")
    return Decode(
        session=SessionId(_whole(session, _U64, "decode.session")),
        position=Position(_whole(position, _U64, "decode.position")),
        token=Token(_whole(token, _TOKEN, "decode.token")),
        want=want,
        sampling=_sampling(*sampling),
    )


class PlanField(Field[StepPlan]):
    """A `StepPlan`."""

    def problem(self, value: object) -> str | None:  # as in Field
        if type(value) is not StepPlan:
            return f"must be a StepPlan, got {value!r:.60}"
        if len(value.prefill) + len(value.decode) > MAX_ROWS:
            return f"must have at most {MAX_ROWS} entries"
        return None

    def pack(self, value: StepPlan, minor: int) -> object:  # as in Field
        prefill = []
        for chunk in value.prefill:
            if int(chunk.tokens.min()) < 0:
                raise _refuse(f"chunk of session {chunk.session} has a negative token id")
            s = chunk.sampling
            prefill.append(
                [
                    _whole(chunk.session, _U64, "chunk.session"),
                    _whole(chunk.start, _U64, "chunk.start"),
                    pack_i32(chunk.tokens),
                    int(chunk.want),
                    s.temperature,
                    int(s.top_k),
                    s.top_p,
                    s.min_p,
                    int(s.seed),
                ]
            )
        decode = []
        for row in value.decode:
            s = row.sampling
            decode.append(
                [
                    _whole(row.session, _U64, "decode.session"),
                    _whole(row.position, _U64, "decode.position"),
                    _whole(row.token, _TOKEN, "decode.token"),
                    int(row.want),
                    s.temperature,
                    int(s.top_k),
                    s.top_p,
                    s.min_p,
                    int(s.seed),
                ]
            )
        return [_whole(value.step, _U64, "plan.step"), prefill, decode]

    def unpack(self, value: object, minor: int) -> StepPlan:  # as in Field
        if type(value) is not list or len(value) != 3:
            raise _refuse(f"plan must be an array of 3, got {value!r:.60}")
        step, prefill, decode = value
        if type(prefill) is not list or type(decode) is not list:
            raise _refuse("plan.prefill and plan.decode must be arrays")
        try:
            return StepPlan(
                step=StepId(_whole(step, _U64, "plan.step")),
                prefill=tuple(_chunk(item) for item in prefill),
                decode=tuple(_decode(item) for item in decode),
            )
        except LocalProtocolError:
            raise
        except (Ds4Error, ValueError, TypeError) as error:
            # From the values' own constructors; TypeError for an array where a number belongs.
            raise _refuse(f"plan: {error}") from error


def _row(value: object) -> RowResult:
    if type(value) is not list or len(value) != _ROW_FIELDS:
        raise _refuse(f"row must be an array of {_ROW_FIELDS}, got {value!r:.60}")
    session, token, n_rows, logits = value
    if (logits is None) != (n_rows == 0) or not (logits is None or type(logits) is bytes):
        raise _refuse("row.logits must be bytes exactly when it has logit rows")
    count = _whole(n_rows, 2**31 - 1, "row.n_rows")
    return RowResult(
        session=SessionId(_whole(session, _U64, "row.session")),
        token=None if token is None else Token(_whole(token, _TOKEN, "row.token")),
        logits=None if logits is None else unpack_f32(logits, count),
    )


class RowsField(Field[tuple[RowResult, ...]]):
    """A tuple of `RowResult`."""

    def problem(self, value: object) -> str | None:  # as in Field
        if type(value) is not tuple or any(type(row) is not RowResult for row in value):
            return f"must be a tuple of RowResult, got {value!r:.60}"
        if len(value) > MAX_ROWS:
            return f"must have at most {MAX_ROWS} entries, got {len(value)}"
        for row in value:
            logits = row.logits
            if logits is not None and (
                logits.ndim != 2 or not logits.size or logits.dtype != np.float32
            ):
                return f"logits must be f32[n, V], got {logits.dtype}{list(logits.shape)}"
        return None

    def pack(self, value: tuple[RowResult, ...], minor: int) -> object:  # as in Field
        return [
            [
                _whole(row.session, _U64, "row.session"),
                None if row.token is None else _whole(row.token, _TOKEN, "row.token"),
                0 if row.logits is None else row.logits.shape[0],
                None if row.logits is None else pack_f32(row.logits),
            ]
            for row in value
        ]

    def unpack(self, value: object, minor: int) -> object:  # as in Field
        if type(value) is not list:
            return value
        return tuple(_row(item) for item in value)


PLAN = PlanField()
ROWS = RowsField()
