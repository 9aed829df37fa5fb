"""The memory guard: does a rank's plan fit, with the arithmetic as text.

Computed from header and options alone, before any weight byte is read, because a host that runs out
of unified memory hangs instead of failing. All sizes are bytes. Sums saturate at 2**64 - 1 and a
saturated plan is refused, whatever the budget says.
"""

from __future__ import annotations

from enum import Enum

import attrs

from ds4.errors import ConfigError
from ds4.model.deepseek4.shape import DeepSeek4Shape

__all__ = [
    "GIB",
    "MemoryBudget",
    "MemoryKind",
    "MemoryPlan",
    "MemoryVerdict",
    "admit",
    "model_span",
    "partial_state_bytes",
    "session_rows_bytes",
]

GIB = 1 << 30
_LIMIT = (1 << 64) - 1
_UNIFIED_RESERVE_BYTES = 32 * GIB  # the operating system and its page cache share the pool
_DISCRETE_RESERVE_BYTES = 2 * GIB
_DISCRETE_RESERVE_PERCENT = 3


class MemoryKind(Enum):
    """Whether the device shares its memory with the host."""

    UNIFIED = "unified"
    DISCRETE = "discrete"


def _size(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{attribute.name} must be a whole number of bytes >= 0, got {value!r}")


def _optional_size(
    instance: object, attribute: attrs.Attribute[int | None], value: int | None
) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(f"{attribute.name} must be a whole number of bytes >= 0, got {value!r}")


@attrs.frozen(kw_only=True)
class MemoryBudget:
    """What a device offers.

    Attributes:
      kind: unified or discrete.
      physical_bytes: memory of the device.
      free_bytes: of that, free now.
      reserve_bytes: kept out of the plan; None means 32 GiB on unified memory, and the larger of
        2 GiB and 3 % of the physical memory on a discrete device.
    """

    kind: MemoryKind
    physical_bytes: int = attrs.field(validator=_size)
    free_bytes: int = attrs.field(validator=_size)
    reserve_bytes: int | None = attrs.field(default=None, validator=_optional_size)

    @property
    def working_set_bytes(self) -> int:
        """The smaller of physical and free memory."""
        return min(self.physical_bytes, self.free_bytes)

    @property
    def reserve(self) -> int:
        """Bytes kept out of the plan."""
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        if self.kind is MemoryKind.UNIFIED:
            return _UNIFIED_RESERVE_BYTES
        # Rounded up, so that the reserve is never less than it says.
        part = -(-self.physical_bytes * _DISCRETE_RESERVE_PERCENT // 100)
        return max(_DISCRETE_RESERVE_BYTES, part)

    @property
    def budget_bytes(self) -> int:
        """Working set minus reserve, never below 0."""
        return max(0, self.working_set_bytes - self.reserve)


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """What a rank needs.

    Attributes:
      model_bytes: weights the rank keeps.
      artifact_bytes: repacked or expanded copies that are always built.
      workspace_bytes: activations and scratch shared by all sessions.
      ordered_reduce_bytes: buffers of the ordered join; 0 when not used.
      fast_artifact_bytes: optional second representation of the experts; 0 when not asked for.
      sessions: resident sessions.
      session_bytes: state of one session.
      load_bytes: staging that exists only while loading, when there is no session yet.
    """

    model_bytes: int = attrs.field(validator=_size)
    artifact_bytes: int = attrs.field(default=0, validator=_size)
    workspace_bytes: int = attrs.field(default=0, validator=_size)
    ordered_reduce_bytes: int = attrs.field(default=0, validator=_size)
    fast_artifact_bytes: int = attrs.field(default=0, validator=_size)
    sessions: int = attrs.field(validator=_size)
    session_bytes: int = attrs.field(default=0, validator=_size)
    load_bytes: int = attrs.field(default=0, validator=_size)

    def terms(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of every term of the steady state."""
        return (
            ("model", self.model_bytes),
            ("artifacts", self.artifact_bytes),
            ("workspace", self.workspace_bytes),
            ("ordered reduce", self.ordered_reduce_bytes),
            ("fast artifacts", self.fast_artifact_bytes),
            (
                f"{self.sessions} session{'' if self.sessions == 1 else 's'}",
                _saturate(self.sessions * self.session_bytes),
            ),
        )

    @property
    def steady_bytes(self) -> int:
        """Bytes while serving; saturates at 2**64 - 1."""
        return _saturate(sum(n for _, n in self.terms()))

    @property
    def peak_load_bytes(self) -> int:
        """Bytes at the worst moment of loading; saturates at 2**64 - 1."""
        return _saturate(
            self.model_bytes + self.artifact_bytes + self.fast_artifact_bytes + self.load_bytes
        )

    @property
    def required_bytes(self) -> int:
        """The larger of serving and loading."""
        return max(self.steady_bytes, self.peak_load_bytes)


@attrs.frozen(kw_only=True)
class MemoryVerdict:
    """Outcome of the guard.

    Attributes:
      admitted: whether the plan fits.
      reason: stable code: `fits`, `over_budget`, `overflow` or `no_sessions`.
      required_bytes: what the plan needs.
      budget_bytes: what the device offers.
      text: the arithmetic, one line per sum.
    """

    admitted: bool
    reason: str
    required_bytes: int
    budget_bytes: int
    text: str


def _saturate(n: int) -> int:
    return min(n, _LIMIT)


def _gib(n: int) -> str:
    return "over 2^64 bytes" if n >= _LIMIT else f"{n / GIB:.2f} GiB"


def admit(plan: MemoryPlan, budget: MemoryBudget, *, who: str = "this rank") -> MemoryVerdict:
    """Decide whether a plan fits a device.

    Args:
      plan: what is needed.
      budget: what there is.
      who: named at the start of the text, for example `rank 1 on host b`.
    """
    required = plan.required_bytes
    allowed = budget.budget_bytes
    if plan.sessions == 0:
        reason = "no_sessions"
    elif required >= _LIMIT:
        reason = "overflow"
    elif required > allowed:
        reason = "over_budget"
    else:
        reason = "fits"
    sums = " + ".join(f"{name} {_gib(n)}" for name, n in plan.terms() if n) or "nothing"
    conclusion = {
        "fits": f"fits, {_gib(max(0, allowed - required))} left",
        "over_budget": f"refused: {_gib(required)} is over the budget of {_gib(allowed)} by"
        f" {_gib(max(0, required - allowed))}",
        "overflow": "refused: the plan does not fit a 64-bit size",
        "no_sessions": "refused: a plan without sessions cannot serve anything",
    }[reason]
    text = "\n".join(
        (
            f"{who}: budget {_gib(allowed)} = working set {_gib(budget.working_set_bytes)}"
            f" (the smaller of {_gib(budget.physical_bytes)} physical and"
            f" {_gib(budget.free_bytes)} free) - reserve {_gib(budget.reserve)}"
            f" ({budget.kind.value} memory)"
            + (", taken as 0" if budget.working_set_bytes < budget.reserve else ""),
            f"{who}: serving {_gib(plan.steady_bytes)} = {sums}",
            f"{who}: loading at most {_gib(plan.peak_load_bytes)}, staging"
            f" {_gib(plan.load_bytes)} included",
            f"{who}: {conclusion}",
        )
    )
    return MemoryVerdict(
        admitted=reason == "fits",
        reason=reason,
        required_bytes=required,
        budget_bytes=allowed,
        text=text,
    )


def model_span(routed_bytes: int, replicated_bytes: int, world: int) -> int:
    """Bytes per rank when only routed experts are divided: `replicated + routed / N`, rounded up.

    For a model whose tensor table is known, `tensor_parallel.plan_rank` gives the exact bytes.
    """
    if world < 1:
        raise ConfigError(f"world must be >= 1, got {world}")
    return _saturate(replicated_bytes + -(-routed_bytes // world))


def session_rows_bytes(shape: DeepSeek4Shape, n_ctx: int, element_bytes: int) -> int:
    """Bytes of one session's KV rows for `n_ctx` tokens: raw window, compressed and indexer rows.

    Args:
      shape: of the model.
      n_ctx: context capacity in tokens, >= 1.
      element_bytes: bytes of one stored number: 2 or 4.

    Every rank holds all of it: the KV is one shared head, which no mode divides.
    """
    if n_ctx < 1:
        raise ConfigError(f"n_ctx must be >= 1, got {n_ctx}")
    if element_bytes not in (2, 4):
        raise ConfigError(f"element_bytes must be 2 or 4, got {element_bytes}")
    elements = 0
    for ratio in shape.ratios:
        elements += min(shape.window, n_ctx) * shape.head_dim
        if ratio:
            width = shape.head_dim + (shape.index_dim if ratio == 4 else 0)
            elements += n_ctx // ratio * width
    return elements * element_bytes


def partial_state_bytes(shape: DeepSeek4Shape) -> int:
    """Bytes of one session's unfinished compressor windows, always float32.

    A ratio-4 layer carries keys and scores of two windows (8 tokens, both halves) for attention and
    indexer; a ratio-128 layer those of one window of 128 tokens.
    """
    total = 0
    for ratio in shape.ratios:
        if ratio == 4:
            total += 2 * 8 * 2 * (shape.head_dim + shape.index_dim)
        elif ratio:
            total += 2 * ratio * shape.head_dim
    return total * 4
