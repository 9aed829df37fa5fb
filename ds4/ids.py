"""Identifiers that must not be mixed up: plain ints at run time, distinct types for the checker."""

from __future__ import annotations

from typing import NewType

__all__ = ["Position", "Rank", "RequestId", "SessionId", "StepId", "Token"]

Rank = NewType("Rank", int)
StepId = NewType("StepId", int)
RequestId = NewType("RequestId", int)
SessionId = NewType("SessionId", int)
Token = NewType("Token", int)
Position = NewType("Position", int)
