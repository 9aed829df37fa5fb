"""A scheduler with ranks that always answer, for the tests of single calls."""

import numpy as np

from ds4.requests import Finished, Request, SchedulerConfig, TokenEvent
from ds4.sampling import SamplingParams
from ds4.scheduler import Scheduler
from ds4.sessions import Rewind
from ds4.steps import RowResult, StepResult, Want

V = 1000
GREEDY = SamplingParams(temperature=0.0)


class World:
    """A scheduler whose ranks always answer with the same token."""

    def __init__(self, token=5, **limits):
        limits.setdefault("n_slots", 2)
        self.scheduler = Scheduler(SchedulerConfig(n_vocab=V, **limits))
        self.token = token
        self.now = 0.0

    def submit(self, prompt, max_tokens=100, **options):
        return self.scheduler.submit(Request(prompt=prompt, max_tokens=max_tokens, **options))

    def plan(self, dt=0.0):
        self.now += dt
        decision = self.scheduler.plan(self.now)
        for command in decision.commands:
            if isinstance(command, Rewind):
                self.scheduler.rewound(command.session, command.length)
        return decision

    def result(self, plan):
        rows = []
        for entry in plan.entries():
            n = {Want.TOKEN_AND_LOGITS: 1, Want.ALL_LOGITS: entry.n_rows}.get(entry.want)
            logits = None if n is None else np.zeros((n, V), np.float32)
            if entry.want != Want.NOTHING:
                rows.append(RowResult(session=entry.session, token=self.token, logits=logits))
        return StepResult(step=plan.step, rows=tuple(rows))

    def step(self):
        """Plan and apply; plan again when a rewind had to be waited for."""
        decision = self.plan()
        if decision.step is None:
            return self.plan_and_apply()
        return decision.step, [*decision.events, *self.scheduler.apply(self.result(decision.step))]

    def plan_and_apply(self):
        decision = self.plan()
        if decision.step is None:
            return None, list(decision.events)
        return decision.step, [*decision.events, *self.scheduler.apply(self.result(decision.step))]

    def run(self, request):
        """Step until a request ends; returns its events."""
        events = []
        for _ in range(1000):
            _, new = self.step()
            events += [e for e in new if e.request == request]
            last = events[-1] if events else None
            if isinstance(last, Finished) or (isinstance(last, TokenEvent) and last.finished):
                return events
        raise AssertionError("no end")


def kinds(events):
    return [type(e).__name__ for e in events]


def rows(plan):
    return [(c.session, c.start, c.n_rows) for c in plan.prefill], [
        (d.session, d.position, d.token) for d in plan.decode
    ]
