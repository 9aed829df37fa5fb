"""Sampling parameters and the reference sampler.

The random number for a token depends on (seed, position) alone, never on what else was in the
batch or on how many tokens were drawn before: a counter-based generator (Philox 4x64-10) is keyed
with the seed and its counter set to the position. So a token is reproducible on any rank, in any
batch, after any rewind.

Definition. Tokens are ranked by logit, highest first, ties to the lower id. A token's weight is
`exp((logit - best) / temperature)` in float64. Top-k, top-p and min-p each keep a prefix of the
ranking, so together they keep the shortest. The draw takes the first token at which the running sum
of the ranked weights exceeds `u` times the weight of all kept tokens. How much of the ranking is
really sorted is a matter of speed and changes nothing.

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

__all__ = ["GREEDY", "SamplingParams", "filtered_distribution", "log_softmax", "sample", "uniform"]


def _to_float(value: object) -> float:
    """Numbers become floats; anything else goes on to the validator, which knows the field."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return value  # type: ignore[return-value]  # refused by `_check_finite_range`
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_finite_range(
    instance: object, attribute: attrs.Attribute[float], value: float, low: float, high: float
) -> None:
    # Neither a bool nor text gets here as a float, see `_to_float`.
    if not (isinstance(value, float) and math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{attribute.name} must be from {low:g} to {high:g}, got {value!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the next token is chosen.

    Attributes:
      temperature: 0 means argmax (ties to the lower id) and draws no random number.
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens whose probability reaches this, measured
        among those that top_k keeps; 1 keeps all.
      min_p: drop tokens below this fraction of the likeliest one's probability; 0 keeps all.
      seed: key of the generator, 0 <= seed < 2**64.

    Raises:
      ConfigError: a value of the wrong type or out of range; names the field and the value.
    """

    temperature: float = attrs.field(default=1.0, converter=_to_float)
    top_k: int = attrs.field(default=0)
    top_p: float = attrs.field(default=1.0, converter=_to_float)
    min_p: float = attrs.field(default=0.0, converter=_to_float)
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
        if not (_is_integer(value) and 0 <= value < 2**31):
            raise ConfigError(f"top_k must be a whole number from 0 to 2**31 - 1, got {value!r}")

    @seed.validator
    def _check_seed(self, attribute: attrs.Attribute[int], value: int) -> None:
        if not (_is_integer(value) and 0 <= value < 2**64):
            raise ConfigError(f"seed must be a whole number from 0 to 2**64 - 1, got {value!r}")


GREEDY = SamplingParams(temperature=0.0)
"""Argmax, ties to the lower id."""


def uniform(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) that belongs to (seed, position), a multiple of 2**-53.

    Args:
      seed: 0 <= seed < 2**64.
      position: 0 <= position < 2**64.
    """
    # Arrays, because a list of large integers would pass through float64 and lose low bits. Raw
    # output, because NumPy promises a stable stream for bit generators, not for `Generator.random`.
    key = np.array([seed, 0], np.uint64)
    counter = np.array([position, 0, 0, 0], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw()
    return (int(raw) >> 11) * 2.0**-53


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of f32[V] logits, in float64.

    Raises:
      FloatingPointError: the logits hold a NaN or +inf, or no finite value.
    """
    shifted = logits.astype(np.float64)
    shifted -= _best(logits)
    shifted -= math.log(float(np.exp(shifted).sum()))
    return shifted


def filtered_distribution(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that `params` keeps, and how likely each is to be drawn.

    Args:
      logits: f32[V].
      params: with temperature > 0.

    Returns:
      ids i64[n] in descending order of probability (ties: lower id first), and their probabilities
      f64[n], summing to 1. n >= 1.

    Raises:
      FloatingPointError: the logits hold a NaN or +inf, or no finite value.
      ConfigError: temperature 0, which has no distribution.
    """
    if params.temperature == 0.0:
        raise ConfigError("temperature must be above 0 for a distribution, got 0")
    ids, weights = _kept(logits, params, _best(logits))
    if ids is None:
        ids = _first_ranked(logits, logits.size)
    return ids, weights[ids] / _sum_by_id(weights, ids)


def sample(logits: NDArray[np.float32], params: SamplingParams, position: Position | int) -> Token:
    """Choose the token that comes to stand at `position`.

    Args:
      logits: f32[V] of the row before it.
      params: how to choose.
      position: absolute position of the token being chosen; with the seed it keys the draw.

    Returns:
      The token id. With temperature 0 the argmax, ties to the lower id.

    Raises:
      FloatingPointError: the logits hold a NaN or +inf, or no finite value.

    Numerics: measured for 129,280 logits on one x86 core: 0.02 ms at temperature 0, 0.1-0.3 ms with
      min_p 0.05, 2 ms with top_k 40, 4 ms unfiltered (more where the distribution is flat).
    """
    try:
        best = _best(logits)
    except FloatingPointError as error:
        raise FloatingPointError(f"{error} at position {position}") from None
    if params.temperature == 0.0:
        return Token(int(np.argmax(logits)))
    ids, weights = _kept(logits, params, best)
    u = uniform(params.seed, int(position))
    if ids is None:
        goal = u * float(weights.sum())
        ids = _ranked_until(logits, weights, goal)
    else:
        goal = u * _sum_by_id(weights, ids)
    index = int(np.searchsorted(np.cumsum(weights[ids]), goal, side="right"))
    # Rounding may leave the running sum of all kept tokens at or below the goal.
    return Token(int(ids[min(index, ids.size - 1)]))


def _best(logits: NDArray[np.float32]) -> float:
    best = float(logits.max())  # NaN if there is one
    if not math.isfinite(best):
        raise FloatingPointError(f"logits are not finite (maximum {best})")
    return best


def _sum_by_id(weights: NDArray[np.float64], ids: NDArray[np.int64]) -> float:
    # One order of summation whatever the ranking: ascending id.
    return float(weights[np.sort(ids)].sum())


def _first_ranked(logits: NDArray[np.float32], n: int) -> NDArray[np.int64]:
    """The ids that a full stable sort would put first, without sorting the rest."""
    if n >= logits.size:
        candidates = np.arange(logits.size)
    else:
        bound = np.partition(logits, logits.size - n)[logits.size - n]
        above = np.flatnonzero(logits > bound)
        ties = np.flatnonzero(logits == bound)[: n - above.size]
        candidates = np.sort(np.concatenate([above, ties]))
    return _rank(logits, candidates)


def _rank(logits: NDArray[np.float32], ascending_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return ascending_ids[np.argsort(-logits[ascending_ids], kind="stable")]


def _ranked_until(
    logits: NDArray[np.float32], weights: NDArray[np.float64], goal: float
) -> NDArray[np.int64]:
    """A prefix of the ranking whose weight exceeds `goal`, or all of it."""
    # Most of the weight is in few tokens; the sizes are arbitrary.
    for n in (256, 4096, 32768):
        if n < logits.size:
            ids = _first_ranked(logits, n)
            if float(np.cumsum(weights[ids])[-1]) > goal:
                return ids
    return _first_ranked(logits, logits.size)


def _kept(
    logits: NDArray[np.float32], params: SamplingParams, best: float
) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
    """Ranked ids of the kept tokens (None: all), and weights f64[V] by id.

    Weights are zero where neither a filter nor the draw looks at them.
    """
    weights = np.zeros(logits.size)

    def weigh(ids: NDArray[np.int64] | slice) -> None:
        # A tiny temperature overflows to -inf, which is weight 0: right.
        with np.errstate(over="ignore", under="ignore"):
            weights[ids] = np.exp((logits[ids].astype(np.float64) - best) / params.temperature)

    ids: NDArray[np.int64] | None = None
    total = 0.0  # weight of what top_k leaves; only top_p asks for it
    if 0 < params.top_k < logits.size:
        ids = _first_ranked(logits, params.top_k)
        weigh(ids)
        total = _sum_by_id(weights, ids)
    elif params.min_p == 0.0 or params.top_p < 1.0:
        weigh(slice(None))
        total = float(weights.sum())
    # Both filters keep a prefix, so the order does not matter; min_p first leaves less to rank.
    if params.min_p > 0.0:
        if ids is None:
            # A superset by a margin for rounding; the exact test on weights follows.
            low = best + params.temperature * math.log(params.min_p)
            low -= 1e-5 * (1.0 + abs(best) + abs(low))
            ids = _rank(logits, np.flatnonzero(logits >= np.float64(low)))
            weigh(ids)
        ids = ids[: int(np.count_nonzero(weights[ids] >= params.min_p))]
    if params.top_p < 1.0:
        goal = params.top_p * total
        if ids is None:
            ids = _ranked_until(logits, weights, goal)
        # The first token at which the running sum reaches the goal still belongs to the set.
        ids = ids[: int(np.searchsorted(np.cumsum(weights[ids]), goal)) + 1]
    return ids, weights
