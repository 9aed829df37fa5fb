from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from ds4.collectives import CollectiveListener
from ds4.errors import CollectiveError
from ds4.partition.collectives_model import canonical_join

TOKEN = b"0123456789abcdef"


def run_ranks(world, body, *, timeout_s=20.0):
    """Run body(collective) on `world` threads; return results or exceptions by rank."""
    listeners = [CollectiveListener() for _ in range(world)]
    addresses = [listener.address for listener in listeners]
    results = [None] * world

    def rank_main(rank):
        try:
            collective = listeners[rank].connect(
                rank, addresses, TOKEN, connect_timeout_s=10, operation_timeout_s=timeout_s
            )
            try:
                results[rank] = body(collective)
            finally:
                collective.close()
        except CollectiveError as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def part(rank, n):
    return np.random.default_rng(rank).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_join_is_the_canonical_tree_with_the_same_bits_on_every_rank(world, n):
    results = run_ranks(world, lambda c: c.join(part(c.rank, n)))
    expected = canonical_join([part(r, n) for r in range(world)]).results[0]
    for found in results:
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_parts_larger_than_the_socket_buffers_do_not_deadlock():
    n = 4 << 20
    one, two = run_ranks(2, lambda c: c.join(np.full(n, c.rank + 1, np.float32)))
    assert (one == 3).all()
    assert (two == 3).all()


def test_all_gather_keeps_rank_order_and_allows_different_lengths():
    for found in run_ranks(4, lambda c: c.all_gather(part(c.rank, 3 * c.rank))):
        for rank, piece in enumerate(found):
            np.testing.assert_array_equal(piece, part(rank, 3 * rank))


def test_counters_say_what_was_sent():
    def body(c):
        before = c.statistics()
        c.join(part(c.rank, 100))
        c.all_gather(part(c.rank, 10))
        c.barrier()
        return before, c.statistics()

    for before, after in run_ranks(4, body):
        assert (after.joins - before.joins, after.gathers, after.barriers) == (1, 1, 1)
        assert after.payload_bytes_sent - before.payload_bytes_sent == 3 * (400 + 40)
        assert after.payload_bytes_received - before.payload_bytes_received == 3 * (400 + 40)


def test_ranks_in_different_operations_find_out_at_once():
    errors = run_ranks(2, lambda c: c.join(part(0, 4)) if c.rank else c.barrier())
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert any("the ranks disagree" in str(error) for error in errors)


def test_joins_of_different_lengths_are_refused():
    errors = run_ranks(2, lambda c: c.join(part(0, 4 + c.rank)))
    assert any("expected" in str(error) for error in errors)


def test_a_lost_peer_ends_a_blocked_operation_and_is_named():
    def body(c):
        if c.rank == 1:
            return None  # leaves, which closes its connections
        return c.join(part(c.rank, 4))

    results = run_ranks(4, body)
    assert results[1] is None
    for rank in (0, 2, 3):
        assert isinstance(results[rank], CollectiveError)
    assert "rank 1" in str(results[0])


def test_a_silent_peer_ends_a_blocked_operation_after_its_timeout():
    release = threading.Event()

    def body(c):
        if c.rank == 1:
            release.wait(10)
            return None
        begin = time.monotonic()
        with pytest.raises(CollectiveError, match=r"nothing from rank \[1\] in 0.5 s"):
            c.join(part(c.rank, 4))
        release.set()
        return time.monotonic() - begin

    seconds = run_ranks(2, body, timeout_s=0.5)[0]
    assert 0.4 < seconds < 5


def test_abort_from_another_thread_ends_a_blocked_operation():
    release = threading.Event()

    def body(c):
        if c.rank == 1:
            release.wait(10)
            return None
        threading.Timer(0.2, c.abort).start()
        with pytest.raises(CollectiveError, match="aborted"):
            c.join(part(c.rank, 4))
        with pytest.raises(CollectiveError, match="aborted"):
            c.barrier()
        release.set()
        return "done"

    assert run_ranks(2, body)[0] == "done"


def test_strangers_on_the_port_do_not_disturb_the_mesh():
    listeners = [CollectiveListener() for _ in range(2)]
    addresses = [listener.address for listener in listeners]
    noise = [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 40, b"", b"d4cx" + b"wrong-token-....." + b"\1" * 8]
    for data in noise:
        with socket.create_connection(addresses[0]) as stranger:
            stranger.sendall(data)
    results = [None, None]

    def rank_main(rank):
        c = listeners[rank].connect(rank, addresses, TOKEN, connect_timeout_s=20)
        results[rank] = c.join(part(0, 2))
        c.close()

    threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(result is not None for result in results)


def test_a_peer_that_never_comes_is_named_within_the_bound():
    listener = CollectiveListener()
    begin = time.monotonic()
    with pytest.raises(CollectiveError, match=r"no collective connection from rank \[1\]"):
        listener.connect(0, [listener.address, ("127.0.0.1", 1)], TOKEN, connect_timeout_s=0.3)
    assert time.monotonic() - begin < 5
