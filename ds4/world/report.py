"""The world report: what every rank said it holds, as one JSON document.

No field is filled from configuration when a rank can measure it.
"""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from ds4.backend import Pairs
from ds4.errors import ConfigError
from ds4.protocol.identity import Geometry
from ds4.protocol.messages import Hello, Loaded, Message, Ready

__all__ = ["RankReport", "WorldReport"]


@attrs.frozen(kw_only=True)
class RankReport:
    """One rank.

    Attributes:
      rank: its index.
      host, pid: where it runs.
      device: facts from its hello.
      mapped_bytes, device_bytes, expert_rows, load_s: from its `loaded`.
      ready: facts from its `ready`.
    """

    rank: int
    host: str
    pid: int
    device: Pairs
    mapped_bytes: int
    device_bytes: int
    expert_rows: int
    load_s: float
    ready: Pairs

    @classmethod
    def of(cls, hello: Hello, loaded: Message, ready: Message) -> RankReport:
        """Put together what a rank said."""
        if not isinstance(loaded, Loaded) or not isinstance(ready, Ready):
            raise TypeError(f"expected loaded and ready, got {loaded!r:.60} and {ready!r:.60}")
        return cls(
            rank=hello.rank,
            host=hello.host,
            pid=hello.pid,
            device=hello.device,
            mapped_bytes=loaded.mapped_bytes,
            device_bytes=loaded.device_bytes,
            expert_rows=loaded.expert_rows,
            load_s=loaded.seconds,
            ready=ready.report,
        )


@attrs.frozen(kw_only=True)
class WorldReport:
    """A world at READY.

    Attributes:
      geometry: what all agreed on.
      ranks: in rank order.
    """

    geometry: Geometry
    ranks: tuple[RankReport, ...]

    def to_json(self) -> dict[str, object]:
        """Plain values; digests in hexadecimal."""
        geometry = {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in attrs.asdict(self.geometry).items()
        }
        ranks = [
            attrs.asdict(rank) | {"device": dict(rank.device), "ready": dict(rank.ready)}
            for rank in self.ranks
        ]
        return {
            "geometry": geometry,
            "geometry_hash": self.geometry.geometry_hash().hex(),
            "ranks": ranks,
        }

    def write(self, path: str) -> None:
        """Write it as JSON.

        Raises:
          ConfigError: the file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--world-report {path}: {error.strerror or error}") from error
