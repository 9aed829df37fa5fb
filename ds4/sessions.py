"""Token timelines and the slots that keep them: longest-prefix reuse, eviction, rewinds.

A slot is the place of one session on the ranks. Its timeline is exactly what the executors hold for
that session: a token enters it when the step that fed it has been applied, and never before. When a
request ends the timeline stays, so that the next turn of the same conversation starts where this
one stopped. This module decides which slot a prompt takes; it knows nothing of steps, time or
transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError
from ds4.ids import Position, RequestId, SessionId

__all__ = [
    "Assignment",
    "CloseSession",
    "Command",
    "OpenSession",
    "Rewind",
    "Slot",
    "SlotTable",
    "Timeline",
    "common_prefix",
]


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix of two token arrays, i32[n] and i32[m]."""
    n = min(a.size, b.size)
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


class Timeline:
    """Tokens of one session, append and cut at the end only.

    Appending is amortised O(n): the buffer doubles, because a token is added at every step.
    """

    def __init__(self, tokens: Sequence[int] | NDArray[np.int32] = ()) -> None:
        self._buffer: NDArray[np.int32] = np.array(tokens, np.int32)
        self._length = int(self._buffer.size)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Read-only view i32[len]; valid until the next change."""
        view = self._buffer[: self._length]
        view.flags.writeable = False
        return view

    def extend(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Append tokens."""
        new = np.asarray(tokens, np.int32)
        length = self._length + int(new.size)
        if length > self._buffer.size:
            grown: NDArray[np.int32] = np.empty(max(length, 2 * self._buffer.size, 64), np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : length] = new
        self._length = length

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens. Raises ConfigError when there are fewer."""
        if not 0 <= length <= self._length:
            raise ConfigError(f"cannot cut a timeline of {self._length} tokens to {length}")
        self._length = length


@attrs.frozen(kw_only=True)
class OpenSession:
    """Create an empty session on every rank."""

    session: SessionId
    n_ctx: int


@attrs.frozen(kw_only=True)
class CloseSession:
    """Drop a session on every rank."""

    session: SessionId


@attrs.frozen(kw_only=True)
class Rewind:
    """Cut a session to at most its first `length` tokens on every rank.

    The session is in no step until the outcome is reported with `Scheduler.rewound`, because ranks
    go back to the newest state they still have, which may be an earlier one.

    Attributes:
      session: which.
      length: tokens to keep at most.
      dropped: tokens that go, i32[n]: with the prefix the whole timeline, for whoever wants to save
        it first.
      evicts: True when another conversation is displaced, False when the same one is continued.
    """

    session: SessionId
    length: Position
    dropped: NDArray[np.int32] = attrs.field(eq=False)
    evicts: bool


Command = OpenSession | CloseSession | Rewind
"""What a rank does between steps, in the order given and before the step of the same decision."""


@attrs.define(eq=False)
class Slot:
    """Place of one session.

    Attributes:
      index: number of the slot.
      session: session on the ranks; None before the first use and after a failure.
      timeline: what the ranks hold.
      request: request that uses the slot now.
      in_flight: the session is part of a step that has not been applied.
      rewinding: a `Rewind` has been issued and its outcome is not known.
      last_used: counts releases; the smallest is the least recently used.
    """

    index: int
    session: SessionId | None = None
    timeline: Timeline = attrs.field(factory=Timeline)
    request: RequestId | None = None
    in_flight: bool = False
    rewinding: bool = False
    last_used: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether a new request may take the slot."""
        return self.request is None and not self.in_flight and not self.rewinding


@attrs.frozen(kw_only=True)
class Assignment:
    """A slot given to a request.

    Attributes:
      slot: the slot, already marked as the request's.
      reused: tokens of the prompt that the session holds already (before a rewind has cost more).
      commands: what the ranks have to do first.
    """

    slot: Slot
    reused: int
    commands: tuple[Command, ...]


