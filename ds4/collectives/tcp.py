"""Collectives of CPU ranks over TCP: a full mesh of one connection per pair of ranks.

Every operation is one exchange: a rank sends its part to every peer and receives theirs, both
directions at once, so no part is too large for the socket buffers. The parts are then summed
locally as the fixed tree over ranks, which gives every rank the same bits. A header on every
message names operation, number and length; ranks that have gone separate ways find out at once.

Connections are accepted only from peers that know the world's 16-byte token, which the head deals
out over the control plane. `abort` may be called from any thread and ends a blocked exchange.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import CollectiveError

__all__ = ["TOKEN_BYTES", "CollectiveListener", "CollectiveStatistics", "TcpCollective"]

TOKEN_BYTES = 16
MAX_STRANGERS = 64
"""Connections that may fail to introduce themselves before the mesh is given up."""

_HELLO = struct.Struct("<4s16sII")  # magic, token, rank, world
_MAGIC = b"d4cx"
_HEADER = struct.Struct("<IIQ")  # number, kind, payload bytes
_JOIN, _GATHER, _BARRIER = 1, 2, 3
_KIND_NAMES = {_JOIN: "join", _GATHER: "all_gather", _BARRIER: "barrier"}
_PIECE_BYTES = 1 << 20

Address = tuple[str, int]


@attrs.frozen(kw_only=True)
class CollectiveStatistics:
    """What a rank's collectives have done so far.

    Attributes:
      joins, gathers, barriers: operations completed.
      payload_bytes_sent, payload_bytes_received: without headers, over all peers.
      seconds: time spent inside operations, waiting included.
    """

    joins: int
    gathers: int
    barriers: int
    payload_bytes_sent: int
    payload_bytes_received: int
    seconds: float


class CollectiveListener:
    """The port a rank accepts its peers on, opened before addresses are exchanged.

    Args:
      host: interface to listen on; the address peers can reach this rank by.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        try:
            family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.bind((host, 0))
            self._socket.listen(16)
        except OSError as error:
            raise CollectiveError(f"cannot listen for collectives on {host}: {error}") from error
        self.address: Address = self._socket.getsockname()[:2]
        self._is_aborted = False

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def abort(self) -> None:
        """Make a running or later `connect` fail soon. Callable from any thread."""
        self._is_aborted = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in accept
        except OSError:
            return  # it does not listen any more

    def _check_aborted(self, rank: int) -> None:
        if self._is_aborted:
            raise CollectiveError(f"rank {rank}: the connection of the ranks was aborted")

    def connect(
        self,
        rank: int,
        addresses: Sequence[Address],
        token: bytes,
        *,
        connect_timeout_s: float = 60.0,
        operation_timeout_s: float = 300.0,
    ) -> TcpCollective:
        """Join the mesh: dial every lower rank, accept every higher one, then prove it works.

        Args:
          rank: this rank, an index into `addresses`.
          addresses: of every rank's listener.
          token: the world's shared secret.
          connect_timeout_s: bound on the whole mesh.
          operation_timeout_s: bound on every later operation.

        Raises:
          CollectiveError: a peer did not come, or the self-test gave a wrong sum; names the ranks.
        """
        deadline = time.monotonic() + connect_timeout_s
        peers: dict[int, socket.socket] = {}
        try:
            for peer in range(rank):
                peers[peer] = _dial(peer, rank, addresses, token, deadline, self._check_aborted)
            self._accept(rank, len(addresses), token, deadline, peers)
        except BaseException:
            for connection in peers.values():
                connection.close()
            raise
        finally:
            self.close()
        collective = TcpCollective(rank, len(addresses), peers, operation_timeout_s)
        try:
            collective.self_test()
        except BaseException:
            collective.close()
            raise
        return collective

    def _accept(
        self,
        rank: int,
        world: int,
        token: bytes,
        deadline: float,
        peers: dict[int, socket.socket],
    ) -> None:
        strangers = 0
        while len(peers) < world - 1:
            self._check_aborted(rank)
            self._socket.settimeout(_left(deadline))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                missing = sorted(set(range(world)) - set(peers) - {rank})
                raise CollectiveError(
                    f"rank {rank}: no collective connection from rank {missing}"
                ) from None
            except OSError as error:
                self._check_aborted(rank)
                raise CollectiveError(f"rank {rank}: cannot accept a peer: {error}") from error
            try:
                connection.settimeout(min(2.0, _left(deadline)))
                hello = _HELLO.unpack(_receive_exactly(connection, _HELLO.size))
            except (OSError, CollectiveError):
                hello = (b"", b"", 0, 0)
            magic, got, peer, peer_world = hello
            known = magic == _MAGIC and secrets.compare_digest(got, token)
            if known and peer_world == world and rank < peer < world and peer not in peers:
                _prepare(connection)
                peers[peer] = connection
                continue
            connection.close()
            strangers += 1
            if strangers > MAX_STRANGERS:
                raise CollectiveError(f"rank {rank}: too many strangers on the collective port")


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)


