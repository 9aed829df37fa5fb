"""Which thinking mode a choice means in a context of a given size."""

from __future__ import annotations

from typing import Literal

from ds4.model.chat import ThinkingMode

__all__ = ["MAX_THINKING_CONTEXT", "Thinking", "effective_mode"]

Thinking = Literal["think", "max", "none"]

MAX_THINKING_CONTEXT = 393216
"""Least context, in tokens, in which mode max has room to reason."""


def effective_mode(choice: Thinking, n_ctx: int) -> tuple[ThinkingMode | None, str | None]:
    """Mode for the prompt, and a note when it is not what was asked for.

    Args:
      choice: what the user asked for.
      n_ctx: context of the session.

    Returns:
      The mode (None means the model's own default, which is to think), and a note or None.
    """
    if choice == "none":
        return ThinkingMode.NONE, None
    if choice == "max":
        if n_ctx >= MAX_THINKING_CONTEXT:
            return ThinkingMode.MAX, None
        return (
            ThinkingMode.HIGH,
            f"--think-max needs a context of {MAX_THINKING_CONTEXT} tokens, this one has {n_ctx};"
            " thinking mode is high",
        )
    return None, None
