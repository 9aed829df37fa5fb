"""The numbers of a conversation: frames, epochs, what is outstanding, transfers, pings.

Invariant: whatever is outstanding is answered exactly once and in order, and its amount is bounded.
Each call checks first and changes afterwards, so a refused message leaves no trace. Like the table
in `ds4.protocol.state`, this speaks of leader and worker and runs at both ends; errors are raised
as `Illegal`, because whose fault they are depends on who sent the message.
"""

from __future__ import annotations

from collections import deque

import attrs

from ds4.protocol.limits import Limits
from ds4.protocol.membership import ClusterKey
from ds4.protocol.messages import (
    Ack,
    Bye,
    Challenge,
    Checkpoint,
    Config,
    Fail,
    Hello,
    HelloOk,
    Message,
    NcclId,
    NcclOk,
    NcclVote,
    Ping,
    Pong,
    Response,
    RestoreBegin,
    RestoreChunk,
    RestoreEnd,
    Rewind,
    Role,
    SessionClose,
    SessionOpen,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Step,
    StepMode,
    Stop,
    StopMode,
    Subject,
)

__all__ = ["Illegal", "Ledger"]


class Illegal(Exception):  # noqa: N818  # never leaves this package; not an error by itself
    """A message breaks a rule; `reason` names it."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


@attrs.define
class _Transfer:
    """A snapshot on its way: next chunk index, bytes so far, declared size, finished or not."""

    op: int
    next_index: int = 0
    n_bytes: int = 0
    expected_bytes: int | None = None
    finished: bool = False


@attrs.define
class _Direction:
    """What is counted for each sender."""

    n: int = 0
    epoch: int = 0
    pings: deque[int] = attrs.Factory(deque)
    challenge: Challenge | None = None
    hello: Hello | None = None


def _subject(about: int) -> str:
    return "step" if about == Subject.STEP else "operation"


class Ledger:
    """Counts one conversation.

    Args:
      limits: bounds on what may be outstanding.
      key: the cluster key, when there is one.
    """

    def __init__(self, limits: Limits, key: ClusterKey | None) -> None:
        self._limits = limits
        self._key = key
        self._from = {role: _Direction() for role in Role}
        self._window = 1
        self._buckets: tuple[int, ...] = ()
        self._outstanding: deque[tuple[Subject, int]] = deque()
        self._steps = 0
        self._last_step: int | None = None
        self._last_op: int | None = None
        self._boundary: tuple[int, int] | None = None  # (step, next boundary)
        self._asked = False  # a checkpoint waits for the leader's answer
        self._snapshots: dict[int, _Transfer] = {}
        self._restore: _Transfer | None = None
        self._stop: StopMode | None = None
        self._failed = False

    @property
    def window(self) -> int:
        """Most steps that may be outstanding: 1 until `config` says otherwise."""
        return self._window

    @property
    def steps_outstanding(self) -> int:
        """Steps without an answer."""
        return self._steps

    @property
    def outstanding(self) -> tuple[tuple[Subject, int], ...]:
        """Steps and operations without an answer, oldest first."""
        return tuple(self._outstanding)

    def epoch(self, sender: Role) -> int:
        """The sender's epoch: 0 before the first data plane."""
        return self._from[sender].epoch

    def hello(self, sender: Role) -> Hello | None:
        """The sender's hello, once it was said."""
        return self._from[sender].hello

    def challenge(self, sender: Role) -> Challenge | None:
        """The sender's challenge, once it was made."""
        return self._from[sender].challenge

    def next_header(self, sender: Role, message: Message) -> tuple[int, int]:
        """The (n, epoch) that the sender's next frame must carry."""
        side = self._from[sender]
        return side.n, side.epoch + isinstance(message, (NcclId, NcclOk))

    def check_header(self, sender: Role, message: Message, n: int, epoch: int) -> None:
        """Refuse a frame that is not the sender's next one.

        Raises:
          Illegal: reason `frame_number` or `epoch`.
        """
        expected_n, expected_epoch = self.next_header(sender, message)
        if n != expected_n:
            raise Illegal("frame_number", f"frame number {n}, expected {expected_n}")
        if epoch != expected_epoch:
            raise Illegal("epoch", f"{message.NAME} in epoch {epoch}, expected {expected_epoch}")

    def label(self, sender: Role, message: Message) -> str:
        """The name under which the transition table knows this message now.

        Raises:
          Illegal: an answer while nothing is outstanding (reason `answer_unknown`).
        """
        match message:
            case NcclVote():
                return "vote.yes" if message.usable else "vote.no"
            case Fail() if message.sticky:
                return "fail.sticky"
            case Fail() if message.about == Subject.NOTHING or sender is Role.LEADER:
                return "fail"
            case Ack() | Fail():
                if not self._outstanding:
                    raise Illegal(
                        "answer_unknown",
                        f"{message.NAME} for {_subject(message.about)} {message.id}, but nothing "
                        "is outstanding",
                    )
                if isinstance(message, Ack) and message.status:
                    return "ack.bad"
                last = len(self._outstanding) == 1
                return f"{message.NAME}.last" if last else message.NAME
        return message.NAME

    def apply(self, sender: Role, message: Message) -> None:
        """Check a message against the numbers, then count it.

        Raises:
          Illegal: nothing has been changed.
        """
        match message:
            case Challenge():
                self._challenge(sender, message)
            case Response():
                self._response(sender, message)
            case Hello():
                self._hello(sender, message)
            case HelloOk():
                self._hello_ok()
            case Config():
                self._config(message)
            case NcclId():
                self._nccl_id(message)
            case NcclOk():
                if self.epoch(Role.WORKER) + 1 != self.epoch(Role.LEADER):
                    raise Illegal("epoch", "nccl_ok without an nccl_id")
            case Step():
                self._step(message)
            case SessionOpen() | SessionClose() | Rewind() | SnapshotBegin() | RestoreBegin():
                self._operation(message)
            case SnapshotChunk() | SnapshotEnd():
                self._snapshot(message)
            case RestoreChunk() | RestoreEnd():
                self._restored(message)
            case Checkpoint():
                self._checkpoint(sender, message)
            case Ack():
                self._check_order(message.about, message.id)
                if message.status:
                    # Ends the epoch. What it was about stays open, as the peer still sees it so.
                    self._failed = True
                else:
                    self._answer(message.about, message.id, completes=True)
            case Fail() if message.sticky:
                self._failed = True
            case Fail() if message.about != Subject.NOTHING:
                if sender is Role.LEADER:
                    raise Illegal("fail_subject", "only a worker fails a step or an operation")
                self._check_order(message.about, message.id)
                self._answer(message.about, message.id, completes=False)
            case Ping():
                self._ping(sender, message)
            case Pong():
                self._pong(sender, message)
            case Stop():
                self._stop = StopMode(message.mode)
            case Bye():
                self._bye()
        side = self._from[sender]
        if isinstance(message, (NcclId, NcclOk)):
            side.epoch += 1
        side.n += 1

    def _challenge(self, sender: Role, message: Challenge) -> None:
        if message.role != sender:
            raise Illegal("role", f"a challenge for role {message.role} from the {sender.name}")
        other = self._from[sender.peer].challenge
        if other is not None and other.nonce == message.nonce:
            raise Illegal("membership", "both sides use the same nonce; a challenge was reflected")
        self._from[sender].challenge = message

    def _response(self, sender: Role, message: Response) -> None:
        prover, verifier = self._from[sender].challenge, self._from[sender.peer].challenge
        if self._key is None or prover is None or verifier is None:
            raise Illegal("membership", "a response without challenges")
        if not self._key.accepts(message, prover, verifier):
            raise Illegal(
                "membership", f"rank {prover.rank} does not hold this world's cluster key"
            )

    def _hello(self, sender: Role, message: Hello) -> None:
        if message.role != sender:
            reason = "two_leaders" if message.role == Role.LEADER else "two_workers"
            raise Illegal(reason, f"both ends of this link are {Role(message.role).name.lower()}s")
        proven = self._from[sender].challenge
        if proven is not None and (proven.rank, proven.geometry_hash) != (
            message.rank,
            message.geometry_hash,
        ):
            raise Illegal("membership", "the hello differs from what was proven with the key")
        self._from[sender].hello = message

    def _hello_ok(self) -> None:
        hellos = [self._from[role].hello for role in Role]
        if hellos[0] is None or hellos[1] is None:
            raise Illegal("state", "hello_ok before both hellos")
        if hellos[0].geometry_hash != hellos[1].geometry_hash:
            raise Illegal("geometry", "hello_ok between different geometries; refuse instead")

    def _config(self, message: Config) -> None:
        if message.window > self._limits.max_window:
            raise Illegal(
                "window", f"window {message.window} is over the limit {self._limits.max_window}"
            )
        self._window = message.window
        self._buckets = message.buckets

    def _nccl_id(self, message: NcclId) -> None:
        hello = self._from[Role.LEADER].hello
        if hello is not None and len(message.offers) != hello.geometry.world:
            raise Illegal(
                "offers",
                f"{len(message.offers)} bootstrap offers for a world of {hello.geometry.world}",
            )
        # A new epoch starts empty; step ids begin anew.
        self._last_step = None

    def _step(self, message: Step) -> None:
        step = message.plan.step
        if self._last_step is not None and step != self._last_step + 1:
            raise Illegal("step_id", f"step {step} after step {self._last_step}")
        if self._steps >= self._window:
            raise Illegal(
                "window", f"step {step} exceeds the window of {self._window} without an answer"
            )
        if message.mode == StepMode.GRAPH and message.bucket >= len(self._buckets):
            raise Illegal(
                "bucket", f"step {step} replays bucket {message.bucket} of {len(self._buckets)}"
            )
        self._last_step = step
        self._steps += 1
        self._outstanding.append((Subject.STEP, step))

    def _operation(
        self, message: SessionOpen | SessionClose | Rewind | SnapshotBegin | RestoreBegin
    ) -> None:
        if self._last_op is not None and message.op != self._last_op + 1:
            raise Illegal("op_id", f"operation {message.op} after operation {self._last_op}")
        if len(self._outstanding) - self._steps >= self._limits.max_ops:
            raise Illegal("ops", f"more than {self._limits.max_ops} operations without an answer")
        if isinstance(message, RestoreBegin):
            if self._restore is not None:
                raise Illegal("transfer", f"restore {self._restore.op} is still on its way")
            self._restore = _Transfer(message.op, expected_bytes=message.n_bytes)
        elif isinstance(message, SnapshotBegin):
            self._snapshots[message.op] = _Transfer(message.op)
        self._last_op = message.op
        self._outstanding.append((Subject.OP, message.op))

    def _snapshot(self, message: SnapshotChunk | SnapshotEnd) -> None:
        transfer = self._snapshots.get(message.op)
        if transfer is None or self._outstanding[0] != (Subject.OP, message.op):
            raise Illegal("transfer", f"snapshot {message.op} is not the oldest thing outstanding")
        if isinstance(message, SnapshotChunk):
            self._chunk(transfer, message.index, len(message.data))
        elif transfer.finished or message.n_bytes != transfer.n_bytes:
            raise Illegal(
                "transfer",
                f"snapshot {message.op} ends at {message.n_bytes} bytes after {transfer.n_bytes}",
            )
        else:
            transfer.finished = True

    def _restored(self, message: RestoreChunk | RestoreEnd) -> None:
        transfer = self._restore
        if transfer is None or transfer.op != message.op:
            raise Illegal("transfer", f"restore {message.op} has not begun")
        if isinstance(message, RestoreChunk):
            self._chunk(transfer, message.index, len(message.data))
        elif transfer.finished or transfer.n_bytes != transfer.expected_bytes:
            raise Illegal(
                "transfer",
                f"restore {message.op} ends after {transfer.n_bytes} of "
                f"{transfer.expected_bytes} bytes",
            )
        else:
            transfer.finished = True

    def _chunk(self, transfer: _Transfer, index: int, size: int) -> None:
        if transfer.finished or index != transfer.next_index:
            raise Illegal(
                "transfer",
                f"chunk {index} of transfer {transfer.op}, expected {transfer.next_index}",
            )
        total = transfer.n_bytes + size
        if transfer.expected_bytes is not None and total > transfer.expected_bytes:
            raise Illegal(
                "transfer",
                f"transfer {transfer.op} passes its {transfer.expected_bytes} declared bytes",
            )
        transfer.next_index += 1
        transfer.n_bytes = total

    def _checkpoint(self, sender: Role, message: Checkpoint) -> None:
        if not self._outstanding or self._outstanding[0] != (Subject.STEP, message.step):
            raise Illegal("checkpoint", f"step {message.step} is not the one that is running")
        step, boundary = self._boundary or (message.step, 0)
        expected = boundary if step == message.step else 0
        if message.boundary != expected:
            raise Illegal(
                "checkpoint", f"boundary {message.boundary} of step {step}, expected {expected}"
            )
        if (sender is Role.WORKER) == self._asked:
            turn = "the leader's answer" if self._asked else "the worker's question"
            raise Illegal("checkpoint", f"a checkpoint of step {step} waits for {turn}")
        self._asked = not self._asked
        self._boundary = (message.step, expected + (sender is Role.LEADER))

    def _check_order(self, about: int, ident: int) -> None:
        wanted = (Subject(about), ident)
        if wanted not in self._outstanding:
            raise Illegal(
                "answer_unknown",
                f"an answer for {_subject(about)} {ident}, which is not outstanding",
            )
        oldest, oldest_id = self._outstanding[0]
        if wanted != (oldest, oldest_id):
            raise Illegal(
                "answer_order",
                f"an answer for {_subject(about)} {ident} before {_subject(oldest)} {oldest_id}",
            )

    def _answer(self, about: int, ident: int, *, completes: bool) -> None:
        if about == Subject.STEP:
            if self._asked:
                raise Illegal("checkpoint", f"step {ident} ends while a checkpoint is open")
            self._steps -= 1
            self._boundary, self._asked = None, False
        else:
            restore = self._restore if self._restore and self._restore.op == ident else None
            # A restore is answered after its last byte; a failed snapshot may end early.
            if restore is not None and not restore.finished:
                raise Illegal("transfer", f"restore {ident} is answered before it ended")
            snapshot = self._snapshots.get(ident)
            if snapshot is not None and completes and not snapshot.finished:
                raise Illegal("transfer", f"snapshot {ident} is answered before it ended")
            if restore is not None:
                self._restore = None
            self._snapshots.pop(ident, None)
        self._outstanding.popleft()

    def _ping(self, sender: Role, message: Ping) -> None:
        pings = self._from[sender].pings
        if len(pings) >= self._limits.max_pings:
            raise Illegal("pings", f"more than {self._limits.max_pings} pings without an answer")
        pings.append(message.time_ns)

    def _pong(self, sender: Role, message: Pong) -> None:
        pings = self._from[sender.peer].pings
        if not pings or pings[0] != message.time_ns:
            raise Illegal("pong", f"pong {message.time_ns} answers no ping")
        pings.popleft()

    def _bye(self) -> None:
        if self._stop is None:
            raise Illegal("bye", "bye without a stop")
        if self._stop is StopMode.DRAIN and self._outstanding and not self._failed:
            about, ident = self._outstanding[0]
            raise Illegal("bye", f"bye before {_subject(about)} {ident} is answered")
