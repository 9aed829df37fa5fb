"""The scheduler under histories of calls that Hypothesis invents and shrinks.

The rules and the promises live in `fuzz.fuzz_scheduler.SchedulerModel`.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ds4.requests import Request, SchedulerConfig
from fuzz import fuzz_scheduler
from fuzz.fuzz_scheduler import GREEDY, N_VOCAB, SchedulerModel

configs = st.integers(1, 4).flatmap(
    lambda n: st.builds(
        SchedulerConfig,
        n_slots=st.just(n),
        n_ctx=st.integers(2, 40),
        n_vocab=st.just(N_VOCAB),
        max_rows=st.integers(n, 40),
        prefill_chunk=st.integers(1, 20),
        mixed_quantum=st.integers(1, 8),
        max_queue=st.integers(0, 3),
        max_active=st.integers(0, n),
        park_limit_s=st.sampled_from([None, 3.0]),
        min_shared_tokens=st.integers(1, 4),
    )
)
tokens = st.integers(0, N_VOCAB - 1)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=30),
    st.builds(lambda n, t: [1] * n + [t], st.integers(0, 30), tokens),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs)
    def start(self, config):
        self.model = SchedulerModel(config)

    def pick(self, data):
        """Mostly a live request, sometimes one that has ended."""
        live = self.model.live()
        everyone = list(self.model.seen)
        return data.draw(st.sampled_from(live if live and data.draw(st.booleans()) else everyone))

    has_requests = precondition(lambda self: self.model.seen)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(0, 8),
        want_logits=st.booleans(),
        prompt_logits=st.integers(0, 4),
        system=st.integers(0, 30),
        deadline=st.one_of(st.none(), st.integers(1, 12)),
    )
    def submit(self, prompt, max_tokens, want_logits, prompt_logits, system, deadline):
        self.model.submit(
            Request(
                prompt=np.array(prompt, np.int32),
                max_tokens=max_tokens,
                sampling=GREEDY,
                want_logits=want_logits,
                prompt_logits=prompt_logits == 0,
                system_tokens=min(system, len(prompt)),
                deadline=None if deadline is None else self.model.now + deadline,
            )
        )

    @rule(dt=st.sampled_from([0.0, 0.1, 1.0, 3.0]), exact=st.booleans())
    def plan(self, dt, exact):
        self.model.plan(dt=dt, exact=exact)

    @rule()
    def apply(self):
        self.model.apply()

    @rule()
    def settle(self):
        self.model.settle()

    @rule()
    def whole_step(self):
        """The usual cycle, so that histories get far."""
        for _ in range(3):
            self.model.apply()
            self.model.settle()
            self.model.plan(dt=0.1)

    @has_requests
    @rule(data=st.data(), stop=st.booleans())
    def end(self, data, stop):
        self.model.end(self.pick(data), stop=stop)

    @has_requests
    @rule(data=st.data(), on=st.booleans())
    def park(self, data, on):
        self.model.park(self.pick(data), on=on)

    @has_requests
    @rule(data=st.data(), forced=st.lists(tokens, min_size=1, max_size=3))
    def force(self, data, forced):
        self.model.force(self.pick(data), forced)

    @rule(index=st.integers(0, 7))
    def refuse(self, index):
        self.model.refuse(index)

    @precondition(lambda self: len(self.model.seen) > 4)
    @rule()
    def lose_world(self):
        self.model.lose_world()

    def teardown(self):
        if hasattr(self, "model"):
            self.model.drain()


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_promises_hold_under_any_history = SchedulerMachine.TestCase


@given(st.binary(max_size=400))
def test_promises_hold_for_any_bytes(data):
    fuzz_scheduler.test_one_input(data)


@pytest.mark.parametrize("seed", range(20))
def test_promises_hold_for_long_histories(seed):
    rng = np.random.default_rng(seed)
    fuzz_scheduler.test_one_input(rng.integers(0, 256, 3000, np.uint8).tobytes())
