"""Sampling parameters and the reference sampler.

The random number for a token depends on (seed, position) alone, never on what else was in the
batch or on how many tokens were drawn before: a counter-based generator (Philox 4x64-10) is keyed
with the seed and its counter set to the position. So a token is reproducible on any rank, in any
batch, after any rewind.

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, as
implemented by `numpy.random.Philox`.
"""

from __future__ import annotations

import math

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError
from ds4.ids import Position, Token

__all__ = ["SamplingParams", "filtered_distribution", "log_softmax", "sample", "uniform"]


def _check_finite_range(
    instance: object, attribute: attrs.Attribute[float], value: float, low: float, high: float
) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{attribute.name} must be from {low:g} to {high:g}, got {value!r}")


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the next token is chosen.

    Attributes:
      temperature: 0 means argmax (ties to the lower id) and draws no random number.
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens whose probability reaches this; 1 keeps all.
      min_p: drop tokens below this fraction of the likeliest one's probability; 0 keeps all.
      seed: key of the generator, 0 <= seed < 2**64.

    Raises:
      ConfigError: a value out of range; names the field and the value.
    """

    temperature: float = attrs.field(default=1.0, converter=float)
    top_k: int = attrs.field(default=0)
    top_p: float = attrs.field(default=1.0, converter=float)
    min_p: float = attrs.field(default=0.0, converter=float)
    seed: int = attrs.field(default=0)

    @temperature.validator
    def _check_temperature(self, attribute: attrs.Attribute[float], value: float) -> None:
        _check_finite_range(self, attribute, value, 0.0, 100.0)

    @top_p.validator
    def _check_top_p(self, attribute: attrs.Attribute[float], value: float) -> None:
        _check_finite_range(self, attribute, value, 0.0, 1.0)

    @min_p.validator
    def _check_min_p(self, attribute: attrs.Attribute[float], value: float) -> None:
        _check_finite_range(self, attribute, value, 0.0, 1.0)

    @top_k.validator
    def _check_top_k(self, attribute: attrs.Attribute[int], value: int) -> None:
        if not (isinstance(value, int) and 0 <= value < 2**31):
            raise ConfigError(f"top_k must be a whole number >= 0, got {value!r}")

    @seed.validator
    def _check_seed(self, attribute: attrs.Attribute[int], value: int) -> None:
        if not (isinstance(value, int) and 0 <= value < 2**64):
            raise ConfigError(f"seed must be from 0 to 2**64 - 1, got {value!r}")


def uniform(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) that belongs to (seed, position)."""
    generator = np.random.Philox(key=[seed, 0], counter=[position, 0, 0, 0])
    return float(np.random.Generator(generator).random())


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of f32[V] logits, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= math.log(float(np.exp(shifted).sum()))
    return shifted


def filtered_distribution(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Apply temperature, then top-k, top-p and min-p.

    Args:
      logits: f32[V].
      params: with temperature > 0.

    Returns:
      ids i64[n] in descending order of probability (ties: lower id first), and their probabilities
      f64[n], summing to 1. n >= 1.
    """
    scaled = logits.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    if 0 < params.top_k < order.size:
        order = order[: params.top_k]
    values = scaled[order]
    p = np.exp(values - values[0])
    p /= p.sum()
    if params.top_p < 1.0:
        # The first index at which the sum reaches top_p still belongs to the set.
        keep = int(np.searchsorted(np.cumsum(p), params.top_p)) + 1
        order, p = order[:keep], p[:keep]
    if params.min_p > 0.0:
        keep = int(np.count_nonzero(p >= params.min_p * p[0]))
        order, p = order[:keep], p[:keep]
    return order, p / p.sum()


def sample(logits: NDArray[np.float32], params: SamplingParams, position: Position | int) -> Token:
    """Choose the token that comes to stand at `position`.

    Args:
      logits: f32[V] of the row before it.
      params: how to choose.
      position: absolute position of the token being chosen; with the seed it keys the draw.

    Returns:
      The token id. With temperature 0 the argmax, ties to the lower id.

    Raises:
      FloatingPointError: the logits hold a NaN, or no finite value.
    """
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        raise FloatingPointError(f"logits at position {position} are not finite")
    if params.temperature == 0.0:
        return Token(int(np.argmax(logits)))
    ids, p = filtered_distribution(logits, params)
    index = int(np.searchsorted(np.cumsum(p), uniform(params.seed, int(position)), side="right"))
    return Token(int(ids[min(index, ids.size - 1)]))
