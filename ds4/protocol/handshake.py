"""What the leader decides when it compares hellos: pure functions over all that arrived.

Invariant: the verdict does not depend on the order in which ranks connect, and every refusal names
the field, both values, the rank and the flag that sets it. How hellos arrive and how long to wait
for missing ranks is the caller's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ds4.protocol.identity import first_difference
from ds4.protocol.messages import Hello, Refuse, Role

__all__ = ["missing_ranks", "refusal", "refusals"]


def refusal(leader: Hello, worker: Hello) -> Refuse | None:
    """Why these two hellos cannot form a world, or None. Both sides get the same answer.

    Args:
      leader: the hello of the leader.
      worker: the hello of a rank.
    """
    if worker.role != Role.WORKER:
        return Refuse(
            reason="two_leaders",
            rank=worker.rank,
            field="role",
            leader_value="leader",
            peer_value="leader",
            flag="--role",
            text=f"two leaders: the peer {worker.host} is a leader too; set by --role",
        )
    difference = first_difference(leader.geometry, worker.geometry)
    if difference is None:
        return None
    # Digests and names are short; the cut only guards the message's own limit.
    return Refuse(
        reason="geometry",
        rank=worker.rank,
        field=difference.field,
        leader_value=difference.leader_value,
        peer_value=difference.peer_value,
        flag=difference.flag,
        text=difference.text(worker.rank),
    )


def refusals(leader: Hello, workers: Sequence[Hello]) -> list[Refuse | None]:
    """The verdict on each of several workers, in the order given.

    Two workers that claim one rank are both refused: nothing says which one is right.
    """
    claims = Counter(worker.rank for worker in workers if worker.role == Role.WORKER)
    verdicts: list[Refuse | None] = []
    for worker in workers:
        verdict = refusal(leader, worker)
        if verdict is None and claims[worker.rank] > 1:
            hosts = ", ".join(
                sorted(f"{w.host} (pid {w.pid})" for w in workers if w.rank == worker.rank)
            )
            verdict = Refuse(
                reason="rank_taken",
                rank=worker.rank,
                field="rank",
                leader_value=str(worker.rank),
                peer_value=str(worker.rank),
                flag="--tensor-parallel-rank",
                text=f"rank {worker.rank} is claimed by {hosts}"[:1000]
                + "; set by --tensor-parallel-rank",
            )
        verdicts.append(verdict)
    return verdicts


def missing_ranks(leader: Hello, workers: Sequence[Hello]) -> list[int]:
    """Ranks of the world that have not said hello, ascending."""
    here = {worker.rank for worker in workers}
    return [rank for rank in range(leader.geometry.world) if rank not in here]
