"""`StepExecutor`: what a rank drives. Two real implementations: `ds4.cpu` and `ds4.cuda`.

An executor is ordinary synchronous code, called from one thread. It owns the weights and the state
of every session, and it never decides anything that the plan does not say.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ds4.ids import Position, SessionId
from ds4.steps import StepPlan, StepResult

__all__ = ["StepExecutor"]


@runtime_checkable
class StepExecutor(Protocol):
    """Runs steps on one device."""

    def open_session(self, session: SessionId, n_ctx: int) -> None:
        """Create an empty timeline that can hold `n_ctx` tokens.

        Raises:
          ConfigError: the id is open already, or the model has no such context.
          DeviceError: no room.
        """

    def close_session(self, session: SessionId) -> None:
        """Drop a timeline. Raises `InvalidRequest` when it is not open."""

    def session_length(self, session: SessionId) -> Position:
        """Number of tokens the timeline holds."""

    def session_tokens(self, session: SessionId) -> list[int]:
        """The ids the timeline holds."""

    def check(self, plan: StepPlan) -> None:
        """Raise `InvalidRequest` for a plan that does not fit the sessions; launches nothing."""

    def step(self, plan: StepPlan) -> StepResult:
        """Run one batched forward pass and advance every session in it.

        Raises:
          InvalidRequest: as `check`; nothing has been changed.
          DeviceError: the step failed; the state of every session in it is undefined.
        """

    def snapshot(self, session: SessionId) -> bytes:
        """Everything needed to continue the timeline exactly, with identity and checksum."""

    def restore(self, session: SessionId, data: bytes) -> None:
        """Replace the timeline by a snapshot.

        Raises:
          SnapshotError: another model, another rounding switch, or damaged bytes; the timeline is
            unchanged.
        """

    def rewind(self, session: SessionId, length: Position) -> Position:
        """Cut the timeline to the longest exact prefix it still has state for.

        Returns:
          The length kept, at most `length` and the same on every rank. The caller feeds the tokens
          in between again; the result is then as if the rest had never been.

        Raises:
          InvalidRequest: longer than the timeline is.
        """

    def close(self) -> None:
        """Free everything. Safe to call twice."""
