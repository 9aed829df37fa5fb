"""Every reason not to form a world that can be seen before a weight is read, as pure checks.

Invariant: a refusal names the option, the value and what to do instead, under a reason code that
does not change. What ranks find out by comparing hellos is in `ds4.protocol.handshake`; whether a
model divides is in `ds4.partition.tensor_parallel`; whether it fits is in `ds4.partition.memory`.

Tensor parallel over eight ranks is allowed where the model divides: the arithmetic is the same
fixed tree over eight shards in every world, so eight ranks are no special case here.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ds4.backend import Pairs
from ds4.errors import WorldRefused
from ds4.partition.rules import Mode
from ds4.partition.shards import WORLDS
from ds4.protocol.messages import Refuse
from ds4.world.config import Address

__all__ = ["ROLES", "WorldRequest", "check_request", "device_refusal"]

ROLES = ("none", "coordinator", "worker")


@attrs.frozen(kw_only=True)
class WorldRequest:
    """What a command line asks for, before anything is opened.

    Attributes:
      role: `none`, `coordinator` or `worker`.
      expert_parallel, tensor_parallel: the modes asked for.
      world: ranks asked for; None when not given.
      rank: rank asked for; None when not given.
      listen: where to listen; None when not given.
      coordinator: where to dial; None when not given.
      transport: data plane asked for.
      backend: `auto`, `cpu` or `cuda`.
      foreign: options given that belong to another way of dividing a model, with the reason why
        they do not go with this one.
      has_context: whether the context was given, not derived from the machine.
      needs_context: whether this program derives the context from the machine otherwise.
    """

    role: str = "none"
    expert_parallel: bool = False
    tensor_parallel: bool = False
    world: int | None = None
    rank: int | None = None
    listen: Address | None = None
    coordinator: Address | None = None
    transport: str = "auto"
    backend: str = "auto"
    foreign: tuple[tuple[str, str], ...] = ()
    has_context: bool = True
    needs_context: bool = False

    @property
    def is_networked(self) -> bool:
        """Whether anything about a world of several ranks was asked for."""
        return (
            self.role != "none"
            or self.expert_parallel
            or self.tensor_parallel
            or self.world not in (None, 1)
        )

    @property
    def mode(self) -> Mode:
        """What is divided."""
        return Mode.TENSOR_PARALLEL if self.tensor_parallel else Mode.EXPERT_PARALLEL

    @property
    def n_ranks(self) -> int:
        """Ranks of the world: two, when a mode was asked for without a number."""
        if self.world is not None:
            return self.world
        return 2 if self.expert_parallel or self.tensor_parallel else 1

    @property
    def worker_rank(self) -> int:
        """Rank of a worker: 1 in a world of two, where it is the only one."""
        return 1 if self.rank is None else self.rank


def check_request(request: WorldRequest) -> None:
    """Refuse what cannot become a world.

    Raises:
      WorldRefused: with the first reason found, in the order of the table in the documentation.
    """
    for reason, is_wrong, text in _checks(request):
        if is_wrong:
            raise WorldRefused(reason, text)


def _checks(r: WorldRequest) -> list[tuple[str, bool, str]]:
    has_mode = r.expert_parallel or r.tensor_parallel
    world = r.n_ranks
    is_worker, is_coordinator = r.role == "worker", r.role == "coordinator"
    flag = "--tensor-parallel" if r.tensor_parallel else "--expert-parallel"
    foreign = r.foreign[0] if r.foreign else ("", "")
    return [
        (
            "both_modes",
            r.expert_parallel and r.tensor_parallel,
            "--expert-parallel and --tensor-parallel exclude each other; give one",
        ),
        (
            "role_without_mode",
            r.role != "none" and not has_mode,
            f"--role {r.role} needs --expert-parallel or --tensor-parallel",
        ),
        (
            "world_without_mode",
            r.world not in (None, 1) and not has_mode,
            f"--tensor-parallel-world {r.world} needs --expert-parallel or --tensor-parallel",
        ),
        (
            "addresses",
            r.role == "none" and (r.listen is not None or r.coordinator is not None),
            "--listen and --coordinator need --role coordinator or --role worker; without a role "
            "all ranks are started on this machine",
        ),
        (
            "addresses",
            is_worker and r.coordinator is None,
            "--role worker needs --coordinator HOST PORT, the address its head listens on",
        ),
        (
            "addresses",
            is_worker and r.listen is not None,
            "--listen is for --role coordinator; a worker dials --coordinator HOST PORT",
        ),
        (
            "addresses",
            is_coordinator and r.listen is None,
            "--role coordinator needs --listen HOST PORT, the address its workers dial",
        ),
        (
            "addresses",
            is_coordinator and r.coordinator is not None,
            "--coordinator is for --role worker; a coordinator has --listen HOST PORT",
        ),
        ("foreign_option", has_mode and bool(r.foreign), f"{foreign[0]} with {flag}: {foreign[1]}"),
        (
            "world_size",
            world not in WORLDS or (has_mode and world == 1 and r.role != "none"),
            f"{flag} with --tensor-parallel-world {world}: the world must be one of "
            f"{', '.join(str(w) for w in WORLDS if w > 1)}",
        ),
        (
            "rank",
            r.rank is not None and not is_worker,
            f"--tensor-parallel-rank {r.rank} is for --role worker; the head is rank 0",
        ),
        (
            "rank",
            is_worker and r.rank is None and world >= 4,
            f"--role worker in a world of {world} needs --tensor-parallel-rank, 1 to {world - 1}",
        ),
        (
            "rank",
            is_worker and not 1 <= r.worker_rank < world,
            f"--tensor-parallel-rank {r.worker_rank} in a world of {world}: a worker is rank 1 to "
            f"{world - 1}; rank 0 is the head's",
        ),
        (
            "transport",
            r.backend == "cuda" and r.transport == "tcp",
            "--transport tcp with --backend cuda: GPUs exchange data through NCCL only; give "
            "--transport nccl or auto",
        ),
        (
            "transport",
            r.backend == "cpu" and r.transport == "nccl",
            "--transport nccl with --backend cpu: CPU ranks exchange data over TCP; give "
            "--transport tcp or auto",
        ),
        (
            "automatic_context",
            has_mode and r.needs_context and not r.has_context,
            f"{flag} needs an explicit --ctx: ranks of different sizes would derive different ones",
        ),
    ]


def device_refusal(devices: Mapping[int, Pairs]) -> Refuse | None:
    """Refuse two ranks on one physical GPU: NCCL does not support it and hangs.

    Args:
      devices: rank to the facts in its hello; a GPU has a `uuid`.
    """
    seen: dict[str, int] = {}
    for rank, pairs in sorted(devices.items()):
        uuid = dict(pairs).get("uuid", "")
        if not uuid:
            continue
        if uuid in seen:
            return Refuse(
                reason="same_device",
                rank=rank,
                field="uuid",
                leader_value=uuid,
                peer_value=uuid,
                flag="CUDA_VISIBLE_DEVICES",
                text=f"ranks {seen[uuid]} and {rank} run on the same GPU {uuid}; one GPU for each "
                "rank is needed; set by CUDA_VISIBLE_DEVICES",
            )
        seen[uuid] = rank
    return None
