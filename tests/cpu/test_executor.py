from __future__ import annotations

import numpy as np
import pytest

from ds4.cpu.executor import MAX_ROWS, CpuExecutor
from ds4.errors import ConfigError, InvalidRequest, SnapshotError
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.reference import ReferenceModel
from ds4.model.deepseek4.rounding import Rounding
from ds4.steps import Chunk, Decode, StepPlan, Want
from tests.conftest import load_oracle, relative_error
from tests.modelmaker import metadata, write_model

TIGHT = 1e-5  # float32 sums against an independent float32 engine; a wrong choice shows as 1e-2
NEAR_TIE = 1e-5


@pytest.fixture(scope="module", params=["v4-tiny-f32", "v4-tiny-q2"])
def case(request):
    oracle = load_oracle(request.param)
    executor = CpuExecutor(GGUFFile.open(oracle.path), threads=1)
    yield oracle, executor
    executor.close()


class Timeline:
    """One session driven token by token or in chunks."""

    sessions = iter(range(1, 10**6))

    def __init__(self, executor, n_ctx=1024):
        self.executor = executor
        self.id = next(self.sessions)
        executor.open_session(self.id, n_ctx)

    def feed(self, ids, chunk=None, want=Want.ALL_LOGITS):
        out = []
        chunk = chunk or len(ids)
        for at in range(0, len(ids), chunk):
            start = self.executor.session_length(self.id)
            part = Chunk(session=self.id, start=start, tokens=ids[at : at + chunk], want=want)
            rows = self.executor.step(StepPlan(step=1, prefill=(part,))).rows
            out.extend(row.logits for row in rows)
        return np.concatenate(out) if out else None

    def decode(self, token):
        position = self.executor.session_length(self.id)
        entry = Decode(session=self.id, position=position, token=token, want=Want.TOKEN_AND_LOGITS)
        row = self.executor.step(StepPlan(step=1, decode=(entry,))).rows[0]
        return row.token, row.logits[0]


def assert_same_bits(found, expected):
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_logits_agree_with_an_independent_engine_at_every_position(case):
    oracle, executor = case
    for i in oracle.indices():
        logits = Timeline(executor).feed(oracle.ids(i))
        error = relative_error(logits, oracle.reference[f"logits_{i}"])
        ties = np.minimum(
            oracle.reference[f"router_margin_{i}"], oracle.reference[f"index_margin_{i}"]
        )
        first_tie = int(np.argmax(ties < NEAR_TIE)) if (ties < NEAR_TIE).any() else len(error)
        assert error[:first_tie].max() < TIGHT, f"prompt {i} at {int(error.argmax())}"


def test_greedy_continuations_agree_with_an_independent_engine(case):
    oracle, executor = case
    for i in oracle.indices():
        if f"greedy_{i}" not in oracle.reference:
            continue
        timeline = Timeline(executor)
        token = int(timeline.feed(oracle.ids(i))[-1].argmax())
        found = []
        for _ in oracle.reference[f"greedy_{i}"]:
            found.append(token)
            token, _ = timeline.decode(token)
        assert found == oracle.reference[f"greedy_{i}"].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 5, 127, 129])
def test_any_chunking_of_a_prompt_gives_the_same_bits(case, chunk):
    oracle, executor = case
    ids = oracle.ids(5)
    assert_same_bits(Timeline(executor).feed(ids, chunk), Timeline(executor).feed(ids))


def test_a_prompt_longer_than_one_pass_gives_the_same_bits_as_its_pieces(case):
    oracle, executor = case
    ids = oracle.ids(oracle.indices()[-1])
    assert len(ids) > MAX_ROWS
    assert_same_bits(Timeline(executor).feed(ids), Timeline(executor).feed(ids, 100))


def test_token_by_token_decode_gives_the_same_bits_as_a_prompt(case):
    oracle, executor = case
    ids = oracle.ids(5)
    timeline = Timeline(executor)
    stepwise = np.stack([timeline.decode(token)[1] for token in ids])
    assert_same_bits(stepwise, Timeline(executor).feed(ids))


