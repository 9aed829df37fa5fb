"""The memory plan of the full-size model, and its weights' values; nothing full-size is made."""

import numpy as np
import pytest
from numba import cuda

from ds4.cuda.kernels.random_fill import fill_kernel
from ds4.cuda.layout import LAYOUTS
from ds4.cuda.memory import MemoryLayout
from ds4.cuda.source import Piece
from ds4.cuda.synthetic import SyntheticSource, flash_shape
from ds4.cuda.weights import DeviceWeights
from ds4.cuda.workspace import StepLimits, Workspace
from ds4.errors import ConfigError
from ds4.gguf.constants import QuantType
from ds4.model.deepseek4.tensors import expected_tensors
from ds4.partition.ownership import Ownership
from ds4.partition.rules import Mode


def planned(own):
    layout = MemoryLayout()
    weights = DeviceWeights(SyntheticSource("deepseek4-flash"), own, layout)
    return layout, weights


def test_the_plan_of_the_full_model_is_its_tensors_in_their_layouts():
    source = SyntheticSource("deepseek4-flash")
    layout, weights = planned(Ownership.of(source.shape))
    wanted = 0
    for spec in expected_tensors(source.shape).values():
        kind, n = source.kind(spec.name), int(np.prod(spec.shape))
        packed = kind in LAYOUTS and len(spec.shape) > 1 and "_ape" not in spec.name
        wanted += LAYOUTS[kind].n_bytes(1, n) if packed else 4 * n
    # Besides the tensors: alignment, and small tables of shards and experts.
    assert 0 <= layout.total_bytes - wanted < 4 << 20
    Workspace(weights, StepLimits(max_rows=8, max_context=32768, max_sessions=8), layout)
    assert layout.by_class["workspace"] < 256 << 20


@pytest.mark.parametrize("mode", list(Mode))
def test_the_ranks_of_a_world_plan_every_expert_once(mode):
    shape = flash_shape()
    whole = planned(Ownership.of(shape))[1].layers[5].experts
    parts = [
        planned(Ownership.of(shape, mode=mode, world=2, rank=r))[1].layers[5].experts
        for r in (0, 1)
    ]
    for name in ("gate", "up", "down"):
        assert sum(getattr(p, name).rows for p in parts) == getattr(whole, name).rows
    assert sum(p.shared_down.k for p in parts) == whole.shared_down.k


def test_an_unknown_synthetic_model_is_refused_by_name():
    with pytest.raises(ConfigError, match="deepseek4-flash"):
        SyntheticSource("nothing")


def test_random_planes_differ_and_constants_fill_every_item():
    for mode, check in (
        ("random", lambda a: len(set(a.tolist())) > 290),
        ("constant", lambda a: (a == 77).all()),
        ("halves", lambda a: np.abs(a.view(np.float16).astype(np.float32)).max() <= 0.0351),
    ):
        out = cuda.to_device(np.zeros(300, np.uint32))
        fill_kernel(mode)[1, 256](out, np.int64(300), np.uint32(5), np.uint32(77))
        assert check(out.copy_to_host()), mode


def test_hash_tables_and_vectors_have_legal_values():
    source = SyntheticSource("deepseek4-flash", n_layers=2)
    table = source.hash_table("blk.0.ffn_gate_tid2eid.weight").reshape(-1, source.shape.n_used)
    assert table.min() >= 0
    assert table.max() < source.shape.n_experts
    ordered = np.sort(table, axis=1)
    assert (ordered[:, 1:] != ordered[:, :-1]).all()
    assert (source.vector("output_norm.weight") == 1).all()
    assert source.kind("blk.0.ffn_gate_exps.weight") is QuantType.IQ2_XXS
    assert Piece(tensor="x", first=0, count=1, columns=(32, 96)).n_columns == 64
