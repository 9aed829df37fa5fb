"""Pure models of the collectives, and the schedule of a step in each world.

The models answer what a collective computes, in how many exchanges, and how many bytes each rank
sends. The schedule says which collectives a step runs: it depends on the plan and the world only,
so every rank derives the same list, and a transport's counters can be checked against
`bytes_sent`. Exchanges are rounds in which every rank may send and receive at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.partition.rules import Mode
from ds4.partition.shards import check_rank, owned_blocks, tree_sum
from ds4.steps import StepPlan, Want

__all__ = [
    "Collective",
    "Kind",
    "Outcome",
    "bytes_sent",
    "canonical_join",
    "logit_rows",
    "neighbour_gather",
    "one_shot_gather",
    "ring_all_reduce",
    "step_schedule",
    "tree_all_reduce",
]

Array = NDArray[Any]
_F32_BYTES = 4


@attrs.frozen(kw_only=True, eq=False)
class Outcome:
    """What a modelled collective leaves behind.

    Attributes:
      results: one array per rank; None for a rank that did not get everything.
      exchanges: rounds run.
      sent_bytes: bytes each rank sent.
    """

    results: tuple[Array | None, ...]
    exchanges: int
    sent_bytes: tuple[int, ...]


def _check_inputs(inputs: Sequence[Array]) -> int:
    if not inputs:
        raise ConfigError("a collective needs at least one rank")
    first = inputs[0]
    for rank, array in enumerate(inputs):
        if array.shape != first.shape or array.dtype != first.dtype:
            raise ConfigError(
                f"rank {rank} contributes {array.dtype} {array.shape}, rank 0 {first.dtype}"
                f" {first.shape}"
            )
    return len(inputs)


def ring_all_reduce(inputs: Sequence[Array], exchanges: int | None = None) -> Outcome:
    """Reduce-scatter, then all-gather, around a ring; each rank sends one of N chunks per exchange.

    Args:
      inputs: one array per rank, 1-D, all alike. Chunk c holds elements `[c*n//N, (c+1)*n//N)`.
      exchanges: stop after so many; by default after the N-1 + N-1 that complete it.

    Numerics: each chunk is added up once, along the ring, and the sum is then passed on; so all
      ranks get the same bits, but not those of the canonical tree.
    """
    world = _check_inputs(inputs)
    n = inputs[0].size
    full = 2 * (world - 1)
    rounds = full if exchanges is None else exchanges
    cut = [slice(c * n // world, (c + 1) * n // world) for c in range(world)]
    data = [np.array(a) for a in inputs]
    # Which ranks' terms are inside each chunk on each rank: completeness is proven, not assumed.
    holds = [[{rank} for _ in range(world)] for rank in range(world)]
    sent = [0] * world
    for step in range(rounds):
        reducing = step < world - 1
        offset = step if reducing else step - (world - 1) - 1
        moves = [(rank, (rank + 1) % world, (rank - offset) % world) for rank in range(world)]
        # All ranks send at once: read everything before writing anything.
        payloads = [(data[src][cut[c]].copy(), set(holds[src][c])) for src, _, c in moves]
        for (src, dst, c), (values, terms) in zip(moves, payloads, strict=True):
            sent[src] += values.nbytes
            if reducing:
                data[dst][cut[c]] = values + data[dst][cut[c]]
                holds[dst][c] |= terms
            else:
                data[dst][cut[c]] = values
                holds[dst][c] = terms
    return _outcome(data, holds, world, rounds, sent)


def _outcome(
    data: list[Array], holds: list[list[set[int]]], world: int, rounds: int, sent: list[int]
) -> Outcome:
    everyone = set(range(world))
    return Outcome(
        results=tuple(
            data[rank] if all(terms == everyone for terms in holds[rank]) else None
            for rank in range(world)
        ),
        exchanges=rounds,
        sent_bytes=tuple(sent),
    )


def tree_all_reduce(inputs: Sequence[Array], exchanges: int | None = None) -> Outcome:
    """Binomial reduction to rank 0, then broadcast back: `2 * ceil(log2 N)` exchanges.

    Numerics: for N = 1, 2, 4 and 8 the additions are exactly those of the canonical tree.
    """
    world = _check_inputs(inputs)
    levels = (world - 1).bit_length()
    rounds = 2 * levels if exchanges is None else exchanges
    data = [np.array(a) for a in inputs]
    holds = [[{rank}] for rank in range(world)]
    sent = [0] * world
    for step in range(rounds):
        if step < levels:
            gap = 1 << step
            for dst in range(0, world - gap, 2 * gap):
                src = dst + gap
                sent[src] += data[src].nbytes
                data[dst] = data[dst] + data[src]
                holds[dst][0] |= holds[src][0]
        else:
            gap = 1 << (2 * levels - 1 - step)
            for src in range(0, world - gap, 2 * gap):
                dst = src + gap
                sent[src] += data[src].nbytes
                data[dst] = data[src].copy()
                holds[dst][0] = set(holds[src][0])
    return _outcome(data, holds, world, rounds, sent)


def one_shot_gather(inputs: Sequence[Array]) -> Outcome:
    """Every rank sends its array to all others at once: one exchange, N-1 arrays sent by each.

    Returns:
      Results [N, ...] in rank order, so that each rank can add in an order of its own choosing.
    """
    world = _check_inputs(inputs)
    gathered = np.stack(list(inputs))
    return Outcome(
        results=tuple(gathered.copy() for _ in range(world)),
        exchanges=1 if world > 1 else 0,
        sent_bytes=tuple((world - 1) * a.nbytes for a in inputs),
    )


def neighbour_gather(inputs: Sequence[Array], exchanges: int | None = None) -> Outcome:
    """Pass arrays around a ring, one neighbour at a time: N-1 exchanges gather all.

    A single exchange is complete only in worlds of one and two; an engine that stops after one
    silently drops ranks from three on.
    """
    world = _check_inputs(inputs)
    rounds = world - 1 if exchanges is None else exchanges
    have: list[dict[int, Array]] = [{rank: inputs[rank]} for rank in range(world)]
    sent = [0] * world
    for step in range(rounds):
        for src in range(world):
            origin = (src - step) % world
            sent[src] += inputs[origin].nbytes
        for src in range(world):
            origin = (src - step) % world
            have[(src + 1) % world][origin] = inputs[origin]
    return Outcome(
        results=tuple(
            np.stack([got[r] for r in range(world)]) if len(got) == world else None for got in have
        ),
        exchanges=rounds,
        sent_bytes=tuple(sent),
    )


def canonical_join(subtree_sums: Sequence[NDArray[np.float32]]) -> Outcome:
    """The join that ds4 runs: exchange and add for two ranks, gather and add as a tree for more.

    Args:
      subtree_sums: f32 arrays of ranks 0..N-1, N in 1, 2, 4, 8.

    Raises:
      ConfigError: a world that does not own whole subtrees.
    """
    check_rank(len(subtree_sums), 0)
    gathered = one_shot_gather(subtree_sums)
    return Outcome(
        results=tuple(tree_sum(r) for r in gathered.results if r is not None),
        exchanges=gathered.exchanges,
        sent_bytes=gathered.sent_bytes,
    )


class Kind(Enum):
    """Collectives that a step uses."""

    ALL_REDUCE = "all_reduce"
    """Two ranks exchange their subtree sums and add them."""
    ALL_GATHER = "all_gather"
    """Every rank gets every rank's contribution, in rank order."""


