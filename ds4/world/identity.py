"""The geometry of a rank, derived from the model's header and the run's configuration.

Invariant: nothing here reads a weight, except that the content digest samples a few pages, so that
two files with the same header and other weights are not taken for one. Hashing a file of 80 GB at
every start is no option.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import attrs
import numpy as np

import ds4
from ds4.errors import ConfigError
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import load_shape
from ds4.partition.collectives_model import step_schedule
from ds4.partition.ownership import Ownership
from ds4.partition.placement import Placement
from ds4.partition.placement_file import placement_for
from ds4.partition.rules import Mode
from ds4.protocol.identity import Geometry
from ds4.world.config import RunConfig

__all__ = ["Identity", "build_digest", "content_digest"]

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_MODES = {Mode.EXPERT_PARALLEL: "expert-parallel", Mode.TENSOR_PARALLEL: "tensor-parallel"}
_MODEL_ID = "deepseek4"


def content_digest(file: GGUFFile) -> bytes:
    """BLAKE2b-256 over the header, the file's size, and 64 pages spread over the data."""
    digest = hashlib.blake2b(file.header_digest(), digest_size=32)
    span = file.file_bytes - file.data_offset
    with open(file.path, "rb", buffering=0) as raw:
        for index in range(_SAMPLES):
            offset = file.data_offset + index * span // _SAMPLES
            digest.update(os.pread(raw.fileno(), _SAMPLE_BYTES, offset))
    return digest.digest()


@functools.cache
def build_digest() -> str:
    """Name of this build: the version and a digest over the package's source files."""
    root = Path(ds4.__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(path.read_bytes())
    return f"{ds4.__version__}+{digest.hexdigest()}"


def _layout(file: GGUFFile) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for name, info in sorted(file.tensors.items()):
        digest.update(f"{name} {info.shape} {int(info.type)}\n".encode())
    return digest.digest()


def _schedule(shape: DeepSeek4Shape, mode: Mode, world: int) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for n_rows, n_logit_rows in ((1, 1), (2, 1), (7, 0)):
        schedule = step_schedule(shape, mode, world, n_rows=n_rows, n_logit_rows=n_logit_rows)
        for item in schedule:
            digest.update(f"{item.kind.value} {item.what} {item.layer} {item.counts}\n".encode())
    return digest.digest()


@attrs.frozen(kw_only=True)
class Identity:
    """What one process derives from its model file and its configuration.

    Attributes:
      shape: of the model.
      placement: experts to shards.
      geometry: what is compared with other ranks.
    """

    shape: DeepSeek4Shape
    placement: Placement
    geometry: Geometry

    @classmethod
    def of(cls, file: GGUFFile, run: RunConfig) -> Identity:
        """Derive it.

        Raises:
          ModelFileError: not a usable model.
          WorldRefused: the world does not divide the model.
          ConfigError: the placement is wrong.
        """
        shape = load_shape(file)
        # Before anything else: a world that does not divide the model has no geometry.
        Ownership.of(shape, mode=run.mode, world=run.world)
        tables = {}
        if run.placement == "balanced":
            for layer in range(shape.n_layers):
                name = f"blk.{layer}.ffn_gate_tid2eid.weight"
                if name in file.tensors:
                    tables[layer] = file.rows(name).view(np.dtype("<i4"))
        try:
            placement = placement_for(
                run.placement,
                n_layers=shape.n_layers,
                n_experts=shape.n_experts,
                hash_tables=tables,
            )
        except ConfigError as error:
            raise ConfigError(f"--ep-placement {run.placement}: {error}") from error
        n_ctx = min(run.n_ctx, shape.n_ctx_train)
        return cls(
            shape=shape,
            placement=placement,
            geometry=Geometry(
                mode="single" if run.world == 1 else _MODES[run.mode],
                world=run.world,
                gguf_bytes=file.file_bytes,
                gguf_digest=content_digest(file),
                layout_fingerprint=_layout(file),
                model_id=_MODEL_ID,
                n_layers=shape.n_layers,
                width=shape.d_model,
                vocab=shape.n_vocab,
                n_ctx=n_ctx,
                prefill_chunk=min(run.prefill_chunk, n_ctx),
                max_sessions=run.max_sessions,
                max_batch_rows=min(run.prefill_chunk, n_ctx) + run.max_sessions,
                mixed_quantum=min(run.prefill_chunk, n_ctx),
                schedule_digest=_schedule(shape, run.mode, run.world),
                placement_digest=placement.digest(),
                reduce_mode="tree8",
                fast_aligned=False,
                activation_dtype=f"float32, rounding {run.rounding}",
                transport=run.data_plane,
                build_commit=build_digest(),
            ),
        )