class SlotTable:
    """All slots of a world.

    Args:
      n_slots: resident sessions, >= 1.
      n_ctx: tokens each can hold.
      min_shared_tokens: a shared prefix shorter than this does not make a prompt the continuation
        of a conversation, unless it is all of the conversation. All prompts share their first few
        markers; reusing those is not worth a live conversation.
    """

    def __init__(self, n_slots: int, n_ctx: int, *, min_shared_tokens: int = 16) -> None:
        if n_slots < 1:
            raise ConfigError(f"batched sessions must be >= 1, got {n_slots}")
        if n_ctx < 1:
            raise ConfigError(f"ctx must be >= 1, got {n_ctx}")
        if min_shared_tokens < 1:
            raise ConfigError(f"min_shared_tokens must be >= 1, got {min_shared_tokens}")
        self.slots = tuple(Slot(i) for i in range(n_slots))
        self.n_ctx = n_ctx
        self.min_shared_tokens = min_shared_tokens
        self.evictions = 0
        self.rewinds = 0
        self._next_session = 1
        self._clock = 0
        self._closing: list[CloseSession] = []

    def n_idle(self) -> int:
        """Slots that a new request could take."""
        return sum(slot.is_idle for slot in self.slots)

    def by_session(self, session: SessionId) -> Slot:
        """Slot of an open session. Raises ConfigError when there is none."""
        for slot in self.slots:
            if slot.session == session:
                return slot
        raise ConfigError(f"session {session} is not open")

    def assign(
        self,
        request: RequestId,
        prompt: NDArray[np.int32],
        *,
        system_tokens: int,
        max_reuse: int,
    ) -> Assignment | None:
        """Give a slot to a request, or None when all are busy.

        1. The idle slot whose timeline shares the longest prefix with the prompt, when that is a
           continuation: more than the system prompt, and either the whole timeline or at least
           `min_shared_tokens`. Ties: the one that loses fewer tokens.
        2. Otherwise an empty slot, so that no live conversation is displaced for a system prompt.
        3. Otherwise the least recently used idle slot; what it shares is reused all the same.

        Args:
          request: who asks.
          prompt: i32[n].
          system_tokens: leading tokens of the prompt that other conversations share.
          max_reuse: tokens that may be reused at most; below n, since the last token has to be run
            for its logits.
        """
        idle = [slot for slot in self.slots if slot.is_idle]
        if not idle:
            return None
        shared = {
            slot.index: min(common_prefix(slot.timeline.tokens, prompt), max_reuse) for slot in idle
        }
        best = max(idle, key=lambda s: (shared[s.index], -len(s.timeline), -s.index))
        found = shared[best.index]
        continues = found > system_tokens and (
            found == len(best.timeline) or found >= self.min_shared_tokens
        )
        if not continues:
            empty = [slot for slot in idle if not len(slot.timeline)]
            # An open session first: it costs nothing, opening one costs an allocation.
            best = min(empty or idle, key=lambda s: (s.session is None, s.last_used, s.index))
        return self._take(best, request, shared[best.index], continues=continues)

    def _take(self, slot: Slot, request: RequestId, reused: int, *, continues: bool) -> Assignment:
        slot.request = request
        commands: list[Command] = []
        if slot.session is None:
            commands.append(self._open(slot))
        elif reused < len(slot.timeline):
            self.rewinds += 1
            self.evictions += not continues
            commands.append(
                Rewind(
                    session=slot.session,
                    length=Position(reused),
                    dropped=slot.timeline.tokens[reused:].copy(),
                    evicts=not continues,
                )
            )
            slot.rewinding = True
            slot.timeline.cut(reused)
        return Assignment(slot=slot, reused=reused, commands=tuple(commands))

    def _open(self, slot: Slot) -> OpenSession:
        slot.session = SessionId(self._next_session)
        self._next_session += 1
        return OpenSession(session=slot.session, n_ctx=self.n_ctx)

    def release(self, slot: Slot) -> None:
        """The slot's request has ended; its timeline stays for reuse."""
        self._clock += 1
        slot.request = None
        slot.last_used = self._clock

    def discard(self, slot: Slot) -> None:
        """Forget a session whose state is not known any more; it is closed and never reused."""
        if slot.session is not None:
            self._closing.append(CloseSession(session=slot.session))
        slot.session = None
        slot.timeline = Timeline()
        slot.in_flight = slot.rewinding = False

    def closing(self) -> tuple[CloseSession, ...]:
        """Commands that close the sessions discarded since the last call."""
        commands = tuple(self._closing)
        self._closing.clear()
        return commands

    def adopt(self, session: SessionId, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """An idle session has been restored from a snapshot and now holds `tokens`.

        Raises:
          ConfigError: the session is busy or not open, or does not hold so many tokens.
        """
        slot = self.by_session(session)
        if not slot.is_idle:
            raise ConfigError(f"session {session} is busy and cannot be replaced")
        if len(tokens) > self.n_ctx:
            raise ConfigError(f"{len(tokens)} tokens do not fit a context of {self.n_ctx}")
        slot.timeline = Timeline(tokens)
