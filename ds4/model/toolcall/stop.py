"""Stop strings over streamed text.

Invariant: however the text is cut, the same characters come out and the same stop string ends them:
the one that is complete first, and of several that end together the longest. Nothing of the stop
string itself is ever shown. Pure; knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4.errors import InvalidRequest

__all__ = ["StopMatcher", "held_length"]


def held_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that a marker begins with but does not end with."""
    longest = max(map(len, markers), default=0)
    for n in range(min(longest - 1, len(text)), 0, -1):
        suffix = text[-n:]
        if any(len(marker) > n and marker.startswith(suffix) for marker in markers):
            return n
    return 0


class StopMatcher:
    """Shows streamed text up to the first stop string.

    Withholds no more than the longest suffix that could begin one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Set the stop strings.

        Raises:
          InvalidRequest: an empty stop string.
        """
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if any; later input is ignored."""
        return self._matched

    def feed(self, text: str) -> str:
        """Take more text; return what may be shown now."""
        if self._matched is not None:
            return ""
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if ends:
            _, at, self._matched = min(ends)
            self._held = ""
            return text[:at]
        n = held_length(text, self._stops)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def flush(self) -> str:
        """The text ended, or something else than text follows: return what was withheld."""
        held, self._held = self._held, ""
        return held
