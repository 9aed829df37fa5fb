"""Options of several ranks: what they mean, and what is refused before a model is opened."""

from __future__ import annotations

import pytest

from ds4.errors import ConfigError, WorldRefused
from ds4.frontends.arguments import UsageError
from ds4.frontends.options import cli_parser
from ds4.frontends.world_options import TIMEOUT_VARIABLE, head_config, world_request
from ds4.partition.rules import Mode
from tests.frontends.conftest import run

EP = "--expert-parallel"


def parse(*argv):
    return cli_parser().parse_args(list(argv))


def head(*argv, environment=()):
    return head_config(parse(*argv), dict(environment))


def test_without_options_there_is_no_world():
    assert head() is None
    assert head("--tensor-parallel-world", "1") is None


def test_a_mode_with_one_rank_keeps_its_placement():
    config = head(EP, "--tensor-parallel-world", "1", "--ep-placement", "balanced")
    assert (config.run.world, config.run.placement) == (1, "balanced")
    assert list(config.local_ranks) == [0]


def test_a_mode_alone_is_a_world_of_two_local_ranks():
    config = head(EP)
    assert (config.run.world, config.run.mode) == (2, Mode.EXPERT_PARALLEL)
    assert not config.remote
    assert list(config.local_ranks) == [0, 1]
    assert config.listen[0] == "127.0.0.1"


@pytest.mark.parametrize("family", ["tensor", "expert"])
def test_both_spellings_of_world_and_rank_are_one_option(family):
    args = parse(
        *("--tensor-parallel", f"--{family}-parallel-world", "4", "--role", "worker"),
        *(f"--{family}-parallel-rank", "3", "--coordinator", "10.0.0.1", "7000"),
    )
    request = world_request(args)
    assert (request.n_ranks, request.worker_rank) == (4, 3)
    assert request.coordinator == ("10.0.0.1", 7000)


def test_what_ranks_must_agree_on_reaches_the_configuration(tmp_path):
    config = head(
        *("--tensor-parallel", "--tensor-parallel-world", "8", "--ctx", "99", "-t", "3"),
        *("--prefill-chunk", "7", "--activation-rounding", "vendor", "--transport", "tcp"),
        *("--ep-placement", "balanced", "--rank-timeout", "33", "--model", "x.gguf"),
    )
    found = config.run
    assert (found.world, found.mode, found.n_ctx, found.prefill_chunk) == (
        8,
        Mode.TENSOR_PARALLEL,
        99,
        7,
    )
    assert (found.rounding, found.transport, found.placement) == ("vendor", "tcp", "balanced")
    assert found.model == "x.gguf"
    assert config.threads == 3
    assert config.timeouts.rank_timeout_s == 33
    assert config.timeouts.step_floor_s == 33


def test_a_coordinator_takes_remote_ranks_and_starts_only_its_own():
    config = head(EP, "--role", "coordinator", "--listen", "0.0.0.0", "7000")
    assert config.remote
    assert list(config.local_ranks) == [0]
    assert config.listen == ("0.0.0.0", 7000)
    assert "--cluster-key-file" in config.warnings()[0]


@pytest.mark.parametrize(
    "option",
    [
        *("--layers", "--dist-prefill-chunk", "--dist-prefill-window", "--dist-activation-bits"),
        *("--dist-replay-check", "--mtp", "--dspark", "--glm-mtp", "--dir-steering-file"),
        *("--ssd-streaming", "--cuda-tensor-parallel", "--gpu-vram", "--gpu-devices"),
    ],
)
def test_options_of_other_ways_to_run_are_refused_with_a_reason(option):
    with pytest.raises(WorldRefused, match=f"{option} with {EP}: ..."):
        world_request(parse(EP, option, "1"))
    with pytest.raises(UsageError, match=option):
        world_request(parse(option))


@pytest.mark.parametrize(
    "option",
    [
        *("--tp-coordinator", "--tp-lead", "--tp-worker", "--tp-transport", "--tp-world"),
        *("--tp-rank", "--tp-token-prefill", "--tp-debug-hash", "--tp-timeout"),
    ],
)
def test_removed_spellings_stay_unknown(option):
    outcome = run(EP, option, "1")
    assert outcome.status == 2
    assert option in outcome.err


@pytest.mark.parametrize(
    "argv",
    [
        ["--preflight-only"],
        ["--world-report", "x"],
        ["--rank-timeout", "5"],
        ["--cluster-key-file", "x"],
        ["--transport", "tcp"],
        ["--ep-placement", "balanced"],
        ["--tensor-parallel-rank", "1"],
    ],
)
def test_an_option_that_would_do_nothing_is_refused(argv):
    with pytest.raises((UsageError, WorldRefused), match=argv[0]):
        world_request(parse(*argv))


@pytest.mark.parametrize("port", ["", "x", "-1", "65536", "1e3", "99999999999", "７"])
def test_a_port_that_is_none_is_named(port):
    with pytest.raises(UsageError, match="--listen"):
        world_request(parse(EP, "--role", "coordinator", "--listen", "h", port))


def test_the_key_is_read_without_the_line_end_and_short_ones_are_refused(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef\n")
    assert head(EP, "--cluster-key-file", str(path)).key == b"0123456789abcdef"
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="5 bytes"):
        head(EP, "--cluster-key-file", str(path))
    with pytest.raises(ConfigError, match="missing"):
        head(EP, "--cluster-key-file", str(tmp_path / "missing"))


def test_the_variable_bounds_the_arrival_of_ranks():
    assert head(EP).timeouts.dial_s == 300
    assert head(EP, environment={TIMEOUT_VARIABLE: "10"}).timeouts.dial_s == 10
    with pytest.raises(ConfigError, match=TIMEOUT_VARIABLE):
        head(EP, environment={TIMEOUT_VARIABLE: "soon"})


def test_a_refused_world_exits_2_and_prints_one_line():
    outcome = run(EP, "--tensor-parallel", "-p", "x")
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert "exclude each other" in outcome.err


def test_help_has_a_topic_for_ranks():
    outcome = run("--help", "distributed")
    assert "--expert-parallel" in outcome.out
    assert "--layers" not in outcome.out
