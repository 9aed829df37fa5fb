"""Any sequence of calls keeps the scheduler's promises; the bytes only choose the sequence.

Invariant: whatever callers and ranks do, in any order, the scheduler (1) ends every request exactly
once and says nothing of it afterwards, (2) starts requests in the order of submission, (3) plans a
session at most once per step, at exactly the length the ranks hold, within the row limits, (4)
gives every token the history it belongs to, whatever was reused, rewound, forced or evicted, (5)
bounds its queue, (6) advances every ready stream in every step and every ready prompt within
`n_slots` steps, and (7) loses no slot: when all is over, every slot is free again.

`SchedulerModel` holds the rules; the stateful tests drive the same ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ContextOverflow, Overloaded
from ds4.ids import RequestId, SessionId, Token
from ds4.requests import (
    Decision,
    Event,
    Finished,
    FinishReason,
    PromptLogits,
    PromptProgress,
    Request,
    SchedulerConfig,
    Started,
    TokenEvent,
)
from ds4.sampling import SamplingParams
from ds4.scheduler import Scheduler
from ds4.sessions import CloseSession, Command, OpenSession, Rewind
from ds4.steps import Chunk, RowResult, StepPlan, StepResult, Want

__all__ = ["SchedulerModel", "ToyRanks", "test_one_input"]

N_VOCAB = 6  # small, so that prompts share prefixes by chance
GREEDY = SamplingParams(temperature=0.0)


def toy_token(history: Iterable[int]) -> Token:
    """The token that follows a history; every earlier token matters."""
    return Token(zlib.crc32(bytes(history)) % N_VOCAB)


def toy_logits(history: list[int]) -> NDArray[np.float32]:
    """f32[V] whose argmax is `toy_token`."""
    row = np.zeros(N_VOCAB, np.float32)
    row[toy_token(history)] = 1.0
    return row


class ToyRanks:
    """What the ranks hold, and a step that checks a plan as strictly as a real executor."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.sessions: dict[int, list[int]] = {}
        self.ever_opened: set[int] = set()
        self.last_step: int | None = None

    def command(self, command: Command, *, exact: bool) -> int:
        """Carry out one command. Returns the tokens that a rewind has kept, else 0."""
        match command:
            case OpenSession(session=session, n_ctx=n_ctx):
                assert session not in self.ever_opened, "a session id is used again"
                assert n_ctx == self.config.n_ctx
                self.ever_opened.add(session)
                self.sessions[session] = []
                assert len(self.sessions) <= self.config.n_slots
            case CloseSession(session=session):
                del self.sessions[session]
            case Rewind(session=session, length=length, dropped=dropped):
                held = self.sessions[session]
                assert 0 <= length < len(held), "a rewind that cuts nothing"
                assert dropped.tolist() == held[length:]
                del held[length if exact else length // 2 :]
                return len(held)
        return 0

    def step(self, plan: StepPlan) -> StepResult:
        """Run a plan: every entry extends its session, wanted rows get the toy token."""
        assert self.last_step is None or plan.step == self.last_step + 1
        self.last_step = plan.step
        rows: list[RowResult] = []
        for entry in plan.entries():
            held = self.sessions[entry.session]
            if isinstance(entry, Chunk):
                start, tokens = entry.start, entry.tokens.tolist()
            else:
                start, tokens = entry.position, [int(entry.token)]
            assert start == len(held), "planned at another length than the ranks hold"
            logits = []
            for token in tokens:
                held.append(token)
                logits.append(toy_logits(held))
            assert len(held) <= self.config.n_ctx
            if entry.want == Want.NOTHING:
                continue
            wanted = {Want.ALL_LOGITS: logits, Want.TOKEN_AND_LOGITS: logits[-1:]}.get(entry.want)
            rows.append(
                RowResult(
                    session=entry.session,
                    token=toy_token(held),
                    logits=None if wanted is None else np.stack(wanted),
                )
            )
        return StepResult(step=plan.step, rows=tuple(rows))


@attrs.define(eq=False)
class _Seen:
    """What the model knows of one request."""

    request: Request
    history: list[int]
    started: bool = False
    ended: FinishReason | None = None
    prompt_done: int = 0
    prompt_rows: int = 0
    parked: bool = False
    forced: list[int] = attrs.field(factory=list)
    n_tokens: int = 0
    idle_plans: int = 0


class SchedulerModel:
    """A scheduler, toy ranks, and the promises that are checked after every call."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.ranks = ToyRanks(config)
        self.seen: dict[RequestId, _Seen] = {}
        self.plan_: StepPlan | None = None
        self.pending_rewinds: dict[SessionId, int] = {}
        self.last_started = 0
        self.now = 0.0

    # Rules

    def live(self) -> list[RequestId]:
        """Requests that have not ended."""
        return [r for r, seen in self.seen.items() if seen.ended is None]

    def submit(self, request: Request) -> RequestId | None:
        """Submit a request; None when it is refused."""
        waiting = sum(not s.started for s in self.seen.values() if s.ended is None)
        try:
            request_id = self.scheduler.submit(request)
        except Overloaded:
            assert self.config.max_queue
            assert waiting >= self.config.max_queue
            return None
        except ContextOverflow:
            assert request.prompt.size >= self.config.n_ctx
            return None
        if self.config.max_queue:
            assert waiting < self.config.max_queue + self.config.n_slots
        assert request_id not in self.seen
        self.seen[request_id] = _Seen(request, request.prompt.tolist())
        self.check()
        return request_id

    def end(self, request: RequestId, *, stop: bool) -> None:
        """Cancel or stop a request, live or not."""
        was = self.seen[request].ended
        finished = self.scheduler.stop(request) if stop else self.scheduler.cancel(request)
        assert (finished is None) == (was is not None)
        if finished is not None:
            expected = FinishReason.STOPPED if stop else FinishReason.CANCELLED
            assert finished.reason is expected
            self._take([finished])
        self.check()

    def park(self, request: RequestId, *, on: bool) -> None:
        """Park or unpark a request, live or not."""
        if on:
            self.scheduler.park(request)
        else:
            self.scheduler.unpark(request)
        self.seen[request].parked = on
        self.check()

    def force(self, request: RequestId, tokens: list[int]) -> None:
        """Force tokens on a request, live or not."""
        self.scheduler.force(request, tokens)
        if self.seen[request].ended is None:
            self.seen[request].forced += tokens
        self.check()

    def override(self, request: RequestId, sampling: SamplingParams | None) -> None:
        """Change the sampling of a request, live or not."""
        self.scheduler.set_sampling(request, sampling)
        self.check()

    def plan(self, *, dt: float = 1.0, exact: bool = True) -> None:
        """Plan a step, unless one is outstanding, and carry out its commands."""
        if self.plan_ is not None:
            return
        self.now += dt
        decision = self.scheduler.plan(self.now)
        self._take(decision.events)
        self._check_deadlines(decision)
        for command in decision.commands:
            kept = self.ranks.command(command, exact=exact)
            if isinstance(command, Rewind):
                self.pending_rewinds[command.session] = kept
        self.plan_ = decision.step
        self._check_plan()
        self.check()

    def settle(self) -> None:
        """Report the outcome of every rewind."""
        for session, kept in self.pending_rewinds.items():
            self.scheduler.rewound(session, kept)
        self.pending_rewinds.clear()
        self.check()

    def apply(self) -> None:
        """Run the outstanding step and apply its result."""
        if self.plan_ is None:
            return
        plan, self.plan_ = self.plan_, None
        self._take(self.scheduler.apply(self.ranks.step(plan)))
        self.check()

    def refuse(self, index: int) -> None:
        """A rank refuses the outstanding step because of one of its entries."""
        if self.plan_ is None:
            return
        plan, self.plan_ = self.plan_, None
        entries = list(plan.entries())
        self.ranks.last_step = plan.step
        session = entries[index % len(entries)].session
        events = self.scheduler.refused(plan.step, session, "toy refusal")
        assert len(events) <= 1
        self._take(events)
        self.check()

    def lose_world(self) -> None:
        """All ranks are gone."""
        live = set(self.live())
        events = self.scheduler.fail_all("toy ranks lost")
        assert {e.request for e in events} == live
        self._take(events)
        assert not self.live()
        self.plan_ = None
        self.pending_rewinds.clear()
        self.ranks.sessions.clear()
        self.ranks.last_step = None
        self.check()

    def drain(self) -> None:
        """Let everything finish, and prove that nothing was lost."""
        for request in self.live():
            self.park(request, on=False)
        work = sum(s.request.prompt.size + s.request.max_tokens for s in self.seen.values())
        for _ in range(2 * int(work) + 4 * len(self.seen) + 8):
            if not self.live() and self.plan_ is None:
                break
            self.apply()
            self.settle()
            self.plan()
            self.settle()
        self.settle()
        assert not self.live(), "a request never ends"
        assert all(seen.ended is not None for seen in self.seen.values())
        for slot in self.scheduler.slots.slots:
            assert slot.is_idle, "a slot is lost"
        statistics = self.scheduler.statistics()
        assert statistics.active == statistics.waiting == statistics.parked == 0
        assert sum(n for _, n in statistics.finished) == statistics.submitted == len(self.seen)

    # Checks

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            seen = self.seen[event.request]
            assert seen.ended is None, "an event after the end"
            match event:
                case Started():
                    assert not seen.started
                    assert event.request > self.last_started, "not in the order of submission"
                    self.last_started = event.request
                    seen.started = True
                case PromptProgress():
                    assert seen.started
                    assert event.total == len(seen.request.prompt)
                    assert event.cached < event.total
                    seen.prompt_rows += 1
                    assert max(seen.prompt_done, event.cached) < event.done <= event.total
                    seen.prompt_done = event.done
                case PromptLogits():
                    assert seen.request.prompt_logits
                    for i, row in enumerate(event.logits):
                        prefix = seen.request.prompt[: event.start + i + 1].tolist()
                        assert row.tolist() == toy_logits(prefix).tolist()
                case TokenEvent():
                    self._token(seen, event)
                case Finished():
                    seen.ended = event.reason
                    if event.reason is FinishReason.LENGTH:
                        assert seen.request.max_tokens == 0

    def _token(self, seen: _Seen, event: TokenEvent) -> None:
        assert seen.prompt_done == len(seen.request.prompt)
        assert event.position == len(seen.history)
        assert event.forced == bool(seen.forced)
        expected = seen.forced.pop(0) if seen.forced else toy_token(seen.history)
        assert event.token == expected, "a token of another history"
        assert (event.logits is not None) == seen.request.want_logits
        if event.logits is not None:
            assert event.logits.tolist() == toy_logits(seen.history).tolist()
        seen.history.append(event.token)
        seen.n_tokens += 1
        assert len(seen.history) <= self.config.n_ctx
        if seen.n_tokens == seen.request.max_tokens:
            assert event.finished is FinishReason.LENGTH
        elif len(seen.history) == self.config.n_ctx:
            assert event.finished is FinishReason.CONTEXT_FULL
        else:
            assert event.finished is None
        seen.ended = event.finished

    def _check_deadlines(self, decision: Decision) -> None:
        for event in decision.events:
            if isinstance(event, Finished) and event.reason is FinishReason.EXPIRED:
                seen = self.seen[event.request]
                deadline = seen.request.deadline
                assert seen.parked or (deadline is not None and deadline <= self.now)
        for request in self.live():
            deadline = self.seen[request].request.deadline
            assert deadline is None or deadline > self.now
        if decision.wake_at is not None:
            assert decision.wake_at > self.now

    def _check_plan(self) -> None:
        plan = self.plan_
        rows_of: dict[SessionId, int] = {}
        if plan is not None:
            assert 0 < plan.n_rows <= self.config.max_rows
            prompt_rows = sum(chunk.n_rows for chunk in plan.prefill)
            assert all(chunk.n_rows <= self.config.prefill_chunk for chunk in plan.prefill)
            for chunk in plan.prefill:
                self._check_system_stop(chunk)
            if plan.decode:
                assert prompt_rows <= self.config.mixed_quantum
            rows_of = {entry.session: entry.n_rows for entry in plan.entries()}
        served = 0
        for request in self.live():
            seen = self.seen[request]
            session = self.scheduler.session_of(request)
            assert (session is not None) == seen.started
            if session is None or seen.parked or session in self.pending_rewinds:
                assert session not in rows_of
                seen.idle_plans = 0
                continue
            if session in rows_of:
                served += 1
                seen.idle_plans = 0
                continue
            assert seen.prompt_done < len(seen.request.prompt), "a running stream was left out"
            seen.idle_plans += 1
            assert seen.idle_plans <= 2 * self.config.n_slots, "a prompt starves"
        assert served == len(rows_of), "rows of a request that is not ready"

    def _check_system_stop(self, chunk: Chunk) -> None:
        for request in self.live():
            if self.scheduler.session_of(request) == chunk.session:
                stop = self.seen[request].request.system_tokens
                end = chunk.start + chunk.n_rows
                assert end <= stop or chunk.start >= stop, "a chunk crosses the system prompt"

    def check(self) -> None:
        """Promises that hold at any time."""
        statistics = self.scheduler.statistics()
        live = self.live()
        started = [r for r in live if self.seen[r].started]
        assert statistics.active == len(started)
        assert statistics.active <= (self.config.max_active or self.config.n_slots)
        assert statistics.waiting == len(live) - len(started)
        assert statistics.submitted == len(self.seen)
        sessions = [s.session for s in self.scheduler.slots.slots if s.session is not None]
        assert len(sessions) == len(set(sessions))
        owners = [s.request for s in self.scheduler.slots.slots if s.request is not None]
        assert sorted(owners) == sorted(started), "a slot is lost or shared"
        in_flight = set() if self.plan_ is None else {e.session for e in self.plan_.entries()}
        for slot in self.scheduler.slots.slots:
            assert slot.in_flight == (slot.session in in_flight)
            assert slot.rewinding == (slot.session in self.pending_rewinds)
            if slot.session is None:
                assert not len(slot.timeline)
            elif not slot.rewinding:
                assert slot.timeline.tokens.tolist() == self.ranks.sessions[slot.session]


class _Bytes:
    """Small numbers from fuzz input; zeros when it is used up."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def __bool__(self) -> bool:
        return self.at < len(self.data)

    def below(self, n: int) -> int:
        value = self.data[self.at] % n if self else 0
        self.at += 1
        return value


def _request(source: _Bytes, now: float) -> Request:
    flags = source.below(32)
    n = 1 + source.below(20)
    # Mostly one token, so that prompts share long prefixes.
    prompt = [source.below(N_VOCAB) if flags & 1 else 1 for _ in range(n - 1)]
    prompt.append(source.below(N_VOCAB))
    return Request(
        prompt=np.array(prompt, np.int32),
        max_tokens=source.below(6),
        sampling=GREEDY,
        want_logits=bool(flags & 2),
        prompt_logits=flags & 12 == 12,
        system_tokens=source.below(n + 1),
        deadline=now + 1 + source.below(12) if flags & 16 else None,
    )


def test_one_input(data: bytes) -> None:
    """Run one sequence of calls. Raises AssertionError when a promise is broken."""
    source = _Bytes(data)
    n_slots = 1 + source.below(4)
    model = SchedulerModel(
        SchedulerConfig(
            n_slots=n_slots,
            n_ctx=2 + source.below(24),
            n_vocab=N_VOCAB,
            max_rows=n_slots + source.below(24),
            prefill_chunk=1 + source.below(16),
            mixed_quantum=1 + source.below(8),
            max_queue=source.below(4),
            max_active=source.below(n_slots + 1),
            park_limit_s=[None, 3.0][source.below(2)],
            min_shared_tokens=1 + source.below(4),
        )
    )
    while source:
        op = source.below(16)
        requests = list(model.seen)
        some = requests[-1 - source.below(min(len(requests), 8))] if requests else None
        if op <= 2 or some is None:
            model.submit(_request(source, model.now))
        elif op == 3:
            model.end(some, stop=bool(source.below(2)))
        elif op == 4:
            model.park(some, on=True)
        elif op == 5:
            model.park(some, on=False)
        elif op == 6:
            model.force(some, [source.below(N_VOCAB) for _ in range(1 + source.below(3))])
        elif op == 7:
            model.override(some, [None, GREEDY][source.below(2)])
        elif op <= 10:
            model.plan(dt=float(source.below(3)), exact=source.below(4) != 0)
        elif op <= 13:
            model.apply()
        elif op == 14:
            model.settle()
        elif source.below(4):
            model.refuse(source.below(8))
        else:
            model.lose_world()
    model.drain()
