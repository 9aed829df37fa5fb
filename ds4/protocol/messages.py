"""Every message of the control protocol: frozen values with an integer tag each.

Invariant: an instance that exists is well-formed. Every field is checked when the message is
built, on both sides, by the field type that also says how it travels. Whether a message may be
sent *now* is not known here; `ds4.protocol.state` decides that.

Field order is wire order. A field added in a later minor version stands last, has a default, and
says `since` in its metadata. Tags are never reused. The words `leader` (the head) and `worker` (any
rank, rank 0 included) name the two ends of a link.
"""

from __future__ import annotations

from ds4.protocol.messages_base import (
    Message,
    Role,
    StepMode,
    StopMode,
    Subject,
)
from ds4.protocol.messages_run import (
    Ack,
    Bye,
    Checkpoint,
    Fail,
    Invalidate,
    Ping,
    Pong,
    RestoreBegin,
    RestoreChunk,
    RestoreEnd,
    Rewind,
    SessionClose,
    SessionOpen,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Step,
    Stop,
)
from ds4.protocol.messages_setup import (
    Challenge,
    Config,
    ConfigOk,
    Hello,
    HelloOk,
    Load,
    Loaded,
    LoadProgress,
    NcclId,
    NcclOk,
    NcclVote,
    Ready,
    Refuse,
    Response,
)

__all__ = [
    "MESSAGES",
    "Ack",
    "Bye",
    "Challenge",
    "Checkpoint",
    "Config",
    "ConfigOk",
    "Fail",
    "Hello",
    "HelloOk",
    "Invalidate",
    "Load",
    "LoadProgress",
    "Loaded",
    "Message",
    "NcclId",
    "NcclOk",
    "NcclVote",
    "Ping",
    "Pong",
    "Ready",
    "Refuse",
    "Response",
    "RestoreBegin",
    "RestoreChunk",
    "RestoreEnd",
    "Rewind",
    "Role",
    "SessionClose",
    "SessionOpen",
    "SnapshotBegin",
    "SnapshotChunk",
    "SnapshotEnd",
    "Step",
    "StepMode",
    "Stop",
    "StopMode",
    "Subject",
]

MESSAGES: tuple[type[Message], ...] = (
    Hello,
    HelloOk,
    Refuse,
    Challenge,
    Response,
    Config,
    ConfigOk,
    Load,
    LoadProgress,
    Loaded,
    NcclVote,
    NcclId,
    NcclOk,
    Ready,
    SessionOpen,
    SessionClose,
    Step,
    Rewind,
    Invalidate,
    Checkpoint,
    Ack,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    RestoreBegin,
    RestoreChunk,
    RestoreEnd,
    Fail,
    Ping,
    Pong,
    Stop,
    Bye,
)
"""All messages, by ascending tag."""
