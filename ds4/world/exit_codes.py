"""What a process of a world says by its exit status, and which error leads to which.

One table for the head, its ranks and every frontend. A head that exits 0 while a rank does not is a
defect, so every way a rank can end has a number of its own.
"""

from __future__ import annotations

from enum import IntEnum

from ds4.errors import (
    CollectiveError,
    ConfigError,
    Desync,
    DeviceError,
    Ds4Error,
    RankLost,
    WorldRefused,
)

__all__ = ["ExitCode", "exit_code_of", "exit_code_of_fail"]


class ExitCode(IntEnum):
    """Exit status of a head or a rank."""

    CLEAN = 0
    FAILED = 1
    """The work failed, the ranks did not: an evaluation below its target, a missing file."""
    REFUSED = 2
    """No world was formed, and no weight byte was read."""
    PEER_LOST = 3
    LEADER_LOST = 4
    DESYNC = 5
    DATA_PLANE = 6
    INTERRUPTED = 130


_BY_CODE = {
    WorldRefused.code: ExitCode.REFUSED,
    ConfigError.code: ExitCode.REFUSED,
    Desync.code: ExitCode.DESYNC,
    CollectiveError.code: ExitCode.DATA_PLANE,
    RankLost.code: ExitCode.PEER_LOST,
    "leader_lost": ExitCode.LEADER_LOST,
    "interrupted": ExitCode.INTERRUPTED,
}


def exit_code_of(error: Ds4Error) -> ExitCode:
    """Exit status of a head that ends because of `error`."""
    if isinstance(error, DeviceError):
        return ExitCode.DATA_PLANE
    return _BY_CODE.get(error.code, ExitCode.FAILED)


def exit_code_of_fail(code: str) -> ExitCode:
    """Exit status of a rank that is told of a failure by its code in a `fail` frame."""
    return _BY_CODE.get(code, ExitCode.PEER_LOST)
