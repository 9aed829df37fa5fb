"""How evenly routed work falls on the ranks: closed forms, bounds, and counters that measure it.

Two questions need two counters. *Tokens* per rank bound the compute; *distinct* (step, layer,
expert) triples per rank bound the weight bytes read, because an expert's weights are read once per
step however many tokens chose it.

The closed forms assume uniform routing. Real routing is concentrated, so fewer experts are distinct
than `expected_distinct` says, and `read_bound` should be given the measured number.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError
from ds4.partition.placement import Placement
from ds4.partition.shards import check_rank

__all__ = [
    "BalanceCounters",
    "BalanceReport",
    "coverage",
    "expected_distinct",
    "expected_hottest",
    "read_bound",
]


def _check_routing(n_experts: int, n_used: int) -> None:
    if not 1 <= n_used <= n_experts:
        raise ConfigError(f"experts per token must be from 1 to {n_experts}, got {n_used}")


def coverage(n_experts: int, n_used: int, n_tokens: int) -> float:
    """Expected fraction of a layer's experts that `n_tokens` tokens touch: `1 - (1 - k/E)^B`."""
    _check_routing(n_experts, n_used)
    if n_tokens < 0:
        raise ConfigError(f"n_tokens must be >= 0, got {n_tokens}")
    return float(1.0 - (1.0 - n_used / n_experts) ** n_tokens)


def expected_distinct(n_experts: int, n_used: int, n_tokens: int) -> float:
    """Expected number of distinct experts, `E * coverage`."""
    return n_experts * coverage(n_experts, n_used, n_tokens)


def read_bound(n_experts: int, distinct: float, world: int) -> float:
    """Worst ratio of one rank's expert reads to the mean, given `distinct` experts in the step.

    At worst one rank owns as many of them as it can: `min(E/N, D) / (D/N)`. From D >= E/N on that
    is E/D, whatever N is; below it is N.

    Raises:
      ConfigError: no or too many distinct experts, or a world below 1.
    """
    if not 0 < distinct <= n_experts:
        raise ConfigError(f"distinct experts must be above 0 and up to {n_experts}, got {distinct}")
    if world < 1:
        raise ConfigError(f"world must be >= 1, got {world}")
    return min(n_experts / world, distinct) / (distinct / world)


def expected_hottest(n_experts: int, n_used: int, world: int) -> float:
    """Expected number of one token's experts on the rank that has most of them.

    One token draws `n_used` distinct experts uniformly; every rank owns `n_experts / world`. Exact:
    `P(max <= m)` is the coefficient of x^k in `(sum_{i<=m} C(E/N, i) x^i)^N`, over `C(E, k)`.

    Raises:
      ConfigError: `world` does not divide `n_experts`.
    """
    _check_routing(n_experts, n_used)
    if world < 1 or n_experts % world:
        raise ConfigError(f"world must divide {n_experts} experts, got {world}")
    per_rank = n_experts // world

    def ways_with_max(most: int) -> int:
        poly = [1] + [0] * n_used
        for _ in range(world):
            poly = [
                sum(comb(per_rank, i) * poly[total - i] for i in range(min(most, total) + 1))
                for total in range(n_used + 1)
            ]
        return poly[n_used]

    total = comb(n_experts, n_used)
    # E[max] = sum over m of P(max > m).
    return float(sum(Fraction(total - ways_with_max(m), total) for m in range(n_used)))


@attrs.frozen(kw_only=True)
class BalanceReport:
    """Measured balance of one interval.

    Attributes:
      steps: steps counted.
      tokens: routed (token, slot) pairs per rank.
      distinct: (step, layer, expert) triples per rank.
      mean_distinct: distinct experts per step and layer, whole model; feed it to `read_bound`.
    """

    steps: int
    tokens: tuple[int, ...]
    distinct: tuple[int, ...]
    mean_distinct: float

    @staticmethod
    def _ratio(values: tuple[int, ...]) -> float:
        total = sum(values)
        return max(values) * len(values) / total if total else 1.0

    @property
    def token_ratio(self) -> float:
        """Tokens of the busiest rank over the mean."""
        return self._ratio(self.tokens)

    @property
    def distinct_ratio(self) -> float:
        """Expert reads of the busiest rank over the mean."""
        return self._ratio(self.distinct)