@pytest.mark.parametrize("position", [3, 4, 5, 127, 128, 130])
def test_a_restored_snapshot_continues_with_the_same_bits(case, position):
    oracle, executor = case
    ids = oracle.ids(5)
    whole = Timeline(executor).feed(ids)
    first = Timeline(executor)
    first.feed(ids[:position])
    data = executor.snapshot(first.id)
    first.feed(ids[position : position + 7])  # must not leak into the snapshot
    second = Timeline(executor)
    second.feed(ids[::-1][:50])  # what a restore replaces
    executor.restore(second.id, data)
    assert executor.session_tokens(second.id) == ids[:position]
    assert_same_bits(second.feed(ids[position:]), whole[position:])


@pytest.mark.parametrize("length", [0, 3, 4, 64, 100, 127, 128, 129, 143])
def test_a_rewound_session_continues_as_if_the_rest_had_never_been(case, length):
    oracle, executor = case
    ids = oracle.ids(5)
    whole = Timeline(executor).feed(ids)
    timeline = Timeline(executor)
    timeline.feed(ids, 50)
    timeline.feed(ids[::-1][:30])
    kept = executor.rewind(timeline.id, length)
    assert kept <= length
    assert kept >= length // 50 * 50
    assert executor.session_tokens(timeline.id) == ids[:kept]
    assert_same_bits(timeline.feed(ids[kept:]), whole[kept:])


def test_mixed_batches_give_every_session_the_bits_it_has_alone(case):
    oracle, executor = case
    prompts = [oracle.ids(i) for i in range(4)]
    alone = [Timeline(executor).feed(ids) for ids in prompts]
    lines = [Timeline(executor) for _ in prompts]
    done = [0] * len(prompts)
    pieces = [[] for _ in prompts]
    rng = np.random.default_rng(3)
    while any(done[i] < len(ids) for i, ids in enumerate(prompts)):
        chunks, decodes = [], []
        for i, ids in enumerate(prompts):
            left = len(ids) - done[i]
            n = int(min(left, rng.integers(0, 40)))
            if n == 0:
                continue
            common = {"session": lines[i].id, "want": Want.ALL_LOGITS}
            if n == 1:
                decodes.append(Decode(position=done[i], token=ids[done[i]], **common))
            else:
                chunks.append(Chunk(start=done[i], tokens=ids[done[i] : done[i] + n], **common))
            done[i] += n
        if chunks or decodes:
            plan = StepPlan(step=1, prefill=tuple(chunks), decode=tuple(decodes))
            for row in executor.step(plan).rows:
                pieces[[line.id for line in lines].index(row.session)].append(row.logits)
    for found, expected in zip(pieces, alone, strict=True):
        assert_same_bits(np.concatenate(found), expected)


def test_the_rounded_path_agrees_with_the_rounded_reference(q2_oracle):
    # A prompt on which no activation lies near a rounding boundary of both: a flip there would
    # show as 1e-4, a wrong rounding as 1e-2.
    ids = q2_oracle.ids(3)
    with GGUFFile.open(q2_oracle.path) as file:
        reference = ReferenceModel(file, Rounding.VENDOR)
        expected = reference.forward(reference.new_state(), ids)
    executor = CpuExecutor(GGUFFile.open(q2_oracle.path), rounding=Rounding.VENDOR, threads=1)
    exact = CpuExecutor(GGUFFile.open(q2_oracle.path), threads=1)
    found = Timeline(executor).feed(ids)
    assert relative_error(found, expected).max() < TIGHT
    # The switch does something: rounding moves the logits by about 4 % in the median.
    assert 0.005 < np.median(relative_error(found, Timeline(exact).feed(ids))) < 0.2
    assert_same_bits(found, Timeline(executor).feed(ids, 37))


