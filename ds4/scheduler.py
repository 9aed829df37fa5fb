"""The scheduler: which rows the next step computes. Pure: no clock, socket, task or device.

`submit`, `cancel`, `park`, `force` and the others note what callers want; `plan(now)` decides the
next step, `apply(result)` takes its outcome. One step is outstanding at a time (lockstep), so every
decision takes effect at a step boundary and no rank ever decides anything by itself.

Rules, all tested: requests start in the order they were submitted; a request ends exactly once, and
nothing is said of it afterwards; every ready request advances, whatever the others do; a session is
in a step at most once, at exactly the length its executors have.

How stop conditions work: the scheduler knows token counts only. The engine looks at each token
event and calls `stop` when it has seen enough; a token that was computed meanwhile is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ContextOverflow, InvalidRequest, Overloaded, RemoteProtocolError
from ds4.ids import Position, RequestId, SessionId, StepId, Token
from ds4.requests import (
    Decision,
    Event,
    Finished,
    FinishReason,
    PromptLogits,
    PromptProgress,
    Request,
    SchedulerConfig,
    SchedulerStatistics,
    Started,
    TokenEvent,
    token_array,
)
from ds4.sampling import SamplingParams
from ds4.sessions import Command, Slot, SlotTable
from ds4.steps import Chunk, Decode, RowResult, StepPlan, StepResult, Want

__all__ = [
    "Decision",
    "Event",
    "FinishReason",
    "Finished",
    "PromptLogits",
    "PromptProgress",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStatistics",
    "Started",
    "TokenEvent",
]

_MIN_SHARE_TOKENS = 16  # smallest useful slice of a prompt; arbitrary


@attrs.define(eq=False)
class _Running:
    """A request between `submit` and its end. `slot` is None while it waits."""

    id: RequestId
    request: Request
    slot: Slot | None = None
    cached: int = 0
    pending: Token | None = None  # the last token of the request, not fed yet
    n_generated: int = 0
    forced: deque[Token] = attrs.field(factory=deque)
    sampling: SamplingParams | None = None
    parked: bool = False
    parked_at: float | None = None
    last_served: int = 0  # step in which it had rows last, or was started


def _shares(needs: Sequence[int], budget: int, chunk: int) -> list[int]:
    """Divide `budget` prompt rows: equal shares in order, then what is left in order.

    A share is at least `_MIN_SHARE_TOKENS`, so with many prompts some get nothing this time; the
    caller puts those first the next time.
    """
    share = max(budget // max(len(needs), 1), _MIN_SHARE_TOKENS)
    given = []
    for need in needs:
        given.append(min(need, share, chunk, budget))
        budget -= given[-1]
    for i, need in enumerate(needs):
        more = min(min(need, chunk) - given[i], budget)
        given[i] += more
        budget -= more
    return given


class Scheduler:
    """Continuous batching over a fixed number of slots.

    Args:
      config: limits.
      first_step: id of the first step.
    """

    def __init__(self, config: SchedulerConfig, *, first_step: int = 1) -> None:
        self.config = config
        self.slots = SlotTable(
            config.n_slots, config.n_ctx, min_shared_tokens=config.min_shared_tokens
        )
        self._waiting: dict[RequestId, _Running] = {}
        self._active: dict[RequestId, _Running] = {}
        self._next_id = 1
        self._next_step = first_step
        self._outstanding: StepPlan | None = None
        self._steps = 0
        self._prompt_tokens = 0
        self._reused_tokens = 0
        self._generated_tokens = 0
        self._overloaded = 0
        self._finished = dict.fromkeys(FinishReason, 0)

    # What callers want

    def submit(self, request: Request) -> RequestId:
        """Queue a request.

        Raises:
          InvalidRequest: empty prompt, a token id outside the vocabulary, or a wrong number.
          ContextOverflow: the prompt leaves no room for a token.
          Overloaded: the queue is full.
        """
        prompt = request.prompt
        if prompt.size == 0:
            raise InvalidRequest("the prompt has no tokens")
        self._check_tokens(prompt)
        if request.max_tokens < 0:
            raise InvalidRequest(f"max_tokens must be >= 0, got {request.max_tokens}")
        if not 0 <= request.system_tokens <= prompt.size:
            raise InvalidRequest(
                f"system_tokens must be from 0 to {prompt.size}, got {request.system_tokens}"
            )
        if prompt.size >= self.config.n_ctx:
            raise ContextOverflow(int(prompt.size), self.config.n_ctx)
        limit = self.config.max_queue
        if limit and len(self._waiting) >= limit + self._n_startable():
            self._overloaded += 1
            raise Overloaded(f"{len(self._waiting)} requests are waiting, the limit is {limit}")
        request_id = RequestId(self._next_id)
        self._next_id += 1
        self._waiting[request_id] = _Running(request_id, request)
        return request_id

    def cancel(self, request: RequestId) -> Finished | None:
        """End a request now. Returns None when it has ended already.

        What is computed of it in the outstanding step is dropped; the finished part of its prompt
        stays in the slot for reuse.
        """
        return self._end(request, FinishReason.CANCELLED)

    def stop(self, request: RequestId) -> Finished | None:
        """End a request because its caller has seen enough. Returns None when it has ended."""
        return self._end(request, FinishReason.STOPPED)

    def park(self, request: RequestId) -> None:
        """Leave a request out of further steps until `unpark`; it keeps its slot.

        For callers whose token channel is full. A request that has ended is ignored.
        """
        if (running := self._find(request)) is not None:
            running.parked = True

    def unpark(self, request: RequestId) -> None:
        """Let a parked request go on. A request that has ended is ignored."""
        if (running := self._find(request)) is not None:
            running.parked = False
            running.parked_at = None

    def force(self, request: RequestId, tokens: Iterable[int]) -> None:
        """Make the next sampled tokens of a request these, in order, whatever the model chooses.

        They count as generated tokens. A request that has ended is ignored.

        Raises:
          InvalidRequest: a token id outside the vocabulary.
        """
        if (running := self._find(request)) is not None:
            array = token_array(list(tokens))
            self._check_tokens(array)
            running.forced.extend(Token(t) for t in array.tolist())

    def set_sampling(self, request: RequestId, sampling: SamplingParams | None) -> None:
        """Use other sampling from the next planned step on; None goes back to the request's own.

        A request that has ended is ignored.
        """
        if (running := self._find(request)) is not None:
            running.sampling = sampling

    # Steps

    def plan(self, now: float) -> Decision:
        """Decide the next step.

        Args:
          now: seconds on any clock that does not run backwards; the one of `Request.deadline`.

        Raises:
          RuntimeError: a step is outstanding.
        """
        if self._outstanding is not None:
            raise RuntimeError(f"step {self._outstanding.step} has not been applied")
        events: list[Event] = self._expire(now)
        commands: list[Command] = list(self.slots.closing())
        for running in list(self._waiting.values())[: self._n_startable()]:
            commands += self._start(running)
            events.append(Started(request=running.id))
        step = self._compose()
        return Decision(
            commands=tuple(commands), step=step, events=tuple(events), wake_at=self._wake_at()
        )

    def apply(self, result: StepResult) -> tuple[Event, ...]:
        """Take the outcome of the outstanding step.

        Returns:
          Events in row order.

        Raises:
          RemoteProtocolError: the result is not one of the outstanding step; nothing is changed.
        """
        plan = self._outstanding
        if plan is None or result.step != plan.step:
            expected = "none" if plan is None else plan.step
            raise RemoteProtocolError(f"result of step {result.step}, outstanding is {expected}")
        rows = self._check_rows(plan, result.rows)
        self._outstanding = None
        events: list[Event] = []
        for entry in plan.entries():
            slot = self.slots.by_session(entry.session)
            slot.in_flight = False
            slot.timeline.extend(entry.tokens if isinstance(entry, Chunk) else [entry.token])
            if isinstance(entry, Chunk):
                self._prompt_tokens += entry.n_rows
            if slot.request is not None:
                running = self._active[slot.request]
                events += self._advance(running, slot, entry, rows.get(entry.session))
        return tuple(events)

    def refused(self, step: StepId, session: SessionId, text: str) -> tuple[Event, ...]:
        """A rank refused the outstanding step before computing anything, because of one session.

        That session's request fails and the session is closed; the others are planned again.
        """
        if self._outstanding is None or self._outstanding.step != step:
            raise RemoteProtocolError(f"refusal of step {step}, which is not outstanding")
        if session not in [entry.session for entry in self._outstanding.entries()]:
            raise RemoteProtocolError(f"refusal of step {step} for session {session}, not in it")
        for entry in self._outstanding.entries():
            self.slots.by_session(entry.session).in_flight = False
        self._outstanding = None
        slot = self.slots.by_session(session)
        events: list[Event] = []
        if slot.request is not None:
            ended = self._end(slot.request, FinishReason.FAILED, text)
            events += [] if ended is None else [ended]
        self.slots.discard(slot)
        return tuple(events)

    def rewound(self, session: SessionId, length: int) -> None:
        """Report the outcome of a `Rewind`.

        Args:
          session: whose.
          length: tokens the ranks have kept, at most as many as the command allowed. The prompt is
            run from there.

        Raises:
          RemoteProtocolError: no rewind of that session was asked for, or more was kept.
        """
        slot = self.slots.by_session(session)
        if not slot.rewinding:
            raise RemoteProtocolError(f"session {session} was not asked to rewind")
        asked = len(slot.timeline)
        if not 0 <= length <= asked:
            raise RemoteProtocolError(
                f"session {session} was to keep at most {asked} tokens and has kept {length}"
            )
        slot.rewinding = False
        slot.timeline.cut(length)
        if slot.request is not None:
            self._active[slot.request].cached = length
            self._reused_tokens -= asked - length

    def fail_all(self, text: str) -> tuple[Event, ...]:
        """The world is lost: end every request and forget every session.

        No close commands follow, since there is no rank left to take them.
        """
        self._outstanding = None
        for slot in self.slots.slots:
            slot.in_flight = False
        ended = [
            self._end(request, FinishReason.FAILED, text)
            for request in [*self._active, *self._waiting]
        ]
        for slot in self.slots.slots:
            self.slots.discard(slot)
        self.slots.closing()  # drops the commands
        return tuple(event for event in ended if event is not None)

    def session_of(self, request: RequestId) -> SessionId | None:
        """Session that a request runs in now; None while it waits or after its end."""
        running = self._find(request)
        return None if running is None or running.slot is None else running.slot.session

    def statistics(self) -> SchedulerStatistics:
        """Snapshot of all counts."""
        slots = self.slots.slots
        return SchedulerStatistics(
            waiting=len(self._waiting),
            active=len(self._active),
            parked=sum(r.parked for r in self._active.values()),
            slots=len(slots),
            open_sessions=sum(slot.session is not None for slot in slots),
            kept_tokens=sum(len(slot.timeline) for slot in slots),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            generated_tokens=self._generated_tokens,
            submitted=self._next_id - 1,
            overloaded=self._overloaded,
            rewinds=self.slots.rewinds,
            evictions=self.slots.evictions,
            finished=tuple(self._finished.items()),
        )

    # Inside

    def _check_tokens(self, tokens: NDArray[np.integer]) -> None:
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.config.n_vocab))
        if bad.size:
            raise InvalidRequest(
                f"token {int(tokens[bad[0]])} at index {int(bad[0])} is outside the vocabulary of"
                f" {self.config.n_vocab}"
            )

    def _find(self, request: RequestId) -> _Running | None:
        if not 1 <= request < self._next_id:
            raise InvalidRequest(f"request {request} was never submitted")
        return self._active.get(request) or self._waiting.get(request)

    def _n_startable(self) -> int:
        limit = self.config.max_active or self.config.n_slots
        return min(self.slots.n_idle(), limit - len(self._active))

    def _end(self, request: RequestId, reason: FinishReason, text: str = "") -> Finished | None:
        running = self._find(request)
        if running is None:
            return None
        self._forget(running, reason)
        return Finished(request=request, reason=reason, text=text)

    def _forget(self, running: _Running, reason: FinishReason) -> None:
        self._waiting.pop(running.id, None)
        self._active.pop(running.id, None)
        self._finished[reason] += 1
        if running.slot is not None:
            self.slots.release(running.slot)

    def _expire(self, now: float) -> list[Event]:
        events: list[Event] = []
        for running in [*self._active.values(), *self._waiting.values()]:
            if running.parked and running.parked_at is None:
                running.parked_at = now
            deadline, parked_until = self._limits(running)
            if deadline is not None and now >= deadline:
                text = "its deadline has passed"
            elif parked_until is not None and now >= parked_until:
                text = f"its reader has taken nothing for {self.config.park_limit_s:g} s"
            else:
                continue
            ended = self._end(running.id, FinishReason.EXPIRED, text)
            assert ended is not None
            events.append(ended)
        return events

    def _limits(self, running: _Running) -> tuple[float | None, float | None]:
        """Times at which a request expires: by its deadline, and by being parked."""
        limit = self.config.park_limit_s
        if limit is None or running.parked_at is None:
            return running.request.deadline, None
        return running.request.deadline, running.parked_at + limit

    def _wake_at(self) -> float | None:
        running = [*self._active.values(), *self._waiting.values()]
        return min((t for r in running for t in self._limits(r) if t is not None), default=None)

    def _start(self, running: _Running) -> tuple[Command, ...]:
        request = running.request
        assignment = self.slots.assign(
            running.id,
            request.prompt,
            system_tokens=request.system_tokens,
            max_reuse=0 if request.prompt_logits else int(request.prompt.size) - 1,
        )
        assert assignment is not None  # the caller counted the idle slots
        del self._waiting[running.id]
        self._active[running.id] = running
        running.slot = assignment.slot
        running.last_served = self._steps - 1
        running.cached = assignment.reused
        self._reused_tokens += assignment.reused
        return assignment.commands

    def _compose(self) -> StepPlan | None:
        ready: list[tuple[_Running, Slot]] = []
        for running in self._active.values():
            assert running.slot is not None
            if not running.parked and not running.slot.rewinding:
                ready.append((running, running.slot))
        decoding = [pair for pair in ready if pair[0].pending is not None]
        prompts = [pair for pair in ready if pair[0].pending is None]
        # Least recently served first; `sort` keeps the order of submission among equals. A new
        # prompt counts as served just before it starts, or new ones could keep an old one waiting.
        prompts.sort(key=lambda pair: pair[0].last_served)
        budget = self.config.max_rows - len(decoding)
        if decoding:
            budget = min(budget, self.config.mixed_quantum)
        needs = [self._next_stop(r.request, len(slot.timeline)) for r, slot in prompts]
        shares = _shares(needs, budget, self.config.prefill_chunk)
        prefill = tuple(
            self._chunk(running, slot, n)
            for (running, slot), n in zip(prompts, shares, strict=True)
            if n
        )
        decode = tuple(self._decode(running, slot) for running, slot in decoding)
        if not prefill and not decode:
            return None
        self._outstanding = StepPlan(step=StepId(self._next_step), prefill=prefill, decode=decode)
        self._next_step += 1
        self._steps += 1
        return self._outstanding

    @staticmethod
    def _next_stop(request: Request, done: int) -> int:
        """Prompt tokens up to the next place where a chunk must end.

        A chunk ends with the system prompt, because executors can go back to the end of a chunk,
        and that is where the next conversation will branch off.
        """
        if done < request.system_tokens:
            return request.system_tokens - done
        return int(request.prompt.size) - done

    def _serve(self, running: _Running, slot: Slot) -> SessionId:
        assert slot.session is not None
        slot.in_flight = True
        running.last_served = self._steps
        return slot.session

    def _chunk(self, running: _Running, slot: Slot, n: int) -> Chunk:
        request = running.request
        start = len(slot.timeline)
        is_last = start + n == request.prompt.size
        want = self._want(running) if is_last and request.max_tokens else Want.NOTHING
        return Chunk(
            session=self._serve(running, slot),
            start=Position(start),
            tokens=request.prompt[start : start + n],
            want=Want.ALL_LOGITS if request.prompt_logits else want,
            sampling=running.sampling or request.sampling,
        )

    def _decode(self, running: _Running, slot: Slot) -> Decode:
        assert running.pending is not None
        return Decode(
            session=self._serve(running, slot),
            position=Position(len(slot.timeline)),
            token=running.pending,
            want=self._want(running),
            sampling=running.sampling or running.request.sampling,
        )

    @staticmethod
    def _want(running: _Running) -> int:
        if running.request.want_logits:
            return Want.TOKEN_AND_LOGITS
        # A forced token needs no logits, so the step can skip the output head for this row.
        return Want.NOTHING if running.forced else Want.TOKEN

    def _check_rows(self, plan: StepPlan, rows: Sequence[RowResult]) -> dict[SessionId, RowResult]:
        wanted = [entry for entry in plan.entries() if entry.want != Want.NOTHING]
        expected, found = [e.session for e in wanted], [row.session for row in rows]
        if expected != found:
            raise RemoteProtocolError(
                f"step {plan.step} has results for sessions {found}, expected {expected}"
            )
        for entry, row in zip(wanted, rows, strict=True):
            where = f"step {plan.step}, session {entry.session}"
            if row.token is None or not 0 <= row.token < self.config.n_vocab:
                raise RemoteProtocolError(f"{where}: {row.token} is no token")
            n = {Want.TOKEN: 0, Want.TOKEN_AND_LOGITS: 1}.get(entry.want, entry.n_rows)
            got = 0 if row.logits is None else row.logits.shape[0]
            if n != got:
                raise RemoteProtocolError(f"{where}: logits of {got} rows, expected {n}")
        return {row.session: row for row in rows}

    def _advance(
        self, running: _Running, slot: Slot, entry: Chunk | Decode, row: RowResult | None
    ) -> list[Event]:
        request = running.request
        events: list[Event] = []
        if isinstance(entry, Chunk):
            events.append(
                PromptProgress(
                    request=running.id,
                    cached=running.cached,
                    done=len(slot.timeline),
                    total=int(request.prompt.size),
                )
            )
            if request.prompt_logits:
                assert row is not None  # `_check_rows` has seen it, and its logits
                assert row.logits is not None
                events.append(
                    PromptLogits(request=running.id, start=entry.start, logits=row.logits)
                )
            if len(slot.timeline) < request.prompt.size:
                return events
            if not request.max_tokens:
                self._forget(running, FinishReason.LENGTH)
                return [*events, Finished(request=running.id, reason=FinishReason.LENGTH)]
        forced = bool(running.forced)
        if forced:
            token = running.forced.popleft()
        else:
            assert row is not None  # `_check_rows` has seen it, and its token
            assert row.token is not None
            token = row.token
        running.pending = token
        running.n_generated += 1
        self._generated_tokens += 1
        finished: FinishReason | None = None
        if running.n_generated >= request.max_tokens:
            finished = FinishReason.LENGTH
        elif len(slot.timeline) + 1 >= self.config.n_ctx:
            # Prompt and output together never exceed the context, the last token included.
            finished = FinishReason.CONTEXT_FULL
        if finished is not None:
            self._forget(running, finished)
        logits = row.logits if request.want_logits and row is not None else None
        return [
            *events,
            TokenEvent(
                request=running.id,
                token=token,
                position=Position(len(slot.timeline)),
                forced=forced,
                logits=None if logits is None else logits[-1],
                finished=finished,
            ),
        ]
