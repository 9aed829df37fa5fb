"""Sums across a warp with one fixed association, and the tree over eight shards.

Every lane sum is the butterfly (l, l^16), then ^8, ^4, ^2, ^1, whatever else is summed at the same
time; so a value's bits do not depend on how many rows, batch rows or shards a launch computes.
The transposed form below sums several values at once: each exchange halves the values a lane
carries, and the pairs that meet are the butterfly's own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.cuda.kernels.intrinsics import device_function, shfl_xor

__all__ = [
    "N_SHARDS",
    "group_sum",
    "lane_sum_reference",
    "shard_blocks",
    "shard_sum",
    "tree_reference",
    "warp_sum",
]

N_SHARDS = 8


def shard_blocks(n_blocks: int, shard: int) -> int:
    """First block of a shard; `shard_blocks(n, v + 1)` is its end."""
    return shard * n_blocks // N_SHARDS


def lane_sum_reference(lanes: NDArray[np.float32]) -> NDArray[np.float32]:
    """The butterfly over the last axis (32 lanes), in float32."""
    values = lanes
    for half in (16, 8, 4, 2, 1):
        values = values[..., :half] + values[..., half : 2 * half]
    result: NDArray[np.float32] = values[..., 0]
    return result


def tree_reference(shards: NDArray[np.float32]) -> NDArray[np.float32]:
    """((s0+s1)+(s2+s3))+((s4+s5)+(s6+s7)) over the last axis: 8, 4, 2 or 1 shards."""
    values = shards
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    result: NDArray[np.float32] = values[..., 0]
    return result


@device_function
def warp_sum(value):
    """Sum over the 32 lanes, in every lane."""
    value = value + shfl_xor(value, 16)
    value = value + shfl_xor(value, 8)
    value = value + shfl_xor(value, 4)
    value = value + shfl_xor(value, 2)
    return value + shfl_xor(value, 1)


@functools.cache
def group_sum(n_values: int) -> Any:
    """Device function (parts, first, lane) -> sum over the warp of parts[first + (lane >> 2) % n].

    `parts[first : first + n_values]` are one lane's partial sums, overwritten. n_values is 8, 4, 2
    or 1, and lanes that differ by a multiple of 4 n_values get the same sum.
    """
    if n_values not in (1, 2, 4, 8):
        raise ValueError(f"n_values must be 1, 2, 4 or 8, got {n_values}")
    # A split step hands half of the values to the partner lane; a plain one keeps all. The last
    # three (or fewer) steps of distance 16, 8, 4 split, so bit i of the value is lane bit 2 + i.
    plain_16, plain_8, plain_4 = n_values < 8, n_values < 4, n_values < 2

    @device_function
    def split(low, high, upper, distance):
        """One exchange: the upper lane keeps `high` and sends `low`."""
        sent = low if upper else high
        kept = high if upper else low
        return kept + shfl_xor(sent, distance)

    @device_function
    def total(parts, first, lane):
        for v in range(4):
            if not plain_16:
                low, high = parts[first + v], parts[first + v + 4]
                parts[first + v] = split(low, high, lane & 16 != 0, 16)
            elif v < n_values:
                parts[first + v] = parts[first + v] + shfl_xor(parts[first + v], 16)
        for v in range(2):
            if not plain_8:
                low, high = parts[first + v], parts[first + v + 2]
                parts[first + v] = split(low, high, lane & 8 != 0, 8)
            elif v < n_values:
                parts[first + v] = parts[first + v] + shfl_xor(parts[first + v], 8)
        if plain_4:
            value = parts[first] + shfl_xor(parts[first], 4)
        else:
            value = split(parts[first], parts[first + 1], lane & 4 != 0, 4)
        value = value + shfl_xor(value, 2)
        return value + shfl_xor(value, 1)

    return total


@functools.cache
def shard_sum(n_shards: int) -> Any:
    """Device function (parts, first, lane) -> tree of n_shards lane sums, in every lane.

    `parts[first : first + n_shards]` are one lane's partial sums of the shards, overwritten.
    n_shards is 8, 4, 2 or 1.
    """
    group = group_sum(n_shards)
    n_tree = n_shards.bit_length() - 1

    @device_function
    def combine(parts, first, lane):
        value = group(parts, first, lane)
        if n_tree > 0:
            value = value + shfl_xor(value, 4)
        if n_tree > 1:
            value = value + shfl_xor(value, 8)
        if n_tree > 2:
            value = value + shfl_xor(value, 16)
        return value

    return combine
