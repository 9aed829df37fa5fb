"""`ds4-bench` on the CPU backend: the CSV, refusals, and that a frontier's state is restored."""

import csv
import io
import json
from xml.etree import ElementTree

import numpy as np
import pytest

from ds4.api import Model, ModelOptions
from ds4.errors import ConfigError
from ds4.frontends.bench import COLUMNS, EXTENDED_COLUMNS, main
from ds4.frontends.frontiers import Measurement, Sweep, frontiers
from ds4.sampling import GREEDY

MODEL = "tests/data/v4-tiny-q2.gguf"


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(
        "the quick brown fox jumps over the lazy dog and runs on " * 4, encoding="utf-8"
    )
    return path


def run(*argv):
    out, err = io.StringIO(), io.StringIO()
    status = main([str(a) for a in argv], stdout=out, stderr=err, environment={})
    return status, out.getvalue(), err.getvalue()


def small(prompt_file, *more):
    return run("-m", MODEL, "--cpu", "--prompt-file", prompt_file, "--ctx-start", 16, "--ctx-max",
               40, "--step-incr", 16, "-n", 3, *more)  # fmt: skip


def test_the_csv_has_one_row_for_every_frontier_and_ends_at_the_last(prompt_file):
    status, out, err = small(prompt_file)
    assert status == 0, err
    assert out.splitlines()[0] == ",".join(COLUMNS)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [int(r["ctx_tokens"]) for r in rows] == [16, 32, 40]
    assert sum(int(r["prefill_tokens"]) for r in rows) == 40
    assert all(r["gen_tokens"] == "3" and float(r["gen_tps"]) > 0 for r in rows)
    assert all(len(r["prefill_tps"].split(".")[1]) == 2 for r in rows)
    sizes = [int(r["kvcache_bytes"]) for r in rows]
    assert sizes == sorted(sizes)
    assert sizes[0] > 0


def test_extended_columns_plot_and_logits_are_written(prompt_file, tmp_path):
    target, plot, logits = tmp_path / "out.csv", tmp_path / "out.svg", tmp_path / "logits"
    status, out, err = small(
        prompt_file, "--csv", target, "--csv-extended", "--plot", plot,
        "--dump-frontier-logits-dir", logits, "--sessions", 2, "--show-output",
    )  # fmt: skip
    assert (status, out) == (0, "")
    rows = list(csv.DictReader(io.StringIO(target.read_text(encoding="utf-8"))))
    assert tuple(rows[0]) == COLUMNS + EXTENDED_COLUMNS
    assert float(rows[0]["decode_p99_ms"]) >= float(rows[0]["decode_p50_ms"]) > 0
    assert int(rows[0]["peak_mem_bytes"]) > 1 << 20
    root = ElementTree.fromstring(plot.read_text(encoding="utf-8"))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}circle")) == 6
    content = json.loads((logits / "frontier-40.json").read_text(encoding="utf-8"))
    assert content["ctx_tokens"] == 40
    assert np.isfinite(content["logits"]).all()
    assert "16:" in err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "--synthetic is needed"),
        (["--prompt-file", "x", "--ctx-start", "9", "--ctx-max", "8"], "--ctx-start"),
        (["--prompt-file", "x", "--ctx-max=8", "--ctx-start=8", "--ctx-alloc=8"], "ctx-alloc"),
        (["--prompt-file", "x", "--chat-prompt-file", "y"], "not allowed with"),
        (["--prompt-file", "x", "-sys", "y"], "--chat-prompt-file"),
        (["--prompt-file", "x", "-c", "64"], "--ctx-alloc"),
        (["--synthetic", "deepseek4-flash", "--cpu"], "CUDA device"),
        (["--synthetic", "deepseek4-flash", "-m", "x"], "--model"),
        (["--prompt-file", "x", "--gen-tokens", "-1"], "--gen-tokens"),
    ],
)  # fmt: skip
def test_combinations_that_cannot_be_meant_exit_with_status_two(argv, text):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert text in err


def test_a_short_prompt_exits_with_status_one_and_both_counts(prompt_file):
    status, out, err = run(
        "-m", MODEL, "--cpu", "--prompt-file", prompt_file, "--ctx-start", 5, "--ctx-max", 3000
    )
    assert (status, out) == (1, "")
    assert "3000" in err
    assert any(word.isdigit() and int(word) < 3000 for word in err.split())


def test_decoded_tokens_at_a_frontier_are_those_of_a_fresh_prefill():
    rng = np.random.default_rng(0)
    with Model.open(ModelOptions(path=MODEL, backend="cpu", n_ctx=64)) as model:
        prompt = rng.integers(3, model.shape.n_vocab, 40).astype(np.int32)
        what = Measurement(frontiers=[16, 32, 40], gen_tokens=4, sessions=1, n_ctx=64,
                           prefill_chunk=8, eos=-1)  # fmt: skip
        for found in list(Sweep(model.executor, prompt, what).run()):
            with model.session(64) as session:
                ids = prompt[: found.ctx_tokens]
                fresh = list(session.generate(ids, max_tokens=4, sampling=GREEDY))
            assert list(found.tokens[: len(fresh)]) == fresh


def test_the_end_token_is_never_chosen():
    rng = np.random.default_rng(1)
    with Model.open(ModelOptions(path=MODEL, backend="cpu", n_ctx=64)) as model:
        prompt = rng.integers(3, model.shape.n_vocab, 16).astype(np.int32)

        def tokens(eos):
            what = Measurement(frontiers=[16], gen_tokens=5, sessions=1, n_ctx=64,
                               prefill_chunk=16, eos=eos)  # fmt: skip
            return next(iter(Sweep(model.executor, prompt, what).run())).tokens

        free = tokens(-1)
        for position in (0, 3):
            banned = tokens(free[position])
            assert free[position] not in banned
            assert len(banned) == 5


def test_frontiers_grow_by_step_or_by_factor_and_end_at_the_maximum():
    assert frontiers(2, 9, increment=3, factor=1) == [2, 5, 8, 9]
    assert frontiers(1, 9, increment=3, factor=1.5) == [1, 2, 3, 5, 8, 9]
    assert frontiers(4, 4, increment=1, factor=1) == [4]
    with pytest.raises(ConfigError, match="--ctx-start"):
        frontiers(5, 4, increment=1, factor=1)
