"""A world of ranks: one head, N ranks, one handle.

`open_world` gives a synchronous executor over any number of ranks. The head (`head`, `gathering`,
`peer`, `handle`) and a rank (`rank_actor`, `rank_work`, `device_thread`) are Trio actors over
whatever streams they are given; `local` and `ds4.rank` give them sockets and processes. They live
in one package because they change together: whenever what a head and a rank say to each other does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds4.world.config import HeadConfig, RankConfig, RunConfig
from ds4.world.exit_codes import ExitCode, exit_code_of
from ds4.world.timeouts import Timeouts

if TYPE_CHECKING:
    from ds4.world.executor import WorldExecutor, open_world

__all__ = [
    "ExitCode",
    "HeadConfig",
    "RankConfig",
    "RunConfig",
    "Timeouts",
    "WorldExecutor",
    "exit_code_of",
    "open_world",
]


def __getattr__(name: str) -> object:
    """Import the parts that need Trio only when they are used: programs parse options first."""
    if name in ("WorldExecutor", "open_world"):
        from ds4.world import executor

        return getattr(executor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
