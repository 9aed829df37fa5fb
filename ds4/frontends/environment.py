"""The environment variables that ds4 knows, and a warning for those it does not.

A misspelt variable would otherwise do nothing, quietly. Variables are read in frontends only; every
layer below gets values.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping

from ds4.errors import ConfigError

__all__ = ["KNOWN", "log_level", "unknown_variables"]

KNOWN: Mapping[str, str] = {
    "DS4_LOG": "least level of log records on standard error: debug, info, warning or error",
    "DS4_TP_TIMEOUT_SEC": "seconds for all ranks of a world to arrive (default: 300)",
}
"""Name to meaning."""

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """One warning for every `DS4_*` variable that ds4 does not read, naming the nearest it does."""
    warnings = []
    for name in sorted(environment):
        if name.startswith("DS4_") and name not in KNOWN:
            nearest = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.0)[0]
            warnings.append(f"unknown environment variable {name}; the nearest known is {nearest}")
    return warnings


def log_level(environment: Mapping[str, str]) -> int:
    """Level that `DS4_LOG` asks for; warning when it is not set.

    Raises:
      ConfigError: an unknown level.
    """
    value = environment.get("DS4_LOG", "warning")
    if value.lower() not in _LEVELS:
        raise ConfigError(
            f"environment variable DS4_LOG must be one of {', '.join(_LEVELS)}, got {value!r}"
        )
    return _LEVELS[value.lower()]