@attrs.frozen(kw_only=True)
class Collective:
    """One collective of a step, the same on all ranks.

    Attributes:
      kind: which operation.
      what: `attention`, `moe` or `logits`.
      layer: layer number; None for the logits.
      counts: float32 elements that rank r contributes.
    """

    kind: Kind
    what: str
    layer: int | None
    counts: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Type on the wire: always float32."""
        return "float32"


def logit_rows(plan: StepPlan) -> int:
    """Rows of a step whose logits are computed: the last of an entry, or all, as `want` says."""
    rows = 0
    for entry in plan.entries():
        if entry.want == Want.ALL_LOGITS:
            rows += entry.n_rows
        elif entry.want != Want.NOTHING:
            rows += 1
    return rows


def step_schedule(
    shape: DeepSeek4Shape, mode: Mode, world: int, *, n_rows: int, n_logit_rows: int
) -> tuple[Collective, ...]:
    """Collectives of one step, in order.

    Expert parallel joins the feed-forward sum of each layer; tensor parallel joins the attention
    output as well and gathers vocabulary slices of the wanted logits. A world of one runs none, and
    neither does a step without rows.

    Args:
      shape: of the model.
      mode: expert or tensor parallel.
      world: 1, 2, 4 or 8.
      n_rows: rows of the batch (of the graph bucket, if padded).
      n_logit_rows: see `logit_rows`; at most `n_rows`.
    """
    check_rank(world, 0)
    if not 0 <= n_logit_rows <= n_rows:
        raise ConfigError(f"logit rows must be from 0 to {n_rows}, got {n_logit_rows}")
    if world == 1 or n_rows == 0:
        return ()
    kind = Kind.ALL_REDUCE if world == 2 else Kind.ALL_GATHER
    parts = ("attention", "moe") if mode is Mode.TENSOR_PARALLEL else ("moe",)
    counts = (n_rows * shape.d_model,) * world
    out = [
        Collective(kind=kind, what=what, layer=layer, counts=counts)
        for layer in range(shape.n_layers)
        for what in parts
    ]
    if mode is Mode.TENSOR_PARALLEL and n_logit_rows:
        slices = (len(owned_blocks(shape.n_vocab, world, rank)) for rank in range(world))
        out.append(
            Collective(
                kind=Kind.ALL_GATHER,
                what="logits",
                layer=None,
                counts=tuple(n_logit_rows * n for n in slices),
            )
        )
    return tuple(out)


def bytes_sent(collectives: Sequence[Collective], world: int, rank: int) -> int:
    """Payload bytes one rank sends directly to its peers: its contribution, N-1 times.

    Two ranks that exchange subtree sums send one contribution each, which is the same formula.
    """
    check_rank(world, rank)
    return sum((world - 1) * c.counts[rank] * _F32_BYTES for c in collectives)
