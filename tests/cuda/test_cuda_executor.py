"""The CUDA executor on a GPU against the reference logits and the CPU backend.

Tiny models only: the claims are about arithmetic and state, not speed.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ds4.cuda.device import is_available
from ds4.errors import ConfigError, InvalidRequest, OutOfDeviceMemory, SnapshotError
from ds4.gguf import GGUFFile
from ds4.ids import Position, SessionId, StepId, Token
from ds4.model.deepseek4.rounding import Rounding
from ds4.sampling import SamplingParams
from ds4.steps import Chunk, Decode, StepPlan, Want

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_available(), reason="no CUDA device here"),
]
NAMES = ("v4-tiny-f32", "v4-tiny-q2")
S1, S2 = SessionId(1), SessionId(2)


def load(name, **options):
    from ds4.cuda.executor import CudaExecutor, CudaOptions

    options = {"max_context": 1024, "max_sessions": 8, **options}
    file = GGUFFile.open(f"tests/data/{name}.gguf")
    return CudaExecutor.from_file(file, options=CudaOptions(**options))


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    executor = load(request.param)
    reference = np.load(f"tests/data/{request.param}-reference.npz")
    text = Path(f"tests/data/{request.param}-prompts.json").read_text(encoding="utf-8")
    prompts = json.loads(text)
    yield executor, reference, [np.array(p["ids"], np.int32) for p in prompts["prompts"]]
    executor.close()


@pytest.fixture
def sessions(case):
    executor = case[0]
    for session in (S1, S2):
        executor.open_session(session, 1024)
    yield executor
    for session in (S1, S2):
        executor.close_session(session)


def prefill(executor, tokens, at=0, session=S1, want=Want.ALL_LOGITS):
    entry = Chunk(session=session, start=Position(at), tokens=tokens, want=want)
    rows = executor.step(StepPlan(step=StepId(1), prefill=(entry,))).rows
    return rows[0].logits if rows else None


def decode(executor, token, session=S1, want=Want.TOKEN_AND_LOGITS, **sampling):
    entry = Decode(
        session=session,
        position=executor.session_length(session),
        token=Token(int(token)),
        want=want,
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
    )
    return executor.step(StepPlan(step=StepId(1), decode=(entry,))).rows[0]


def of_reference(reference):
    return [int(k.split("_")[1]) for k in reference.files if k.startswith("logits_")]


def test_logits_equal_the_reference_at_every_position(case, sessions):
    _, reference, prompts = case
    for i in of_reference(reference):
        sessions.rewind(S1, Position(0))
        got = prefill(sessions, prompts[i])
        want = reference[f"logits_{i}"]
        error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
        assert error.max() < 2e-5, (i, int(error.argmax()), float(error.max()))


def test_greedy_continuations_equal_the_reference(case, sessions):
    _, reference, prompts = case
    found = [i for i in of_reference(reference) if f"greedy_{i}" in reference.files]
    assert found
    for i in found[:2]:
        sessions.rewind(S1, Position(0))
        token = int(prefill(sessions, prompts[i])[-1].argmax())
        got = []
        for _ in range(16):
            got.append(token)
            token = int(decode(sessions, token).token)
        assert got == reference[f"greedy_{i}"][:16].tolist()


def test_chunking_and_buckets_change_no_bit(case, sessions):
    prompt = case[2][5]
    whole = prefill(sessions, prompt)
    pieces, at = [], 0
    for size in (1, 3, 5, 2, 8, 129):
        pieces.append(prefill(sessions, prompt[at : at + size], at, S2))
        at += size
        if at >= len(prompt):
            break
    got = np.concatenate(pieces)
    assert np.array_equal(got, whole[: len(got)])


def test_rows_of_several_sessions_have_the_bits_of_rows_alone(case, sessions):
    prompts = case[2]
    alone = {}
    for session, i in ((S1, 4), (S2, 5)):
        prefill(sessions, prompts[i], session=session, want=Want.NOTHING)
    snapshots = {s: sessions.snapshot(s) for s in (S1, S2)}
    for session in (S1, S2):
        alone[session] = decode(sessions, 7, session).logits
        sessions.restore(session, snapshots[session])
    entries = tuple(
        Decode(
            session=s,
            position=sessions.session_length(s),
            token=Token(7),
            want=Want.TOKEN_AND_LOGITS,
        )
        for s in (S1, S2)
    )
    for row in sessions.step(StepPlan(step=StepId(1), decode=entries)).rows:
        assert np.array_equal(row.logits, alone[row.session])


def test_replayed_graphs_have_the_bits_of_eager_launches_and_of_themselves(case, sessions):
    executor, _, prompts = case
    replayed = prefill(executor, prompts[4])
    again = prefill(executor, prompts[4], session=S2)
    assert np.array_equal(replayed, again)
    executor.rewind(S1, Position(0))
    executor.buckets.use_graphs = False
    try:
        eager = prefill(executor, prompts[4])
    finally:
        executor.buckets.use_graphs = True
    assert np.array_equal(replayed, eager)


def test_snapshots_continue_exactly_and_travel_to_the_cpu_backend(case, sessions):
    from ds4.cpu.executor import CpuExecutor

    executor, _, prompts = case
    prefill(executor, prompts[5], want=Want.NOTHING)
    data = executor.snapshot(S1)
    want = decode(executor, 9).logits
    executor.restore(S2, data)
    assert executor.session_tokens(S2) == prompts[5].tolist()
    assert np.array_equal(decode(executor, 9, S2).logits, want)
    cpu = CpuExecutor(GGUFFile.open(executor.file.path))
    cpu.open_session(S1, 1024)
    cpu.restore(S1, data)
    other = decode(cpu, 9).logits
    assert np.linalg.norm(other - want) / np.linalg.norm(want) < 2e-5
    executor.restore(S2, cpu.snapshot(S1))
    cpu.close()
    with pytest.raises(SnapshotError):
        executor.restore(S2, data[:-1])
    assert executor.session_length(S2) == len(prompts[5]) + 1


def test_a_rewind_and_a_second_feeding_change_no_bit(case, sessions):
    prompt = case[2][5]
    prefill(sessions, prompt[:40], want=Want.NOTHING)
    want = prefill(sessions, prompt[40:90], 40)
    prefill(sessions, prompt[90:120], 90, want=Want.NOTHING)
    kept = int(sessions.rewind(S1, Position(60)))
    assert kept == 40
    got = prefill(sessions, prompt[kept:90], kept)
    assert np.array_equal(got, want)
    with pytest.raises(InvalidRequest):
        sessions.rewind(S1, Position(91))


def test_sampled_tokens_are_those_of_the_reference_sampler(case, sessions):
    from ds4.sampling import sample

    prefill(sessions, case[2][4], want=Want.NOTHING)
    data = sessions.snapshot(S1)
    for seed in range(3):
        sessions.restore(S1, data)
        params = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": seed}
        row = decode(sessions, 3, **params)
        length = int(sessions.session_length(S1))
        assert int(row.token) == int(sample(row.logits[0], SamplingParams(**params), length))


def test_what_does_not_fit_is_refused_by_name(case, sessions):
    executor = case[0]
    with pytest.raises(ConfigError, match="1 to 1024"):
        executor.open_session(SessionId(9), 1025)
    with pytest.raises(ConfigError, match="open already"):
        executor.open_session(S1, 8)
    extra = [SessionId(10 + i) for i in range(6)]
    for session in extra:
        executor.open_session(session, 8)
    with pytest.raises(OutOfDeviceMemory, match="sessions of this rank are open"):
        executor.open_session(SessionId(99), 8)
    for session in extra:
        executor.close_session(session)
    with pytest.raises(InvalidRequest, match="is at 0"):
        prefill(executor, np.array([1], np.int32), at=3)


def test_vendor_rounding_is_refused_with_the_way_out():
    from ds4.cuda.executor import CudaExecutor

    file = GGUFFile.open("tests/data/v4-tiny-f32.gguf")
    with pytest.raises(ConfigError, match="--backend cpu"):
        CudaExecutor.from_file(file, rounding=Rounding.VENDOR)
    file.close()


@pytest.mark.slow
def test_a_long_run_takes_no_more_device_memory(case, sessions):
    prefill(sessions, case[2][4], want=Want.NOTHING)
    data = sessions.snapshot(S1)
    free = sessions.device.memory()[0]
    for i in range(2000):
        if i % 800 == 0:
            sessions.restore(S1, data)
        decode(sessions, i % 100, want=Want.TOKEN)
    assert sessions.device.memory()[0] == free