class BalanceCounters:
    """Accumulates routing per (layer, expert); a report is computed only when asked for.

    A device executor accumulates the same two arrays on the device and hands them over once per
    interval with `add_interval`, never per step: reading ids back each step would slow the very
    step it measures.

    Args:
      n_layers: L.
      n_experts: E.
    """

    def __init__(self, n_layers: int, n_experts: int) -> None:
        if n_layers < 1 or n_experts < 1:
            raise ConfigError(f"counters need layers and experts, got {n_layers} and {n_experts}")
        self.steps = 0
        self.tokens: NDArray[np.int64] = np.zeros((n_layers, n_experts), np.int64)
        self.active: NDArray[np.int64] = np.zeros((n_layers, n_experts), np.int64)

    def record(self, layer: int, experts: NDArray[np.integer]) -> None:
        """Count one layer of one step. `experts` is int[R, K], the chosen ids of every row."""
        n_layers, n_experts = self.tokens.shape
        if not 0 <= layer < n_layers:
            raise ConfigError(f"layer must be from 0 to {n_layers - 1}, got {layer}")
        ids = np.asarray(experts).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= n_experts):
            raise ConfigError(f"expert ids must be from 0 to {n_experts - 1}")
        counts = np.bincount(ids.astype(np.int64), minlength=n_experts)
        self.tokens[layer] += counts
        self.active[layer] += counts > 0

    def end_step(self) -> None:
        """Count the step whose layers have been recorded."""
        self.steps += 1

    def add_interval(
        self, tokens: NDArray[np.integer], active: NDArray[np.integer], steps: int
    ) -> None:
        """Add counts accumulated elsewhere.

        Args:
          tokens: int[L, E], routed slots.
          active: int[L, E], steps in which the expert was chosen at least once.
          steps: steps of the interval.

        Raises:
          ConfigError: another shape, or counts that contradict each other.
        """
        if tokens.shape != self.tokens.shape or active.shape != self.active.shape:
            raise ConfigError(
                f"counts must be {self.tokens.shape}, got {tokens.shape} and {active.shape}"
            )
        if (active < 0).any() or (active > steps).any() or (active > tokens).any():
            raise ConfigError("an expert is active in at most every step and at most once a token")
        self.tokens += tokens
        self.active += active
        self.steps += steps

    def reset(self) -> None:
        """Start a new interval."""
        self.steps = 0
        self.tokens[:] = 0
        self.active[:] = 0

    def histogram(self, layer: int) -> NDArray[np.float64]:
        """Measured load f64[E] of one layer, for `LayerPlacement.balanced`."""
        return np.asarray(self.tokens[layer], np.float64)

    def report(self, placement: Placement, world: int) -> BalanceReport:
        """Sum the counters by owning rank."""
        check_rank(world, 0)
        n_layers, n_experts = self.tokens.shape
        if (len(placement.layers), placement.n_experts) != (n_layers, n_experts):
            raise ConfigError(
                f"placement is for {len(placement.layers)} layers of {placement.n_experts} experts,"
                f" counters are for {n_layers} of {n_experts}"
            )
        tokens = [0] * world
        distinct = [0] * world
        for i, layer in enumerate(placement.layers):
            for rank in range(world):
                mine = list(layer.experts_of_rank(world, rank))
                tokens[rank] += int(self.tokens[i, mine].sum())
                distinct[rank] += int(self.active[i, mine].sum())
        layer_steps = self.steps * n_layers
        return BalanceReport(
            steps=self.steps,
            tokens=tuple(tokens),
            distinct=tuple(distinct),
            mean_distinct=sum(distinct) / layer_steps if layer_steps else 0.0,
        )
