"""What all ranks of a world must agree on before a weight byte is read.

Invariant: two ranks whose `geometry_hash` is equal issue the same collectives, with the same
shapes, in the same order, on the same weights. Any flag that changes the sequence, shape or
rounding of collectives therefore has a field here, and every field says which flag sets it.

This module compares; it does not know how the values are found or sent.
"""

from __future__ import annotations

import hashlib

import attrs
import msgpack

from ds4.protocol.fields import BOOL, DIGEST, U32, U64, Text

__all__ = ["Difference", "Geometry", "first_difference", "warnings_between"]

_NAME = Text(128)

_MODEL = "--model"
_BUILD = "the ds4 installation; use one build on every rank"


@attrs.frozen(kw_only=True)
class Geometry:
    """The identity of a model file and everything that shapes the collectives.

    Attributes:
      mode: `single`, `expert-parallel` or `tensor-parallel`.
      world: number of ranks.
      gguf_bytes: size of the model file.
      gguf_digest: digest of the model file's content.
      layout_fingerprint: digest over tensor names, shapes and quantization types.
      model_id: architecture name, as in the file's metadata.
      n_layers: layers that run.
      width: D, values in the residual stream.
      vocab: V, rows of the output head.
      n_ctx: context capacity of a session, in tokens.
      prefill_chunk: most prompt tokens in one chunk.
      max_sessions: sessions that may be resident.
      max_batch_rows: most rows of one step.
      mixed_quantum: prompt tokens per step while others decode.
      schedule_digest: digest of the list of collectives of one step.
      placement_digest: digest of the table that assigns experts to shards.
      reduce_mode: how partial sums are joined.
      fast_aligned: the aligned expert layout that changes rounding.
      activation_dtype: type of the values that cross ranks.
      transport: data plane.
      nccl_version: of the loaded library; empty without one.
      build_commit: commit of this build; empty when unknown.
      build_dirty: the build had local changes.
      cuda_driver: driver version; differences only warn.
      compute_capability: of the device; differences only warn.

    Raises:
      LocalProtocolError: a value of the wrong type or out of range (reason `field`).
    """

    mode: str = attrs.field(
        validator=Text(32), metadata={"flag": "--expert-parallel / --tensor-parallel"}
    )
    world: int = attrs.field(validator=U32, metadata={"flag": "--tensor-parallel-world"})
    gguf_bytes: int = attrs.field(validator=U64, metadata={"flag": _MODEL})
    gguf_digest: bytes = attrs.field(validator=DIGEST, metadata={"flag": _MODEL})
    layout_fingerprint: bytes = attrs.field(validator=DIGEST, metadata={"flag": _MODEL})
    model_id: str = attrs.field(validator=_NAME, metadata={"flag": _MODEL})
    n_layers: int = attrs.field(validator=U32, metadata={"flag": _MODEL})
    width: int = attrs.field(validator=U32, metadata={"flag": _MODEL})
    vocab: int = attrs.field(validator=U32, metadata={"flag": _MODEL})
    n_ctx: int = attrs.field(validator=U64, metadata={"flag": "--ctx"})
    prefill_chunk: int = attrs.field(validator=U32, metadata={"flag": "--prefill-chunk"})
    max_sessions: int = attrs.field(validator=U32, metadata={"flag": "--batched-session"})
    max_batch_rows: int = attrs.field(
        validator=U32, metadata={"flag": "--prefill-chunk and --batched-session"}
    )
    mixed_quantum: int = attrs.field(validator=U32, metadata={"flag": "--mixed-prefill-quantum"})
    schedule_digest: bytes = attrs.field(validator=DIGEST, metadata={"flag": _BUILD})
    placement_digest: bytes = attrs.field(validator=DIGEST, metadata={"flag": "--ep-placement"})
    reduce_mode: str = attrs.field(validator=_NAME, metadata={"flag": "--ordered-reduce"})
    fast_aligned: bool = attrs.field(
        validator=BOOL, metadata={"flag": "DS4_CUDA_TP_FAST_ALIGNED_EXPERTS"}
    )
    activation_dtype: str = attrs.field(validator=_NAME, metadata={"flag": "--activation-rounding"})
    transport: str = attrs.field(validator=_NAME, metadata={"flag": "--transport"})
    nccl_version: str = attrs.field(
        validator=_NAME, default="", metadata={"flag": "DS4_NCCL_LIBRARY"}
    )
    build_commit: str = attrs.field(validator=_NAME, default="", metadata={"flag": _BUILD})
    build_dirty: bool = attrs.field(validator=BOOL, default=False, metadata={"flag": _BUILD})
    cuda_driver: str = attrs.field(
        validator=_NAME, default="", metadata={"flag": "the CUDA driver", "warn_only": True}
    )
    compute_capability: str = attrs.field(
        validator=_NAME, default="", metadata={"flag": "the GPU", "warn_only": True}
    )

    def geometry_hash(self) -> bytes:
        """BLAKE2b-256 over the msgpack array of all fields that must be equal, in their order.

        The array opens with a name of its own, so that no other hash of ds4 can be mistaken for
        it. msgpack's shortest form of each value makes it canonical.
        """
        values: list[object] = ["ds4 geometry 1"]
        values += [getattr(self, name) for name in _EQUAL]
        return hashlib.blake2b(msgpack.packb(values), digest_size=32).digest()


_FLAGS = {a.name: str(a.metadata["flag"]) for a in attrs.fields(Geometry)}
_WARN = tuple(a.name for a in attrs.fields(Geometry) if a.metadata.get("warn_only"))
_EQUAL = tuple(name for name in _FLAGS if name not in _WARN)


@attrs.frozen
class Difference:
    """One field in which a peer differs from the leader.

    Attributes:
      field: its name in `Geometry`.
      leader_value: the leader's value, as text.
      peer_value: the peer's value, as text.
      flag: the flag, variable or thing that sets it.
    """

    field: str
    leader_value: str
    peer_value: str
    flag: str

    def text(self, rank: int) -> str:
        """One line for people on both sides: field, both values, the rank, what to change."""
        return (
            f"rank {rank} differs in {self.field}: leader has {self.leader_value}, "
            f"rank {rank} has {self.peer_value}; set by {self.flag}"
        )


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex() or "(none)"
    if isinstance(value, str):
        return value or "(none)"
    return str(value)


def _differences(leader: Geometry, peer: Geometry, names: tuple[str, ...]) -> list[Difference]:
    pairs = ((name, getattr(leader, name), getattr(peer, name)) for name in names)
    return [
        Difference(name, _shown(ours), _shown(theirs), _FLAGS[name])
        for name, ours, theirs in pairs
        if ours != theirs
    ]


def first_difference(leader: Geometry, peer: Geometry) -> Difference | None:
    """The first field, in declaration order, that must be equal and is not."""
    found = _differences(leader, peer, _EQUAL)
    return found[0] if found else None


def warnings_between(leader: Geometry, peer: Geometry) -> list[Difference]:
    """Differences that are allowed but worth a line in the log."""
    return _differences(leader, peer, _WARN)
