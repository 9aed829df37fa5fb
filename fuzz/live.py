"""`python -m fuzz live`: attack a running coordinator over TCP, and tell what became of it.

Invariant: only the address given is ever connected to, at most `MAX_SOCKETS` sockets are open at a
time, and both time and number of conversations are bounded.

What is said depends only on the seed (`fuzz/attacks.py`); what is answered, also on the target's
timing.

A stranger holds no key and must not be able to harm a world that has one. Without a cluster key
whoever says a whole hello is taken for a rank, and one that differs rightly ends the world; a
stranger therefore withholds such conversations from a target that asks for no key. A member may say
anything, and may end the world; then what counts is that it was told why.
"""

from __future__ import annotations

import argparse
import json
import math
import socket as stdlib_socket
import statistics
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any, Final

import attrs
import trio

from ds4.errors import ConfigError, RemoteProtocolError
from ds4.protocol.codec import CODEC, Envelope
from ds4.protocol.frame import FrameBuffer, frame
from ds4.protocol.limits import DEFAULT_LIMITS
from ds4.protocol.membership import ClusterKey
from ds4.protocol.messages import Challenge, Fail, Message, Refuse
from ds4.protocol.version import CURRENT
from fuzz.attacks import KINDS, MAX_FLOOD, PROBE, PROOF_AT, Attack, is_a_rank, plan
from fuzz.conversation import CHALLENGES

__all__ = [
    "HELP",
    "MAX_CONVERSATIONS",
    "MAX_SOCKETS",
    "Bounds",
    "Ending",
    "add_arguments",
    "attack",
    "main",
]

HELP: Final = "attack a running coordinator; exit 1 if it stops answering"
MAX_SOCKETS: Final = 64
MAX_CONVERSATIONS: Final = 5000
MAX_SECONDS: Final = 3600.0
_TASKS: Final = MAX_SOCKETS - MAX_FLOOD
_GONE_AFTER: Final = 20
"""Connections in a row that nothing accepted, after which nothing more is begun."""
_ENDS_A_WORLD: Final = ("geometry", "two_leaders")
"""Reasons for which a head refuses not one peer but the world."""
_MOST_REPLY_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 16


@attrs.frozen(kw_only=True)
class Bounds:
    """What a run may cost.

    Attributes:
      seconds: of attacking; what has begun is cut off then.
      conversations: most that are begun.
      reply_s: to wait for a connection, and for an answer after the last byte was sent.
      recover_s: for the target to answer again at the end.
    """

    seconds: float = 10.0
    conversations: int = MAX_CONVERSATIONS
    reply_s: float = 1.0
    recover_s: float = 12.0


@attrs.frozen(kw_only=True)
class Ending:
    """How one connection ended.

    Attributes:
      how: `refused` and `failed` (with the target's reason), `closed`, `reset`, `timed out` (this
        side hung up), `cut off` (the run was over) or `not accepted`.
      reason: the target's word for it, or "".
      n_bytes: sent.
      seconds: from the attempt to connect to the end.
    """

    how: str
    reason: str
    n_bytes: int
    seconds: float

    @property
    def label(self) -> str:
        """`how`, with the reason where there is one."""
        return f"{self.how}: {self.reason}" if self.reason else self.how


class _Reply:
    """What the target says, as far as it can be read."""

    def __init__(self) -> None:
        self._buffer = FrameBuffer(_MOST_REPLY_BYTES)
        self._minor: int | None = None
        self.last: Message | None = None
        self.challenge: Challenge | None = None
        self.spoke = trio.Event()
        self.strange = ""

    def feed(self, data: bytes) -> None:
        """Read on. What cannot be read is noted, and ends the reading."""
        if self.strange:
            return
        try:
            self._buffer.feed(data)
            if self._minor is None:
                version = self._buffer.next_preface()
                if version is None:
                    return
                self._minor = min(version.minor, CURRENT.minor)
            while (body := self._buffer.next_frame()) is not None:
                self.last = CODEC.decode(body, self._minor).message
                if isinstance(self.last, Challenge):
                    self.challenge = self.last
                self.spoke.set()
        except RemoteProtocolError as error:
            self.strange = error.reason

    @property
    def is_ds4(self) -> bool:
        """Whether a whole preface came."""
        return self._minor is not None

    def word(self) -> tuple[str, str]:
        """How the target ended it, and why, if it said so."""
        if isinstance(self.last, Refuse):
            return "refused", self.last.reason
        if isinstance(self.last, Fail):
            return "failed", self.last.code
        return "closed", f"unreadable answer, {self.strange}" if self.strange else ""


Address = tuple[stdlib_socket.AddressFamily, Any]