def test_any_consistent_shape_runs(tmp_path):
    ratios = [0, 4, 128, 4]
    odd = metadata(
        block_count=4,
        vocab_size=77,
        attention__head_count=6,
        attention__key_length=96,
        attention__value_length=96,
        rope__dimension_count=32,
        attention__output_group_count=3,
        attention__indexer__head_count=5,
        attention__indexer__key_length=64,
        attention__compress_ratios=ratios,
        swiglu_clamp_exp=[0.5] * 4,
        expert_count=10,
        expert_used_count=3,
        hyper_connection__count=2,
        attention__sliding_window=7,
    )
    path = write_model(tmp_path / "odd.gguf", odd)
    ids = np.random.default_rng(1).integers(0, 77, 150)
    with GGUFFile.open(path) as file:
        reference = ReferenceModel(file)
        expected = reference.forward(reference.new_state(), ids.tolist())
    executor = CpuExecutor(GGUFFile.open(path), threads=1)
    found = Timeline(executor, 200).feed(ids)
    assert relative_error(found, expected).max() < 1e-4
    assert_same_bits(found, Timeline(executor, 200).feed(ids, 9))
    executor.close()


def test_wrong_plans_are_refused_by_name_and_change_nothing(case):
    _, executor = case
    timeline = Timeline(executor, n_ctx=10)
    timeline.feed([1, 2, 3])

    def run(**change):
        fields = {"session": timeline.id, "start": 3, "tokens": [5]} | change
        executor.step(StepPlan(step=7, prefill=(Chunk(**fields),)))

    entry = Chunk(session=timeline.id, start=3, tokens=[1])

    with pytest.raises(InvalidRequest, match="is at 3, the plan continues it at 4"):
        run(start=4)
    with pytest.raises(InvalidRequest, match="holds 10 tokens, the plan needs 11"):
        run(tokens=[1] * 8)
    for bad in (-1, 768):
        with pytest.raises(InvalidRequest, match="token ids must be 0 to 767"):
            run(tokens=[bad])
    with pytest.raises(InvalidRequest, match="session 999999 is not open"):
        run(session=999999)
    with pytest.raises(InvalidRequest, match="twice"):
        StepPlan(step=1, prefill=(entry, entry))
    with pytest.raises(InvalidRequest, match="cannot rewind"):
        executor.rewind(timeline.id, 4)
    assert executor.session_tokens(timeline.id) == [1, 2, 3]
    with pytest.raises(ConfigError, match="open already"):
        executor.open_session(timeline.id, 10)
    with pytest.raises(ConfigError, match="context must be from 1 to 4096"):
        executor.open_session(987654, 4097)


def test_damaged_snapshots_are_refused_and_leave_the_session_alone(case):
    _, executor = case
    timeline = Timeline(executor, n_ctx=200)
    timeline.feed(list(range(140)))
    data = executor.snapshot(timeline.id)
    victim = Timeline(executor, n_ctx=200)
    victim.feed([9, 8, 7])
    rng = np.random.default_rng(0)
    damaged = [b"", data[:10], data[:-1], data + b"\0", data[: len(data) // 2]]
    for at in [*range(40), *rng.integers(0, len(data), 40)]:
        flipped = bytearray(data)
        flipped[at] ^= 0x41
        damaged.append(bytes(flipped))
    for bad in damaged:
        with pytest.raises(SnapshotError):
            executor.restore(victim.id, bad)
    assert executor.session_tokens(victim.id) == [9, 8, 7]
    small = Timeline(executor, n_ctx=100)
    with pytest.raises(SnapshotError, match="140 tokens, session holds 100"):
        executor.restore(small.id, data)


def test_a_snapshot_of_another_switch_is_refused(q2_oracle):
    exact = CpuExecutor(GGUFFile.open(q2_oracle.path), threads=1)
    rounded = CpuExecutor(GGUFFile.open(q2_oracle.path), rounding=Rounding.VENDOR, threads=1)
    one, two = Timeline(exact), Timeline(rounded)
    one.feed([1, 2, 3])
    with pytest.raises(SnapshotError, match="another model or another activation rounding"):
        rounded.restore(two.id, exact.snapshot(one.id))


def test_the_number_of_threads_does_not_change_a_bit(q2_oracle):
    ids = q2_oracle.ids(3)
    results = []
    for threads in (1, 2):
        executor = CpuExecutor(GGUFFile.open(q2_oracle.path), threads=threads)
        results.append(Timeline(executor).feed(ids))
        executor.close()
    assert_same_bits(*results)


def test_too_many_threads_are_refused_by_number(q2_oracle):
    with pytest.raises(ConfigError, match=r"threads must be from 1 to .*, got 100000"):
        CpuExecutor(GGUFFile.open(q2_oracle.path), threads=100000)
