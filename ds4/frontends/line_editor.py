"""Where the interactive mode gets the user's turns from.

Prompts and echo go to standard error, because standard output carries answers only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ds4.frontends.terminal import Terminal, is_terminal

__all__ = ["LineEditor", "PlainEditor", "history_path", "open_editor"]

_PROMPT = "ds4> "
_CONTINUED = "...> "


class LineEditor(Protocol):
    """Reads one turn at a time."""

    def read(self) -> str:
        """The next entry, which may be several lines.

        Raises:
          EOFError: the user is done.
          KeyboardInterrupt: Ctrl+C at the prompt.
        """


class PlainEditor:
    """Lines as they come, for terminals that cannot edit."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def read(self) -> str:
        """See `LineEditor.read`."""
        self._terminal.stderr.write(_PROMPT)
        self._terminal.stderr.flush()
        line = self._terminal.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class PromptToolkitEditor:
    """Editing, history, several lines, and a bracketed paste as one entry.

    Args:
      history: file that entries are kept in; None keeps them for this run only.
      terminal: standard error of it shows the prompt.
    """

    def __init__(self, terminal: Terminal, history: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.output import create_output
        from prompt_toolkit.output.color_depth import ColorDepth

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            output=create_output(stdout=terminal.stderr),
            key_bindings=keys,
            prompt_continuation=_CONTINUED,
            color_depth=None if terminal.colours_allowed else ColorDepth.DEPTH_1_BIT,
        )

    def read(self) -> str:
        """See `LineEditor.read`."""
        return self._session.prompt()


def history_path(environment: Mapping[str, str]) -> Path | None:
    """File of the history, created readable by its owner only; None where there can be none."""
    home = environment.get("HOME")
    state = environment.get("XDG_STATE_HOME") or (f"{home}/.local/state" if home else None)
    if not state:
        return None
    path = Path(state) / "ds4" / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except (OSError, ValueError):
        return None  # a read-only home is no reason not to chat
    return path


def open_editor(terminal: Terminal) -> LineEditor:
    """The best editor that the terminal allows."""
    if is_terminal(terminal.stderr) and terminal.environment.get("TERM") != "dumb":
        return PromptToolkitEditor(terminal, history_path(terminal.environment))
    return PlainEditor(terminal)
