"""Attacks over TCP: against listeners of this process, and against a real coordinator."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from ds4.api import bundled_model
from ds4.errors import ConfigError
from ds4.protocol.membership import ClusterKey
from fuzz import __main__ as command_line
from fuzz.attacks import KINDS, MAX_FLOOD, is_a_rank, plan
from fuzz.live import MAX_SOCKETS, Bounds, attack

SHORT = Bounds(seconds=1.0, conversations=40, reply_s=0.2, recover_s=0.5)
WAIT_S = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def listener(most=None):
    """Accepts and hangs up, `most` times; yields the port and the list of accepted peers."""
    server = socket.create_server(("127.0.0.1", 0), backlog=128)
    peers = []

    def accept():
        with contextlib.suppress(OSError):
            while most is None or len(peers) < most:
                peer, address = server.accept()
                peers.append(address)
                peer.close()
        server.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield server.getsockname()[1], peers
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        server.close()


def test_a_conversation_depends_on_nothing_but_seed_and_number():
    assert [plan(3, i) for i in range(40) if plan(3, i).key is None] == [
        plan(3, i) for i in range(40) if plan(3, i).key is None
    ]
    assert plan(3, 0) != plan(4, 0)


def test_every_kind_has_a_turn_and_no_flood_is_over_the_bound():
    planned = [plan(0, i, member=True, key=ClusterKey(bytes(32))) for i in range(400)]
    assert {one.kind for one in planned} == set(KINDS)
    floods = [one.n_sockets for one in planned if one.kind == "flood"]
    assert 1 < max(floods) <= MAX_FLOOD < MAX_SOCKETS


def test_a_listener_that_hangs_up_on_everyone_counts_as_answering():
    with listener() as (port, peers):
        report = attack("127.0.0.1", port, bounds=SHORT)
    assert report["answers"]
    assert report["target"] == report["target_after"] == "other"
    assert 0 < report["conversations"] <= SHORT.conversations
    assert 1 < report["most_sockets"] <= MAX_SOCKETS
    # Nothing was connected that is not in the report, apart from the two probes.
    assert sum(kind["connections"] for kind in report["kinds"].values()) >= len(peers) - 2


def test_a_listener_that_goes_away_does_not_answer():
    with listener(most=5) as (port, _):
        report = attack("127.0.0.1", port, bounds=SHORT)
    assert not report["answers"]
    assert report["target_after"] == "none"
    assert any("not accepted" in kind["endings"] for kind in report["kinds"].values())


def test_a_stranger_withholds_a_whole_hello_from_a_target_that_asks_for_no_key():
    with listener() as (port, _):
        report = attack("127.0.0.1", port, bounds=SHORT)
    planned = [plan(0, i) for i in range(SHORT.conversations)]
    assert any(is_a_rank(one.chunks) for one in planned)
    assert report["withheld"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--connect", "127.0.0.1", "0"], "a port is from 1 to 65535"),
        (["--connect", "127.0.0.1", "http"], "a port is from 1 to 65535"),
        (["--connect", "127.0.0.1", "7", "--seconds", "0"], "--seconds must be > 0"),
        (["--connect", "127.0.0.1", "7", "--seconds", "nan"], "--seconds must be > 0"),
        (["--connect", "127.0.0.1", "7", "--cluster-key-file", "k"], "is for --as member"),
        (["--connect", "127.0.0.1", "7", "--json", "/nowhere/x"], "--json"),
    ],
)
def test_a_wrong_option_exits_with_2_and_names_it(capsys, options, text):
    assert command_line.main(["live", *options]) == 2
    assert text in capsys.readouterr().err


def test_an_address_where_nothing_listens_is_an_error():
    with pytest.raises(ConfigError, match="nothing accepts connections"):
        attack("127.0.0.1", free_port(), bounds=SHORT)


@contextlib.contextmanager
def world(tmp_path, *, keyed):
    """A coordinator that waits for its worker; yields it, its port, and how to start the worker."""
    common = [sys.executable, "-m", "ds4", "-m", str(bundled_model()), "-t", "1", "--ctx", "128"]
    common += ["--expert-parallel", "--tensor-parallel-world", "2", "--preflight-only"]
    if keyed:
        (tmp_path / "key").write_bytes(b"a key of more than sixteen bytes\n")
        common += ["--cluster-key-file", str(tmp_path / "key")]
    address = ("127.0.0.1", str(free_port()))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DS4_")}
    started = []

    def start(*arguments):
        started.append(
            subprocess.Popen(
                [*common, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
        return started[-1]

    try:
        head = start("--role", "coordinator", "--listen", *address)
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(address, 1):
                break
            assert head.poll() is None, head.communicate()
            assert time.monotonic() < deadline, "nothing listens"
            time.sleep(0.05)
        yield head, address, lambda: start("--role", "worker", "--coordinator", *address)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_coordinator_with_a_key_takes_its_worker_after_an_attack_by_strangers(tmp_path):
    with world(tmp_path, keyed=True) as (head, address, start_worker):
        found = tmp_path / "report.json"
        status = command_line.main(
            ["live", "--connect", *address, "--seconds", "2", "--json", str(found)]
        )
        report = json.loads(found.read_text())
        assert status == 0, report
        assert report["target"] == report["target_after"] == "keyed"
        assert "refused: membership" in report["kinds"]["wrong key"]["endings"]
        worker = start_worker()
        for process in (head, worker):
            _, err = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, err


@pytest.mark.slow
def test_a_member_that_differs_ends_the_world_and_is_told_why(tmp_path):
    with world(tmp_path, keyed=True) as (head, address, _):
        options = ["--as", "member", "--cluster-key-file", str(tmp_path / "key")]
        found = tmp_path / "report.json"
        status = command_line.main(
            ["live", "--connect", *address, "--seconds", "4", *options, "--json", str(found)]
        )
        report = json.loads(found.read_text())
        assert status == 0, report
        assert report["explained"]
        assert "refused: geometry" in report["kinds"]["member"]["endings"]
        assert head.wait(WAIT_S) == 2
