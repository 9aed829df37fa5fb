"""Values that go into and come out of the scheduler: requests, limits, events, decisions.

All are immutable. Nothing here decides anything; `ds4.scheduler` does.
"""

from __future__ import annotations

from enum import Enum

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError, InvalidRequest
from ds4.ids import Position, RequestId, Token
from ds4.sampling import SamplingParams
from ds4.sessions import Command
from ds4.steps import StepPlan

__all__ = [
    "Decision",
    "Event",
    "FinishReason",
    "Finished",
    "PromptLogits",
    "PromptProgress",
    "Request",
    "SchedulerConfig",
    "SchedulerStatistics",
    "Started",
    "TokenEvent",
    "token_array",
]


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """Limits of a scheduler. All tokens and rows are counts.

    Attributes:
      n_slots: resident sessions (`--batched-session`).
      n_ctx: context of each session.
      n_vocab: vocabulary, to check token ids.
      max_rows: rows of one step; at least `n_slots`, so that every session can advance in one step.
      prefill_chunk: longest chunk of one prompt in a step.
      mixed_quantum: prompt rows of a step that also decodes (`--mixed-prefill-quantum`); it bounds
        how long a running stream waits for a new prompt.
      max_queue: requests that may wait for a slot; 0 means no limit (`--max-queue`).
      max_active: requests that run at once; 0 means `n_slots`.
      park_limit_s: seconds a parked request may keep its slot; None means no limit.
      min_shared_tokens: see `SlotTable`.
    """

    n_slots: int = 1
    n_ctx: int = 32768
    n_vocab: int = 2**31 - 1
    max_rows: int = 2048
    prefill_chunk: int = 2048
    mixed_quantum: int = 128
    max_queue: int = 0
    max_active: int = 0
    park_limit_s: float | None = None
    min_shared_tokens: int = 16

    def __attrs_post_init__(self) -> None:
        for name in ("n_slots", "n_ctx", "n_vocab", "prefill_chunk", "mixed_quantum"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_rows < self.n_slots:
            raise ConfigError(
                f"max_rows must be at least the {self.n_slots} batched sessions,"
                f" got {self.max_rows}"
            )
        if self.max_queue < 0:
            raise ConfigError(f"max_queue must be >= 0, got {self.max_queue}")
        if not 0 <= self.max_active <= self.n_slots:
            raise ConfigError(f"max_active must be from 0 to {self.n_slots}, got {self.max_active}")
        if self.park_limit_s is not None and not self.park_limit_s > 0:
            raise ConfigError(f"park_limit_s must be above 0, got {self.park_limit_s}")


def token_array(value: object) -> NDArray[np.int32]:
    """Copy token ids into a read-only array i32[n].

    Raises:
      InvalidRequest: not a flat list of whole numbers from 0 to 2**31 - 1.
    """
    array = np.array(value)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(f"tokens must be a flat list of whole numbers, got {value!r:.80}")
    bad = np.flatnonzero((array < 0) | (array > 2**31 - 1))
    if bad.size:
        raise InvalidRequest(f"token {int(array[bad[0]])} at index {int(bad[0])} is no token id")
    tokens = array.astype(np.int32)
    tokens.flags.writeable = False
    return tokens


@attrs.frozen(kw_only=True, eq=False)
class Request:
    """One generation.

    Attributes:
      prompt: i32[n], n >= 1.
      max_tokens: tokens to generate at most; 0 only runs the prompt.
      sampling: how to choose tokens.
      want_logits: return the logits each token was chosen from.
      prompt_logits: return the logits of every prompt row; nothing of the prompt is reused then.
      system_tokens: leading prompt tokens that are the same in other conversations.
      deadline: time at which the request expires, on the clock of `plan`; None means never.
    """

    prompt: NDArray[np.int32] = attrs.field(converter=token_array)
    max_tokens: int
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    want_logits: bool = False
    prompt_logits: bool = False
    system_tokens: int = 0
    deadline: float | None = None


class FinishReason(Enum):
    """Why a request ended. `LENGTH` is reported before `CONTEXT_FULL` when both apply."""

    STOPPED = "stopped"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


@attrs.frozen(kw_only=True)
class Started:
    """A request has been given a slot."""

    request: RequestId


@attrs.frozen(kw_only=True)
class PromptProgress:
    """A piece of the prompt has been run.

    Attributes:
      request: whose.
      cached: prompt tokens that were reused and not run.
      done: prompt tokens that the session holds now.
      total: prompt tokens in all.
    """

    request: RequestId
    cached: int
    done: int
    total: int


@attrs.frozen(kw_only=True, eq=False)
class PromptLogits:
    """Logits of consecutive prompt rows: f32[n, V], row i belongs to position `start + i`."""

    request: RequestId
    start: Position
    logits: NDArray[np.float32]


@attrs.frozen(kw_only=True, eq=False)
class TokenEvent:
    """One new token.

    Attributes:
      request: whose.
      token: its id.
      position: where it stands.
      forced: chosen by `Scheduler.force`, not by the model.
      logits: f32[V] it was chosen from (or would have been, when forced), if asked for.
      finished: `LENGTH` or `CONTEXT_FULL` on the request's last event; None while it goes on. A
        caller that sees an end token or a stop string in that same token reports that instead.
    """

    request: RequestId
    token: Token
    position: Position
    forced: bool = False
    logits: NDArray[np.float32] | None = None
    finished: FinishReason | None = None


@attrs.frozen(kw_only=True)
class Finished:
    """A request has ended without a further token. `text` says why, for `FAILED` and `EXPIRED`."""

    request: RequestId
    reason: FinishReason
    text: str = ""


Event = Started | PromptProgress | PromptLogits | TokenEvent | Finished


@attrs.frozen(kw_only=True, eq=False)
class Decision:
    """What to do next.

    Attributes:
      commands: for every rank, in this order, before the step.
      step: rows to compute; None when nothing is ready.
      events: for the callers.
      wake_at: earliest time at which another `plan` could decide something new although nothing
        else has happened; None when there is no such time.
    """

    commands: tuple[Command, ...]
    step: StepPlan | None
    events: tuple[Event, ...]
    wake_at: float | None


@attrs.frozen(kw_only=True)
class SchedulerStatistics:
    """Counts at one moment, and totals since the start."""

    waiting: int
    active: int
    parked: int
    slots: int
    open_sessions: int
    kept_tokens: int
    steps: int
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    submitted: int
    overloaded: int
    rewinds: int
    evictions: int
    finished: tuple[tuple[FinishReason, int], ...]
