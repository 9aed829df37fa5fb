"""Whether all ranks answered one step or operation alike.

Invariant: what is returned is what every rank said. Anything else is a desynchronisation that names
the odd rank, and the world must end: its ranks no longer hold the same state.
"""

from __future__ import annotations

import attrs

from ds4.errors import Desync
from ds4.protocol.messages import Ack, Fail, Message

__all__ = ["Verdict", "verdict"]


@attrs.frozen
class Verdict:
    """What all ranks answered to one step or operation.

    Attributes:
      acks: by rank, when all agreed to do it.
      refusal: when all agreed to refuse it.
    """

    acks: dict[int, Ack]
    refusal: Fail | None


def verdict(answers: dict[int, Message], what: str) -> Verdict:
    """Compare answers. A rank that does otherwise than the rest is a desynchronisation.

    Raises:
      Desync: the ranks disagree.
    """
    acks = {r: a for r, a in answers.items() if isinstance(a, Ack)}
    fails = {r: a for r, a in answers.items() if isinstance(a, Fail)}
    if acks and fails:
        rank = min(fails)
        raise Desync(rank, f"refused {what} that rank {min(acks)} did: {fails[rank].text}")
    if fails:
        return Verdict({}, fails[min(fails)])
    for field in ("digest", "length"):
        values = {rank: getattr(ack, field) for rank, ack in acks.items()}
        odd = [rank for rank in values if values[rank] != values[min(values)]]
        if odd:
            ours, theirs = values[min(values)], values[odd[0]]
            raise Desync(
                odd[0],
                f"{field} after {what} differs: rank {min(values)} has {_shown(ours)}, "
                f"rank {odd} has {_shown(theirs)}",
            )
    return Verdict(acks, None)


def _shown(value: object) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)
