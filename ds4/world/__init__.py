"""A world of ranks: one head, N ranks, one handle.

`open_world` gives a synchronous executor over any number of ranks. The head (`head`, `gathering`,
`peer`, `handle`) and a rank (`rank_actor`, `rank_work`, `device_thread`) are Trio actors over
whatever streams they are given; `local` and `ds4.rank` give them sockets and processes. They live
in one package because they change together: whenever what a head and a rank say to each other does.
"""

from ds4.world.config import HeadConfig, RankConfig, RunConfig
from ds4.world.executor import WorldExecutor, open_world
from ds4.world.exit_codes import ExitCode, exit_code_of
from ds4.world.timeouts import Timeouts

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
