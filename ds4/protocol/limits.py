"""Bounds of one connection. They are local policy: nothing here is negotiated on the wire."""

from __future__ import annotations

import attrs

from ds4.errors import ConfigError

__all__ = ["DEFAULT_LIMITS", "Limits"]

_RANGES = {
    "max_frame_bytes": (64, 2**32 - 1),
    "max_window": (1, 64),
    "max_ops": (1, 4096),
    "max_pings": (1, 64),
}


def _in_range(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    low, high = _RANGES[attribute.name]
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{attribute.name} must be from {low} to {high}, got {value!r}")


@attrs.frozen(kw_only=True)
class Limits:
    """What a peer may make this side hold.

    Attributes:
      max_frame_bytes: longest frame body; a longer one is refused when its header is read. 64 MiB
        holds the float32 logits of 129 rows at a vocabulary of 129,280.
      max_window: most steps without an answer that `Config.window` may ask for.
      max_ops: most session operations without an answer.
      max_pings: most pings without an answer, in each direction.

    Raises:
      ConfigError: a value out of range.
    """

    max_frame_bytes: int = attrs.field(default=64 * 2**20, validator=_in_range)
    max_window: int = attrs.field(default=8, validator=_in_range)
    max_ops: int = attrs.field(default=256, validator=_in_range)
    max_pings: int = attrs.field(default=8, validator=_in_range)


DEFAULT_LIMITS = Limits()
