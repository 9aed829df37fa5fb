"""`--trace FILE`: what was put to the model and what came back, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from ds4.frontends.files import FileError

__all__ = ["Trace"]


class Trace:
    """Writes titled sections to a file, or nowhere when there is no path.

    Every section is flushed, so that the file is complete up to a crash.

    Raises:
      FileError: the file cannot be written.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path or ""
        self._file: TextIO | None = None
        if path is not None:
            try:
                self._file = open(  # noqa: SIM115  # closed by close()
                    path, "w", encoding="utf-8", errors="backslashreplace"
                )
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise FileError("--trace", path, reason) from error

    def section(self, title: str, body: str) -> None:
        """Add a section."""
        if self._file is None:
            return
        try:
            self._file.write(f"== {title}\n{body}\n\n")
            self._file.flush()
        except OSError as error:
            raise FileError("--trace", self._path, error.strerror or str(error)) from error

    def fields(self, title: str, values: dict[str, object]) -> None:
        """Add a section of names and values."""
        self.section(title, "\n".join(f"{name}: {value}" for name, value in values.items()))

    def tokens(self, title: str, ids: Sequence[int], text: str) -> None:
        """Add a section of token ids and the text they spell."""
        self.section(f"{title} ({len(ids)} tokens)", f"{text}\n-- ids\n{list(ids)}")

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
