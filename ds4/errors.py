"""Every error ds4 raises on purpose, each with a stable `code`.

The code travels on the wire and in HTTP bodies, so it never changes once released. Foreign errors
(msgpack, OSError, the CUDA driver) are translated once, at the seam that calls the foreign code.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CollectiveError",
    "ConfigError",
    "ContextOverflow",
    "Desync",
    "DeviceError",
    "Ds4Error",
    "InvalidRequest",
    "LocalProtocolError",
    "ModelFileError",
    "OutOfDeviceMemory",
    "Overloaded",
    "ProtocolError",
    "QuantFormatError",
    "RankLost",
    "RemoteProtocolError",
    "RequestError",
    "SnapshotError",
    "UnsupportedModelError",
    "WorldRefused",
]


class Ds4Error(Exception):
    """Base of all errors that ds4 raises on purpose."""

    code: ClassVar[str] = "ds4_error"


class ConfigError(Ds4Error, ValueError):
    """An option or argument is wrong. The text names it, the value, and what is accepted."""

    code = "config"


_MOST_SHOWN = 300


def _line(value: object) -> str:
    """Text of a file, however long or strange, as part of one printable line."""
    text = " ".join(str(value)[: 2 * _MOST_SHOWN].split())
    if len(text) > _MOST_SHOWN:
        text = text[:_MOST_SHOWN] + "..."
    return _printable(text)


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class ModelFileError(Ds4Error):
    """A model file cannot be used as it is.

    Args:
      path: the file.
      what: the part that is wrong: a metadata key, a tensor name, or a section of the file.
      expected: what would have been accepted.
      found: what is there.
      offset: byte offset in the file, when one is known.
    """

    code = "model_file"

    def __init__(
        self,
        path: str,
        what: str,
        *,
        expected: object,
        found: object,
        offset: int | None = None,
    ) -> None:
        self.path = path
        self.what = what
        self.expected = expected
        self.found = found
        self.offset = offset
        at = "" if offset is None else f" at byte {offset}"
        parts = f"{_line(what)}{at}: expected {_line(expected)}, found {_line(found)}"
        super().__init__(f"{_printable(path)}: {parts}")


class QuantFormatError(ModelFileError):
    """Bytes do not form whole blocks of the quantization type they claim."""

    code = "quant_format"


class UnsupportedModelError(ModelFileError):
    """A well-formed file of a model that ds4 does not run."""

    code = "unsupported_model"


class SnapshotError(Ds4Error):
    """A snapshot does not belong to this model, or its bytes are damaged."""

    code = "snapshot"


class ProtocolError(Ds4Error):
    """The control protocol was violated. Raised only as one of its two subclasses.

    Args:
      text: what was expected and what was found.
      reason: stable name of the rule that was broken, as listed in docs/PROTOCOL.md.
    """

    code = "protocol"

    def __init__(self, text: str, *, reason: str = "protocol") -> None:
        if type(self) is ProtocolError:
            raise TypeError("raise LocalProtocolError or RemoteProtocolError")
        self.reason = reason
        super().__init__(text)


class LocalProtocolError(ProtocolError):
    """This side tried to send something the protocol forbids now. A bug in ds4."""

    code = "protocol_local"


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that are not a legal continuation of the conversation."""

    code = "protocol_remote"


class WorldRefused(Ds4Error):
    """A world cannot be formed. Raised before any weight byte is read; exit status 2.

    Args:
      reason: stable reason code.
      text: one line naming the field, both values, the rank and the flag that sets it.
    """

    code = "refused"

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


class DeviceError(Ds4Error):
    """A device operation failed. The text names the operation and the driver's status."""

    code = "device"


class OutOfDeviceMemory(DeviceError):
    """An allocation did not fit. The text carries the arithmetic."""

    code = "device_memory"


class CollectiveError(DeviceError):
    """The data plane between ranks failed."""

    code = "collective"


class RankLost(Ds4Error):
    """A rank is dead, late, or disagrees.

    Args:
      rank: the rank that was lost.
      reason: what was seen.
      step: the step it was lost in, when one was running.
    """

    code = "rank_lost"

    def __init__(self, rank: int, reason: str, *, step: int | None = None) -> None:
        self.rank = rank
        self.reason = reason
        self.step = step
        where = "" if step is None else f" in step {step}"
        super().__init__(f"rank {rank} lost{where}: {reason}")


class Desync(RankLost):
    """Ranks that must agree do not: another digest, another length, another verdict on a plan."""

    code = "desync"


class RequestError(Ds4Error):
    """One request failed; others are not affected."""

    code = "request"


class InvalidRequest(RequestError):
    """The request is malformed or asks for something that cannot be done."""

    code = "invalid_request"


class ContextOverflow(RequestError):
    """The prompt does not fit the session's context."""

    code = "context_length_exceeded"

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx
        super().__init__(f"prompt of {n_prompt_tokens} tokens does not fit a context of {n_ctx}")


class Overloaded(RequestError):
    """The queue is full; try again later."""

    code = "queue_full"
