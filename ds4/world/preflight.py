"""The memory guard of a rank, and the verdicts that `--preflight-only` prints.

A CPU rank computes in the file's mapping: its pages are the system's cache, shared by the ranks of
a host and given up under pressure. They are not counted; sessions and activations are.
"""

from __future__ import annotations

import os
from pathlib import Path

from ds4.partition.memory import (
    MemoryBudget,
    MemoryKind,
    MemoryPlan,
    MemoryVerdict,
    admit,
    partial_state_bytes,
    session_rows_bytes,
)
from ds4.world.config import RunConfig
from ds4.world.identity import Identity

__all__ = ["host_memory", "memory_plan", "memory_verdict"]

_ELEMENT_BYTES = 4
_CPU_RESERVE_BYTES = 256 << 20
"""For the interpreter, the compiled kernels and the sockets; arbitrary."""
_ROWS = 256
"""Rows of one forward pass on the CPU."""
_ACTIVATIONS = 64
"""Buffers of a row's width that live at one time; a bound found by reading the forward pass."""


def host_memory() -> MemoryBudget:
    """What this host has: physical memory, and what it could hand out now."""
    page = os.sysconf("SC_PAGE_SIZE")
    physical = page * os.sysconf("SC_PHYS_PAGES")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            # Free pages and cache that can be dropped: the kernel's own estimate.
            free = int(line.split()[1]) * 1024
    return MemoryBudget(
        kind=MemoryKind.DISCRETE,
        physical_bytes=physical,
        free_bytes=free,
        reserve_bytes=_CPU_RESERVE_BYTES,
    )


def memory_plan(identity: Identity, run: RunConfig) -> MemoryPlan:
    """What a CPU rank allocates."""
    shape = identity.shape
    session = session_rows_bytes(shape, identity.geometry.n_ctx, _ELEMENT_BYTES)
    return MemoryPlan(
        model_bytes=0,
        workspace_bytes=_ROWS * (_ACTIVATIONS * shape.d_model + shape.n_vocab) * _ELEMENT_BYTES,
        sessions=run.max_sessions,
        session_bytes=session + partial_state_bytes(shape),
    )


def memory_verdict(
    identity: Identity, run: RunConfig, *, who: str, budget: MemoryBudget | None = None
) -> MemoryVerdict:
    """Whether a rank fits this host.

    Args:
      identity: of the rank.
      run: what it runs.
      who: named in the text.
      budget: None is this host's.
    """
    return admit(memory_plan(identity, run), budget or host_memory(), who=who)