def _dial(
    peer: int,
    rank: int,
    addresses: Sequence[Address],
    token: bytes,
    deadline: float,
    check_aborted: Callable[[int], None],
) -> socket.socket:
    host, port = addresses[peer]
    while True:
        check_aborted(rank)
        try:
            connection = socket.create_connection((host, port), timeout=_left(deadline))
            connection.sendall(_HELLO.pack(_MAGIC, token, rank, len(addresses)))
        except OSError as error:
            if time.monotonic() >= deadline:
                raise CollectiveError(
                    f"rank {rank}: cannot reach rank {peer} at {host}:{port}: {error}"
                ) from error
            time.sleep(0.05)
            continue
        _prepare(connection)
        return connection


def _receive_exactly(connection: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        piece = connection.recv(n - len(data))
        if not piece:
            raise CollectiveError("connection closed")
        data += piece
    return data


@attrs.define
class _Transfer:
    """Both directions of one exchange with one peer."""

    outgoing: memoryview
    header: bytearray = attrs.Factory(bytearray)
    body: bytearray | None = None
    filled: int = 0

    @property
    def done(self) -> bool:
        return not self.outgoing and self.body is not None and self.filled == len(self.body)


class TcpCollective:
    """Collectives of one rank over an established mesh. Implements `Collective`.

    Made by `CollectiveListener.connect`.
    """

    def __init__(
        self, rank: int, world: int, peers: Mapping[int, socket.socket], timeout_s: float
    ) -> None:
        self.rank = rank
        self.world = world
        self._peers = dict(peers)
        self._timeout_s = timeout_s
        self._number = 0
        self._failed: str | None = None
        self._done = {_JOIN: 0, _GATHER: 0, _BARRIER: 0}
        self._sent = self._received = 0
        self._seconds = 0.0

    def join(self, part: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `Collective.join`."""
        parts = [p.copy() for p in self._gather(_JOIN, part, same_size=True)]
        while len(parts) > 1:
            for i in range(len(parts) // 2):
                np.add(parts[2 * i], parts[2 * i + 1], out=parts[i])
            del parts[len(parts) // 2 :]
        return parts[0]

    def all_gather(self, part: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """See `Collective.all_gather`."""
        return self._gather(_GATHER, part, same_size=False)

    def barrier(self) -> None:
        """See `Collective.barrier`."""
        self._gather(_BARRIER, np.zeros(0, np.float32), same_size=True)

    def self_test(self) -> None:
        """Join a known sum. A mesh that returns its input, or half of the peers, fails here."""
        ramp = np.arange(8, dtype=np.float32)
        found = self.join(ramp * np.float32(2.0**self.rank))
        expected = ramp * np.float32(2.0**self.world - 1)
        if not np.array_equal(found, expected):
            raise CollectiveError(f"rank {self.rank}: collective self-test gave {found.tolist()}")

    def statistics(self) -> CollectiveStatistics:
        """Counters so far."""
        return CollectiveStatistics(
            joins=self._done[_JOIN],
            gathers=self._done[_GATHER],
            barriers=self._done[_BARRIER],
            payload_bytes_sent=self._sent,
            payload_bytes_received=self._received,
            seconds=self._seconds,
        )

    def abort(self) -> None:
        """See `Collective.abort`."""
        self._failed = self._failed or "aborted"
        for connection in self._peers.values():
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # not connected any more, which is what abort wants

    def close(self) -> None:
        """See `Collective.close`."""
        self._failed = self._failed or "closed"
        for connection in self._peers.values():
            connection.close()
        self._peers.clear()

    def _gather(
        self, kind: int, part: NDArray[np.float32], *, same_size: bool
    ) -> list[NDArray[np.float32]]:
        if self._failed is not None:
            raise CollectiveError(f"rank {self.rank}: {_KIND_NAMES[kind]}: {self._failed}")
        part = np.ascontiguousarray(part, np.float32).reshape(-1)
        payload = part.tobytes()
        begin = time.monotonic()
        try:
            received = self._exchange(kind, payload, same_size=same_size)
        except CollectiveError as error:
            self._failed = self._failed or str(error)
            raise
        self._seconds += time.monotonic() - begin
        self._number += 1
        self._done[kind] += 1
        self._sent += len(payload) * (self.world - 1)
        self._received += sum(len(body) for body in received.values())
        return [
            part if peer == self.rank else np.frombuffer(received[peer], np.float32)
            for peer in range(self.world)
        ]

    def _exchange(self, kind: int, payload: bytes, *, same_size: bool) -> dict[int, bytearray]:
        message = memoryview(_HEADER.pack(self._number, kind, len(payload)) + payload)
        transfers = {peer: _Transfer(message) for peer in self._peers}
        expected = len(payload) if same_size else None
        deadline = time.monotonic() + self._timeout_s
        for peer, transfer in transfers.items():
            self._send(peer, transfer)
        poll = select.poll()
        owners: dict[int, int] = {}
        for peer, connection in self._peers.items():
            owners[connection.fileno()] = peer
            self._register(poll, connection, transfers[peer])
        waiting = {peer for peer, transfer in transfers.items() if not transfer.done}
        while waiting:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready and time.monotonic() >= deadline:
                raise CollectiveError(
                    f"rank {self.rank}: {_KIND_NAMES[kind]} {self._number}: nothing from rank "
                    f"{sorted(waiting)} in {self._timeout_s:g} s"
                )
            for fd, _ in ready:
                peer = owners[fd]
                transfer = transfers[peer]
                self._send(peer, transfer)
                self._receive(peer, transfer, kind, expected)
                if transfer.done:
                    waiting.discard(peer)
                    poll.unregister(fd)
                else:
                    self._register(poll, self._peers[peer], transfer)
        return {peer: t.body for peer, t in transfers.items() if t.body is not None}

    @staticmethod
    def _register(poll: select.poll, connection: socket.socket, transfer: _Transfer) -> None:
        events = select.POLLIN | (select.POLLOUT if transfer.outgoing else 0)
        poll.register(connection.fileno(), events)

    def _lost(self, peer: int, error: OSError | None = None) -> CollectiveError:
        why = self._failed or (f"connection closed: {error}" if error else "connection closed")
        return CollectiveError(f"rank {self.rank}: rank {peer}: {why}")

    def _send(self, peer: int, transfer: _Transfer) -> None:
        while transfer.outgoing:
            try:
                n = self._peers[peer].send(transfer.outgoing[:_PIECE_BYTES])
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(peer, error) from error
            transfer.outgoing = transfer.outgoing[n:]

    def _receive(self, peer: int, transfer: _Transfer, kind: int, expected: int | None) -> None:
        connection = self._peers[peer]
        while not (transfer.body is not None and transfer.filled == len(transfer.body)):
            try:
                if transfer.body is None:
                    piece = connection.recv(_HEADER.size - len(transfer.header))
                    if not piece:
                        raise self._lost(peer)
                    transfer.header += piece
                    if len(transfer.header) == _HEADER.size:
                        transfer.body = self._body(peer, bytes(transfer.header), kind, expected)
                else:
                    n = connection.recv_into(memoryview(transfer.body)[transfer.filled :])
                    if n == 0:
                        raise self._lost(peer)
                    transfer.filled += n
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(peer, error) from error

    def _body(self, peer: int, header: bytes, kind: int, expected: int | None) -> bytearray:
        number, their_kind, n_bytes = _HEADER.unpack(header)
        mine = f"{_KIND_NAMES[kind]} {self._number}"
        if number != self._number or their_kind != kind:
            theirs = f"{_KIND_NAMES.get(their_kind, their_kind)} {number}"
            raise CollectiveError(
                f"rank {self.rank} is in {mine}, rank {peer} in {theirs}: the ranks disagree"
            )
        if n_bytes % 4 or n_bytes > 1 << 34 or (expected is not None and n_bytes != expected):
            raise CollectiveError(
                f"rank {self.rank}: {mine}: rank {peer} sent {n_bytes} bytes, expected {expected}"
            )
        return bytearray(n_bytes)
