"""Which token goes to which expert in a prefill step: lists by expert, cut into tiles.

The invariant: every choice of an expert that this rank holds is in exactly one tile. The order of
choices inside an expert's list is not defined and does not matter: every product is one row's own.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import int32

from ds4.cuda.kernels.intrinsics import cuda, grid_wait, release_dependents

__all__ = ["LIST_TILE", "launch_lists", "max_tiles"]

LIST_TILE = 64
_THREADS = 256


def max_tiles(n_choices: int, n_held: int) -> int:
    """Tiles that n_choices choices among n_held experts may need: the size of the tile table."""
    return n_choices // LIST_TILE + min(n_held, n_choices)


@functools.cache
def _lists_kernel(n_experts: int) -> Any:
    """Kernel (ids i32[n], n, slots i32[E], order i32[n], tiles i32[3 max_tiles], n_max).

    order: choices grouped by expert. tiles: per tile the expert's slot, the first position in order
    and the number of positions (1 to 64); tiles without work have 0.

    Grid: one block of 256 threads. Shared memory: 8 bytes an expert.
    """

    @cuda.jit
    def lists(ids, n, slots, order, tiles, n_max):
        release_dependents()
        counts = cuda.shared.array(n_experts, int32)
        places = cuda.shared.array(n_experts, int32)
        thread = cuda.threadIdx.x
        for e in range(thread, n_experts, _THREADS):
            counts[e] = 0
        grid_wait()
        cuda.syncthreads()
        for i in range(thread, n, _THREADS):
            expert = ids[i]
            if slots[expert] >= 0:
                cuda.atomic.add(counts, expert, 1)
        for t in range(thread, n_max, _THREADS):
            tiles[3 * t + 2] = 0
        cuda.syncthreads()
        for e in range(thread, n_experts, _THREADS):
            first, tile = 0, 0
            for before in range(e):
                first += counts[before]
                tile += (counts[before] + LIST_TILE - 1) // LIST_TILE
            places[e] = first
            count = counts[e]
            while count > 0:
                tiles[3 * tile] = slots[e]
                tiles[3 * tile + 1] = first
                tiles[3 * tile + 2] = min(count, LIST_TILE)
                first += LIST_TILE
                count -= LIST_TILE
                tile += 1
        cuda.syncthreads()
        for i in range(thread, n, _THREADS):
            expert = ids[i]
            if slots[expert] >= 0:
                order[cuda.atomic.add(places, expert, 1)] = i

    return lists


def launch_lists(
    stream: Any, ids: Any, n_choices: int, slots: Any, order: Any, tiles: Any, n_tiles: int
) -> None:
    """Enqueue. ids i32[>= n_choices]; n_tiles from `max_tiles`; the outputs as the kernel says."""
    kernel = _lists_kernel(len(slots))
    kernel[1, _THREADS, stream](ids, n_choices, slots, order, tiles, n_tiles)
