"""What all messages share: the base class, the two roles and the small enumerations."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

import attrs

__all__ = [
    "Message",
    "Role",
    "StepMode",
    "StopMode",
    "Subject",
]


class Role(IntEnum):
    """The two ends of a link."""

    LEADER = 0
    WORKER = 1

    @property
    def peer(self) -> Role:
        """The other end."""
        return Role.WORKER if self is Role.LEADER else Role.LEADER


class Subject(IntEnum):
    """What an `Ack` answers or a `Fail` is about."""

    NOTHING = 0
    STEP = 1
    OP = 2


class StepMode(IntEnum):
    """How a rank runs a step. The leader decides, because it decides the order of collectives."""

    EAGER = 0
    GRAPH = 1
    NOOP = 2


class StopMode(IntEnum):
    """Finish what is outstanding first, or leave it."""

    DRAIN = 0
    NOW = 1


@attrs.frozen(kw_only=True)
class Message:
    """Base of all messages."""

    TAG: ClassVar[int]
    NAME: ClassVar[str]
