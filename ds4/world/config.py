"""What a world is: frozen values, checked when they are made, no environment and no clock.

`RunConfig` is the part that all ranks must agree on. It travels to local ranks as JSON, and every
rank derives its geometry from its own copy, so a difference is found and not overwritten.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any

import attrs

from ds4.errors import ConfigError
from ds4.model.deepseek4.rounding import Rounding
from ds4.partition.rules import Mode
from ds4.partition.shards import WORLDS
from ds4.world.timeouts import DEFAULT_TIMEOUTS, Timeouts

__all__ = ["BACKENDS", "TRANSPORTS", "Address", "HeadConfig", "RankConfig", "RunConfig"]

BACKENDS = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "nccl", "tcp")

Address = tuple[str, int]
"""Host and port."""


def _one_of(*accepted: str) -> Callable[[object, attrs.Attribute[str], str], None]:
    def check(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
        if value not in accepted:
            raise ConfigError(
                f"{attribute.name} must be one of {', '.join(accepted)}, got {value!r}"
            )

    return check


def _count(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{attribute.name} must be a whole number >= 1, got {value!r}")


@attrs.frozen(kw_only=True)
class RunConfig:
    """What all ranks of a world run.

    Attributes:
      model: path of the model file on this rank.
      mode: what is divided; of no consequence in a world of one.
      world: number of ranks.
      n_ctx: most tokens of a session.
      prefill_chunk: most prompt tokens of one session in one step.
      max_sessions: sessions that may be open.
      placement: `contiguous`, `balanced`, or the path of a placement file.
      backend: `auto`, `cpu` or `cuda`.
      transport: data plane: `auto`, `nccl` or `tcp`.
      rounding: activation rounding switch.
    """

    model: str
    mode: Mode = attrs.field(
        default=Mode.EXPERT_PARALLEL, validator=attrs.validators.instance_of(Mode)
    )
    world: int = attrs.field(default=1, validator=_count)
    n_ctx: int = attrs.field(default=32768, validator=_count)
    prefill_chunk: int = attrs.field(default=4096, validator=_count)
    max_sessions: int = attrs.field(default=8, validator=_count)
    placement: str = "contiguous"
    backend: str = attrs.field(default="auto", validator=_one_of(*BACKENDS))
    transport: str = attrs.field(default="auto", validator=_one_of(*TRANSPORTS))
    rounding: Rounding = attrs.field(default=Rounding.NONE, converter=Rounding)

    def __attrs_post_init__(self) -> None:
        if self.world not in WORLDS:
            raise ConfigError(
                f"--tensor-parallel-world must be one of {', '.join(map(str, WORLDS))}, "
                f"got {self.world}"
            )

    @property
    def data_plane(self) -> str:
        """The transport in use: `none` in a world of one."""
        if self.world == 1:
            return "none"
        if self.transport != "auto":
            return self.transport
        return "nccl" if self.backend == "cuda" else "tcp"

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return attrs.asdict(self) | {"mode": self.mode.value, "rounding": str(self.rounding)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunConfig:
        """The inverse of `to_json`.

        Raises:
          ConfigError: a value is missing, unknown or out of range.
        """
        try:
            return cls(**(values | {"mode": Mode(values["mode"])}))
        except (TypeError, KeyError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"rank configuration: {error}") from error


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


@attrs.frozen(kw_only=True)
class HeadConfig:
    """What a head needs to form a world.

    Attributes:
      run: what is run.
      listen: where ranks dial in; port 0 takes a free one.
      remote: whether ranks 1 to N-1 are other people's to start. If not, the head starts them all;
        rank 0 it always starts.
      key: cluster key; None without one. A world of local ranks makes up its own.
      threads: CPU threads of a local rank; None divides this host's among its local ranks.
      timeouts: bounds on waiting.
      preflight_only: compare, report and stop, before any weight is read.
      log_level: least level of the log records of local ranks.
    """

    run: RunConfig
    listen: Address = ("127.0.0.1", 0)
    remote: bool = False
    key: bytes | None = attrs.field(default=None, repr=False)
    threads: int | None = None
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    preflight_only: bool = False
    log_level: int = logging.WARNING

    @property
    def local_ranks(self) -> range:
        """Ranks that the head starts."""
        return range(1 if self.remote else self.run.world)

    @property
    def rank_threads(self) -> int:
        """CPU threads of each local rank."""
        if self.threads is not None:
            return self.threads
        return max(1, len(os.sched_getaffinity(0)) // len(self.local_ranks))

    def warnings(self) -> list[str]:
        """What is allowed but unwise, one line each."""
        if self.key is None and not _is_loopback(self.listen[0]):
            return [
                f"--listen {self.listen[0]} takes ranks from the network and no "
                "--cluster-key-file is given: whoever reaches the port can join this world"
            ]
        return []


@attrs.frozen(kw_only=True)
class RankConfig:
    """What a rank process needs.

    Attributes:
      run: what it runs.
      rank: which rank it is.
      address: where its head listens.
      key: cluster key; None without one.
      threads: CPU threads; None takes every core this process may use.
      collective_host: address that other ranks reach this one by; None takes the one it reaches
        its head from.
      timeouts: bounds on waiting.
      log_level: least level of its log records.
    """

    run: RunConfig
    rank: int
    address: Address
    key: bytes | None = attrs.field(default=None, repr=False)
    threads: int | None = None
    collective_host: str | None = None
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    log_level: int = logging.WARNING

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.rank < self.run.world:
            raise ConfigError(
                f"--tensor-parallel-rank must be from 0 to {self.run.world - 1} in a world of "
                f"{self.run.world}, got {self.rank}"
            )

    def dumps(self) -> str:
        """One line of JSON, key included: for a pipe, never for a command line."""
        return json.dumps(
            {
                "run": self.run.to_json(),
                "rank": self.rank,
                "address": list(self.address),
                "key": None if self.key is None else self.key.hex(),
                "threads": self.threads,
                "collective_host": self.collective_host,
                "timeouts": attrs.asdict(self.timeouts),
                "log_level": self.log_level,
            }
        )

    @classmethod
    def loads(cls, text: str) -> RankConfig:
        """The inverse of `dumps`.

        Raises:
          ConfigError: not that.
        """
        try:
            values = json.loads(text)
            host, port = values["address"]
            key = values["key"]
            return cls(
                run=RunConfig.from_json(values["run"]),
                rank=values["rank"],
                address=(host, port),
                key=None if key is None else bytes.fromhex(key),
                threads=values["threads"],
                collective_host=values["collective_host"],
                timeouts=Timeouts(**values["timeouts"]),
                log_level=values["log_level"],
            )
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"rank configuration: {error}") from error
