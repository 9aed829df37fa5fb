"""Tool calls: how they are written into prompts and found in what a model samples."""

from ds4.model.toolcall.dsml import Mark, ToolCall, render_calls
from ds4.model.toolcall.events import (
    BlockEnd,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from ds4.model.toolcall.parser import OutputParser, ToolPolicy, piece_of
from ds4.model.toolcall.stop import StopMatcher

__all__ = [
    "BlockEnd",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Event",
    "Mark",
    "OutputParser",
    "Reasoning",
    "StopMatcher",
    "ToolCall",
    "ToolPolicy",
    "piece_of",
    "render_calls",
]
