"""`ds4` as coordinator and worker: statuses, reasons and signals of real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from ds4.api import bundled_model

# Bounds for a busy machine; the promise of each test is about order, status and text.
WAIT_S = 60
MODE = ["--expert-parallel", "--tensor-parallel-world", "2"]


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompt") / "ids.json"
    path.write_text("[1, 2, 3, 4, 5]")
    return str(path)


@pytest.fixture(scope="module")
def model():
    return str(bundled_model())


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"a key of more than sixteen bytes\n")
    return str(path)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(*arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DS4_")}
    return subprocess.Popen(
        [sys.executable, "-m", "ds4", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@contextlib.contextmanager
def pair(model, prompt, port, head=(), worker=()):
    """A coordinator and a worker; both are gone at the end."""
    common = ["-m", model, "-t", "1", "--ctx", "128", "--rank-timeout", "60", *MODE]
    processes = [
        start(
            *common,
            *("--role", "coordinator", "--listen", "127.0.0.1", port),
            *("--tokens-file", prompt, "-n", "4", "--temp", "0"),
            *head,
        ),
        start(*common, "--role", "worker", "--coordinator", "127.0.0.1", port, *worker),
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def end(process):
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


@pytest.mark.slow
def test_a_coordinator_and_a_worker_print_what_one_process_prints(model, prompt, key, tmp_path):
    port = free_port()
    report = tmp_path / "world.json"
    with pair(
        model,
        prompt,
        port,
        head=["--cluster-key-file", key, "--world-report", str(report)],
        worker=["--cluster-key-file", key],
    ) as (head, worker):
        # A stranger at the port, while both are on their way.
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                with socket.create_connection(("127.0.0.1", port), 1) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                break
            time.sleep(0.1)
        status, out, err = end(head)
        assert status == 0, err
        assert end(worker)[0] == 0
    alone = start("-m", model, "-t", "1", "--ctx", "128", "--tokens-file", prompt, "-n", "4",
                  "--temp", "0")  # fmt: skip
    assert end(alone)[:2] == (0, out)
    document = json.loads(report.read_text())
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]


@pytest.mark.slow
def test_ranks_that_differ_both_say_what_and_exit_with_2(model, prompt):
    with pair(model, prompt, free_port(), worker=["--ctx", "64"]) as (head, worker):
        statuses = []
        for process in (head, worker):
            status, _, err = end(process)
            statuses.append(status)
            for part in ("rank 1", "n_ctx", "128", "64", "--ctx"):
                assert part in err
        assert statuses == [2, 2]


def wait_for_world(head, report):
    deadline = time.monotonic() + WAIT_S
    while not report.exists() or not report.read_text().endswith("}\n"):
        assert time.monotonic() < deadline, "no world"
        assert head.poll() is None, head.stderr.read()
        time.sleep(0.05)
    return json.loads(report.read_text())


@contextlib.contextmanager
def busy_pair(model, prompt, tmp_path):
    """A pair that generates for a long time; yields it when its world is ready."""
    report = tmp_path / "world.json"
    forever = ["-n", "100000", "--ctx", "4096", "--world-report", str(report)]
    with pair(model, prompt, free_port(), head=forever, worker=["--ctx", "4096"]) as processes:
        document = wait_for_world(processes[0], report)
        yield (*processes, [rank["pid"] for rank in document["ranks"]])


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_sigterm_at_the_head_ends_all_with_0(model, prompt, tmp_path):
    with busy_pair(model, prompt, tmp_path) as (head, worker, pids):
        head.send_signal(signal.SIGTERM)
        status, _, err = end(head)
        assert status == 0, err
        assert end(worker)[0] == 0
        assert gone(pids[0])


@pytest.mark.slow
def test_a_killed_head_ends_its_ranks_with_4(model, prompt, tmp_path):
    with busy_pair(model, prompt, tmp_path) as (head, worker, pids):
        head.kill()
        status, _, err = end(worker)
        assert status == 4
        assert "head lost" in err
        deadline = time.monotonic() + 60
        while not gone(pids[0]):
            assert time.monotonic() < deadline, "the local rank lingers"
            time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_worker_ends_the_head_with_3_and_its_name(model, prompt, tmp_path):
    with busy_pair(model, prompt, tmp_path) as (head, worker, pids):
        worker.kill()
        status, _, err = end(head)
        assert status == 3
        assert "rank 1" in err
        assert gone(pids[0])


@pytest.mark.slow
def test_a_terminated_worker_tells_the_head(model, prompt, tmp_path):
    with busy_pair(model, prompt, tmp_path) as (head, worker, _):
        worker.terminate()
        status, _, err = end(head)
        assert status == 3
        assert "terminated by a signal" in err
        assert end(worker)[0] == 130


@pytest.mark.slow
def test_a_worker_with_another_key_is_refused_and_the_head_goes_on_waiting(
    model, prompt, key, tmp_path
):
    other = tmp_path / "other"
    other.write_bytes(b"another key of sixteen bytes or more")
    port = free_port()
    with pair(
        model,
        prompt,
        port,
        head=["--cluster-key-file", key],
        worker=["--cluster-key-file", str(other)],
    ) as (head, worker):
        status, _, err = end(worker)
        assert status == 2
        assert "--cluster-key-file" in err
        assert head.poll() is None
        head.terminate()
        end(head)


@pytest.mark.slow
def test_preflight_prints_a_verdict_for_every_rank_and_touches_no_weights(model):
    checked = start("-m", model, "--preflight-only", "--ctx", "64", "-t", "1", *MODE)
    status, out, err = end(checked)
    assert status == 0, err
    document = json.loads(out)
    assert document["verdict"] == "admitted"
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]


@pytest.mark.slow
def test_preflight_of_a_world_that_does_not_divide_the_model_says_so(q2_oracle):
    checked = start(
        *("-m", str(q2_oracle.path), "--preflight-only", "--ctx", "64"),
        *("--tensor-parallel", "--tensor-parallel-world", "8"),
    )
    status, out, _ = end(checked)
    assert status == 2
    document = json.loads(out)
    assert document["verdict"] == "refused"
    assert all("output_group_count" in rank["text"] for rank in document["ranks"])
