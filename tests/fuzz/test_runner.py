"""The fuzz runner, on small targets of its own, and every corpus file through its target."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds4.errors import ConfigError
from fuzz import __main__ as command_line
from fuzz import replay, run
from fuzz.mutation import Coverage, mutate, shrink
from fuzz.targets import Target, attempt, load, names, select

ROOT = Path(__file__).parents[2]


def nothing(_data):
    pass


def breaks_on_magic(data):
    """Fails for inputs with 0xFF anywhere."""
    if b"\xff" in data:
        raise IndexError(f"at {data.index(0xFF)}")


def corpus_files():
    folders = sorted((ROOT / "fuzz" / "corpus").iterdir())
    return [path for folder in folders for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("path", corpus_files(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_corpus_file_keeps_its_targets_invariant(path):
    escape = attempt(load(path.parent.name), path.read_bytes())
    assert escape is None, escape.text()


@pytest.mark.parametrize("name", names())
def test_a_target_states_its_invariant_has_seeds_and_accepts_no_bytes(name):
    target = load(name)
    assert sys.modules[f"fuzz.{name}"].__doc__.strip()
    assert target.inputs()
    assert attempt(target, b"") is None


def test_targets_are_found_by_name_with_or_without_prefix():
    assert "fuzz_gguf" in names()
    assert select([]) == names()
    assert select(["gguf", "fuzz_gguf"]) == ["fuzz_gguf", "fuzz_gguf"]
    with pytest.raises(ConfigError, match=r"no fuzz target 'fuzz_nope'; there are: .*fuzz_gguf"):
        select(["nope"])
    with pytest.raises(ConfigError, match="no fuzz target"):
        load("fuzz_nope")


def test_any_exception_is_an_escape_with_its_traceback(tmp_path):
    escape = attempt(Target("t", breaks_on_magic, tmp_path), b"ab\xff")
    assert escape.data == b"ab\xff"
    assert "IndexError: at 2" in escape.text()
    assert "breaks_on_magic" in escape.text()


def test_an_exit_is_an_escape_and_an_interrupt_is_not(tmp_path):
    def leave(_data):
        sys.exit(0)

    def interrupt(_data):
        raise KeyboardInterrupt

    assert attempt(Target("t", leave, tmp_path), b"") is not None
    with pytest.raises(KeyboardInterrupt):
        attempt(Target("t", interrupt, tmp_path), b"")


def test_an_input_that_does_not_end_is_an_escape(tmp_path):
    def hang(_data):
        while True:
            try:
                while True:
                    pass
            except Exception:  # noqa: BLE001 - a target that swallows every error
                continue

    start = time.monotonic()
    escape = attempt(Target("t", hang, tmp_path), b"", timeout_s=0.05)
    assert "no end after 0.05 s" in escape.text()
    assert time.monotonic() - start < 10


def test_replay_finds_every_escape_of_the_corpus(tmp_path):
    for name, data in {"a": b"ok", "b": b"\xff", "c": b"x\xff"}.items():
        (tmp_path / name).write_bytes(data)
    escapes = replay.replay(Target("t", breaks_on_magic, tmp_path))
    assert [escape.data for escape in escapes] == [b"\xff", b"x\xff"]


def test_replay_of_a_target_without_a_corpus_is_empty(tmp_path):
    assert replay.replay(Target("t", breaks_on_magic, tmp_path / "none")) == []


def test_a_run_finds_a_crash_and_shrinks_it(tmp_path):
    (tmp_path / "seed").write_bytes(b"some harmless bytes to start from")
    target = Target("t", breaks_on_magic, tmp_path)
    outcome = run.fuzz(target, seconds=60, seed=1)
    assert outcome.escape.data == b"\xff"
    path = target.record(outcome.escape.data)
    assert path.read_bytes() == b"\xff"
    assert path in target.inputs()
    assert replay.replay(target) != []


def test_a_crash_that_is_in_the_corpus_is_found_first(tmp_path):
    (tmp_path / "old").write_bytes(b"\xff")
    outcome = run.fuzz(Target("t", breaks_on_magic, tmp_path), seconds=0, seed=1)
    assert outcome.n_inputs == 1
    assert outcome.escape is not None


def test_the_same_seed_tries_the_same_inputs(tmp_path):
    def tried(seed):
        inputs = []
        target = Target("t", inputs.append, tmp_path, lambda data, rng: data + rng.randbytes(1))
        run.fuzz(target, seconds=60, seed=seed, most_inputs=200)
        return inputs

    first = tried(7)
    assert len(first) == 200
    assert first == tried(7)
    assert first != tried(8)


def test_inputs_that_reach_new_lines_are_kept(tmp_path):
    target = load("fuzz_gguf")
    (tmp_path / "seed").write_bytes(b"GGUF")
    fresh = Target("t", target.test_one_input, tmp_path, target.mutate)
    outcome = run.fuzz(fresh, seconds=60, seed=3, most_inputs=300)
    assert outcome.escape is None
    assert outcome.n_kept > 1
    assert outcome.n_lines > 50


def test_coverage_counts_each_line_of_ds4_once():
    target = load("fuzz_gguf")
    coverage = Coverage()
    with coverage:
        target.test_one_input(b"GGUF")
    first = coverage.n_lines
    assert coverage.grew
    assert first > 10
    with coverage:
        target.test_one_input(b"GGUF")
    assert not coverage.grew
    assert coverage.n_lines == first


def test_coverage_gives_back_the_trace_function_it_found():
    before = sys.gettrace()
    with Coverage():
        assert sys.gettrace() is not before
    assert sys.gettrace() is before


def test_mutations_change_their_input_and_stay_within_the_limit():
    rng = random.Random(0)
    data = bytes(range(64))
    results = [mutate(data, rng, [b"other input"]) for _ in range(500)]
    assert sum(result != data for result in results) > 450
    assert len(set(map(len, results))) > 20
    assert all(mutate(b"", rng) is not None for _ in range(100))
    assert len(mutate(bytes(1 << 19), rng)) <= 1 << 18


def test_structured_mutations_of_the_gguf_target_take_any_bytes():
    target = load("fuzz_gguf")
    rng = random.Random(0)
    for path in target.inputs():
        data = path.read_bytes()
        results = {target.mutate(data, rng) for _ in range(50)}
        assert len(results) > 5
    for _ in range(200):
        target.mutate(rng.randbytes(rng.randrange(80)), rng)


def test_shrinking_keeps_the_failure_and_drops_the_rest():
    data = b"a" * 50 + b"(" + b"b" * 50 + b")" + b"c" * 50
    assert shrink(data, lambda d: b"(" in d and b")" in d) == b"()"


def test_the_command_line_lists_replays_and_names_a_wrong_target(capsys):
    assert command_line.main(["list"]) == 0
    assert "fuzz_gguf: " in capsys.readouterr().out
    assert command_line.main(["replay", "gguf"]) == 0
    assert "0 escapes" in capsys.readouterr().out
    assert command_line.main(["run", "nope"]) == 2
    assert "no fuzz target 'fuzz_nope'" in capsys.readouterr().err


BROKEN = '''"""No input may hold 0xFF."""
def test_one_input(data):
    assert b"\\xff" not in data
'''


def test_a_crasher_found_by_run_fails_the_run_and_every_later_replay(tmp_path):
    """The whole runner, in a copy with one broken target."""
    for path in (ROOT / "fuzz").glob("*.py"):
        if not path.name.startswith("fuzz_"):
            (tmp_path / "fuzz").mkdir(exist_ok=True)
            (tmp_path / "fuzz" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "fuzz" / "fuzz_broken.py").write_text(BROKEN)

    def runner(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "fuzz", *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    assert runner("replay").returncode == 0
    done = runner("run", "broken", "--seconds", "60", "--seed", "5", "--engine", "builtin")
    assert done.returncode == 1
    assert "seed 5" in done.stdout
    assert "AssertionError" in done.stderr
    assert "escapes in fuzz_broken" in done.stderr
    (crasher,) = (tmp_path / "fuzz" / "corpus" / "fuzz_broken").iterdir()
    assert crasher.read_bytes() == b"\xff"
    assert crasher.name.startswith("crash-")
    again = runner("replay")
    assert again.returncode == 1
    assert "fuzz_broken: 1 inputs, 1 escapes" in again.stdout
