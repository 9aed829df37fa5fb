"""Tool calls: how they are written into prompts and found in what a model samples."""

from ds4.model.toolcall.dsml import Mark, ToolCall, render_calls

__all__ = ["Mark", "ToolCall", "render_calls"]