async def _connect(address: Address, seconds: float) -> trio.SocketStream | None:
    family, where = address
    sock = trio.socket.socket(family, stdlib_socket.SOCK_STREAM)
    try:
        with trio.fail_after(seconds):
            await sock.connect(where)
        return trio.SocketStream(sock)
    except (OSError, trio.TooSlowError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise


class _Talk:
    """One connection that holds one conversation."""

    def __init__(self, attack: Attack, reply_s: float) -> None:
        self._attack = attack
        self._reply_s = reply_s
        self._silence = trio.CancelScope()
        self.reply = _Reply()
        self.n_bytes = 0

    async def hold(self, stream: trio.SocketStream) -> tuple[str, str]:
        """Send, read until the target or the bound ends it; how and why. Closes the stream."""
        ending = ("timed out", "")
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(self._send, stream)
            with self._silence:
                try:
                    while data := await stream.receive_some(_READ_BYTES):
                        self.reply.feed(data)
                    ending = self.reply.word()
                except trio.BrokenResourceError:
                    how, why = self.reply.word()
                    ending = (how, why) if how != "closed" else ("reset", why)
            if self._silence.cancelled_caught and self.reply.word()[0] != "closed":
                ending = self.reply.word()  # it told us, and waits for us to go
            nursery.cancel_scope.cancel()
        return ending

    async def _send(self, stream: trio.SocketStream) -> None:
        try:
            with trio.move_on_after(
                self._reply_s + self._attack.pause_s * len(self._attack.chunks)
            ):
                for place, chunk in enumerate(self._attack.chunks):
                    data = chunk
                    if place == PROOF_AT and self._attack.key is not None:
                        data = await self._proof(self._attack.key)
                    await stream.send_all(data)
                    self.n_bytes += len(data)
                    await trio.sleep(self._attack.pause_s)
                if self._attack.ends:
                    await stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the target hung up; the reader sees how
        self._silence.deadline = trio.current_time() + self._reply_s

    async def _proof(self, key: ClusterKey) -> bytes:
        await self.reply.spoke.wait()
        if self.reply.challenge is None:
            return b""
        ours = CHALLENGES[0][1]
        assert isinstance(ours, Challenge)  # for the type checker; a constant
        response = key.respond(ours, self.reply.challenge)
        return frame(CODEC.encode(Envelope(1, 0, response), 0), DEFAULT_LIMITS.max_frame_bytes)


class _Siege:
    """A bounded run against one target."""

    def __init__(
        self, address: Address, bounds: Bounds, seed: int, member: bool, key: ClusterKey | None
    ) -> None:
        self._address = address
        self._bounds = bounds
        self._seed = seed
        self._member = member
        self._key = key
        self._next = 0
        self._gone = 0
        self._flooding = trio.Lock()
        self._endings: dict[str, list[Ending]] = {kind: [] for kind in KINDS}
        self._withheld: Counter[str] = Counter()
        self._conversations: Counter[str] = Counter()
        self.target = "none"
        self.open_sockets = self.most_sockets = 0
        self.explained = False

    async def probe(self) -> str:
        """What answers: `keyed`, `keyless`, `ending` (refuses everyone), `other` or `none`."""
        stream = await _connect(self._address, self._bounds.reply_s)
        if stream is None:
            return "none"
        talk = _Talk(Attack(kind="probe", chunks=PROBE), self._bounds.reply_s)
        async with trio.open_nursery() as nursery:

            async def hold() -> None:
                await talk.hold(stream)
                nursery.cancel_scope.cancel()

            nursery.start_soon(hold)
            await talk.reply.spoke.wait()
            nursery.cancel_scope.cancel()
        if talk.reply.challenge is not None:
            return "keyed"
        if isinstance(talk.reply.last, Refuse):
            return "keyless" if talk.reply.last.reason == "membership" else "ending"
        return "ds4" if talk.reply.is_ds4 else "other"

    async def run(self) -> dict[str, Any]:
        """Attack; return the report.

        Raises:
          ConfigError: nothing accepts connections at the address.
        """
        start = trio.current_time()
        self.target = await self.probe()
        if self.target == "none":
            raise ConfigError("nothing accepts connections at --connect HOST PORT")
        if self.target == "keyed" and self._member and self._key is None:
            raise ConfigError("the target asks for a key; --as member needs its --cluster-key-file")
        began = trio.current_time()
        with trio.move_on_after(self._bounds.seconds):
            async with trio.open_nursery() as nursery:
                for _ in range(_TASKS):
                    nursery.start_soon(self._attack_on)
        seconds = trio.current_time() - began
        after = await self._recovered()
        return {
            "seed": self._seed,
            "as": "member" if self._member else "stranger",
            "target": self.target,
            "target_after": after,
            "answers": after == self.target,
            "explained": self.explained,
            "seconds": round(seconds, 3),
            "recovered_s": round(trio.current_time() - began - seconds, 3),
            "probe_s": round(began - start, 3),
            "most_sockets": self.most_sockets,
            "conversations": sum(self._conversations.values()),
            "bytes_sent": sum(e.n_bytes for endings in self._endings.values() for e in endings),
            "kinds": {kind: self._summary(kind) for kind in KINDS if self._conversations[kind]},
            "withheld": dict(self._withheld),
        }

    async def _recovered(self) -> str:
        """Probe until the answer is as it was, for a bounded time; the last answer."""
        deadline = trio.current_time() + self._bounds.recover_s
        while True:
            found = await self.probe()
            ended = self.explained and found == "none"
            if ended or found == self.target or trio.current_time() >= deadline:
                return found
            await trio.sleep(0.1)

    def _summary(self, kind: str) -> dict[str, Any]:
        endings = self._endings[kind]
        seconds = [ending.seconds for ending in endings]
        return {
            "conversations": self._conversations[kind],
            "connections": len(endings),
            "bytes_sent": sum(ending.n_bytes for ending in endings),
            "endings": dict(Counter(ending.label for ending in endings).most_common()),
            "latency_s": {
                "median": round(statistics.median(seconds), 6),
                "max": round(max(seconds), 6),
            }
            if seconds
            else {},
        }

    async def _attack_on(self) -> None:
        while self._next < self._bounds.conversations and self._gone < _GONE_AFTER:
            index, self._next = self._next, self._next + 1
            attack = plan(self._seed, index, member=self._member, key=self._key)
            asks_key = self.target == "keyed"
            if not (self._member or asks_key) and is_a_rank(attack.chunks):
                self._withheld[attack.kind] += 1
                await trio.lowlevel.checkpoint()
                continue
            self._conversations[attack.kind] += 1
            if attack.n_sockets == 1:
                await self._once(attack)
                continue
            async with self._flooding, trio.open_nursery() as nursery:
                for _ in range(attack.n_sockets):
                    nursery.start_soon(self._once, attack)

    async def _once(self, attack: Attack) -> None:
        # A task's own socket and one flood at a time keep this within MAX_SOCKETS.
        began = trio.current_time()
        talk = _Talk(attack, self._bounds.reply_s)
        how, reason = "cut off", ""
        self.open_sockets += 1
        self.most_sockets = max(self.most_sockets, self.open_sockets)
        try:
            stream = await _connect(self._address, self._bounds.reply_s)
            if stream is None:
                how = "not accepted"
                self._gone += 1
            else:
                self._gone = 0
                how, reason = await talk.hold(stream)
                self.explained |= how == "refused" and reason in _ENDS_A_WORLD
        finally:
            self.open_sockets -= 1
            self._endings[attack.kind].append(
                Ending(
                    how=how,
                    reason=reason,
                    n_bytes=talk.n_bytes,
                    seconds=trio.current_time() - began,
                )
            )


def attack(
    host: str,
    port: int,
    *,
    bounds: Bounds,
    seed: int = 0,
    member: bool = False,
    key: ClusterKey | None = None,
) -> dict[str, Any]:
    """Attack whoever listens at an address; return the report that `main` writes.

    Args:
      host: name or address; a name is looked up once, and its first address used.
      port: from 1 to 65535.
      bounds: of the run.
      seed: of the conversations.
      member: say whole hellos too, even where that may end the world.
      key: with which a member proves itself.

    Raises:
      ConfigError: the host is unknown, or nothing accepts connections there.
    """
    try:
        found = stdlib_socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--connect {host} {port}: {error.strerror or error}") from error
    family, _, _, _, where = found[0]
    return trio.run(_Siege((family, where), bounds, seed, member, key).run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--connect", nargs=2, metavar=("HOST", "PORT"), required=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="of attacking; default 10")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations; default 0")
    parser.add_argument("--json", metavar="FILE", type=Path, help="report here; default: stdout")
    parser.add_argument(
        "--as", dest="who", choices=("stranger", "member"), default="stranger",
        help="a member may say a hello that ends the world; default stranger",
    )  # fmt: skip
    parser.add_argument(
        "--cluster-key-file", metavar="FILE", type=Path, help="with which a member proves itself"
    )


def _key(args: argparse.Namespace) -> ClusterKey | None:
    if args.cluster_key_file is None:
        return None
    if args.who != "member":
        raise ConfigError("--cluster-key-file is for --as member; a stranger has no key")
    try:
        # As `ds4` reads it.
        return ClusterKey(args.cluster_key_file.read_bytes().rstrip(b"\r\n"))
    except OSError as error:
        raise ConfigError(f"--cluster-key-file: {error}") from error


def _output(path: Path | None) -> AbstractContextManager[IO[str]]:
    if path is None:
        return nullcontext(sys.stdout)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {error}") from error


def main(args: argparse.Namespace) -> int:
    """Attack and report; returns the exit status.

    Returns:
      0 when the target answers as before, or told a member why it does not; otherwise 1.

    Raises:
      ConfigError: an option is wrong, or nothing answered from the start.
    """
    host, text = args.connect
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise ConfigError(f"--connect: a port is from 1 to 65535, got {text!r}")
    if not (math.isfinite(args.seconds) and 0 < args.seconds <= MAX_SECONDS):
        raise ConfigError(f"--seconds must be > 0 and <= {MAX_SECONDS:g}, got {args.seconds}")
    member = args.who == "member"
    key = _key(args)
    bounds = Bounds(seconds=args.seconds)
    with _output(args.json) as output:  # before the run, whose report would be lost otherwise
        report = attack(host, int(text), bounds=bounds, seed=args.seed, member=member, key=key)
        print(json.dumps(report, indent=2), file=output)
    return 0 if report["answers"] or (member and report["explained"]) else 1
