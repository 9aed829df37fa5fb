"""The byte plan: golden sizes of the published model, and the laws every plan obeys."""

import re

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import ConfigError, WorldRefused
from ds4.model.deepseek4.tensors import TensorClass
from ds4.partition.placement import LayerPlacement, Placement
from ds4.partition.rules import Cut, Mode, cut_of
from ds4.partition.shards import N_SHARDS, WORLDS, owned_shards, shard_blocks
from ds4.partition.tensor_parallel import check_world, plan_rank, possible_worlds
from tests.partition.models import (
    F32,
    FULL,
    IQ2_XXS,
    Q2_K,
    Q8_0,
    SMALL,
    info_of,
    shape_of,
    tensors_of,
)

EP, TP = Mode.EXPERT_PARALLEL, Mode.TENSOR_PARALLEL
C = TensorClass
FULL_SHAPE, FULL_TENSORS = shape_of(FULL), tensors_of(FULL)
FULL_PLACEMENT = Placement.contiguous(43, 256)
SMALL_SHAPE, SMALL_TENSORS = shape_of(SMALL), tensors_of(SMALL)
SMALL_PLACEMENT = Placement.contiguous(6, 16)
GIB = 2**30

# Class: tensors, bytes in the file, bytes read per decoded token.
PUBLISHED = {
    C.EMBEDDING: (1, 1_059_061_760, 8_192),
    C.HEAD: (1, 562_626_560, 562_626_560),
    C.ATTENTION: (215, 4_886_495_232, 4_886_495_232),
    C.COMPRESSOR: (123, 522_887_168, 522_887_168),
    C.INDEXER: (105, 451_454_976, 451_454_976),
    C.HYPER: (261, 67_773_532, 67_773_532),
    C.ROUTER: (83, 90_218_496, 90_218_496),
    C.HASH: (3, 9_308_160, 72),
    C.ROUTED_UP: (86, 47_613_739_008, 1_115_947_008),
    C.ROUTED_DOWN: (43, 30_299_652_096, 710_148_096),
    C.SHARED: (129, 1_149_763_584, 1_149_763_584),
    C.NORM: (278, 1_795_328, 1_795_328),
}
ROUTED = 47_613_739_008 + 30_299_652_096
TOTAL = 86_714_775_900


def full(mode, world, rank):
    return plan_rank(
        FULL_TENSORS, FULL_SHAPE, mode=mode, world=world, rank=rank, placement=FULL_PLACEMENT
    )


def small(mode, world, rank, placement=SMALL_PLACEMENT, tensors=SMALL_TENSORS, shape=SMALL_SHAPE):
    return plan_rank(tensors, shape, mode=mode, world=world, rank=rank, placement=placement)


@pytest.mark.parametrize("mode", Mode)
def test_one_rank_keeps_the_whole_published_file(mode):
    plan = full(mode, 1, 0)
    assert len(plan.slices) == 1328
    assert plan.total_bytes == TOTAL
    assert plan.bytes_read_per_token == 9_559_118_244
    kept, read = plan.bytes_by_class(), plan.read_bytes_by_class()
    for tensor_class, (n, size, reads) in PUBLISHED.items():
        mine = [s for s in plan.slices.values() if s.role is tensor_class]
        assert (len(mine), kept[tensor_class], read[tensor_class]) == (n, size, reads)
    for name, s in plan.slices.items():
        info = FULL_TENSORS[name]
        assert [(r.offset, r.total_bytes) for r in s.ranges] == [(info.offset, info.n_bytes)]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("mode", Mode)
def test_routed_and_shared_bytes_divide_exactly(mode, world):
    for rank in range(world):
        kept = full(mode, world, rank).bytes_by_class()
        assert kept[C.ROUTED_UP] + kept[C.ROUTED_DOWN] == ROUTED // world
        assert kept[C.SHARED] == PUBLISHED[C.SHARED][1] // world


def test_an_expert_parallel_rank_of_two_keeps_about_44_gib():
    """Half of the routed experts and of the shared lanes, all of the rest."""
    rest = TOTAL - ROUTED - PUBLISHED[C.SHARED][1]
    for rank in (0, 1):
        plan = full(EP, 2, rank)
        assert plan.total_bytes == rest + ROUTED // 2 + PUBLISHED[C.SHARED][1] // 2
        assert round(plan.total_bytes / GIB, 2) == 43.94
        # An engine that replicates the shared expert keeps 44.48 GiB, as published for one.
        assert round((plan.total_bytes + PUBLISHED[C.SHARED][1] // 2) / GIB, 2) == 44.48


def test_expert_parallel_reads_less_only_where_work_is_divided():
    one, two = full(EP, 1, 0).read_bytes_by_class(), full(EP, 2, 0).read_bytes_by_class()
    for tensor_class in TensorClass:
        divided = tensor_class in (C.ROUTED_UP, C.ROUTED_DOWN, C.SHARED)
        assert two[tensor_class] == one[tensor_class] // (2 if divided else 1)


def test_tensor_parallel_divides_attention_by_groups_and_the_output_by_rows():
    plan = full(TP, 2, 1)
    kept = plan.bytes_by_class()
    per_layer = {
        "attn_q_a": 1024 * 4096,
        "attn_q_b": 32768 * 1024 // 2,
        "attn_kv": 512 * 4096,
        "attn_output_a": 8192 * 4096 // 2,
        "attn_output_b": 4096 * 8192 // 2,
    }
    assert kept[C.ATTENTION] == 43 * sum(per_layer.values()) * 34 // 32
    assert kept[C.HEAD] == 562_626_560 // 2
    q_b = plan.slices["blk.7.attn_q_b.weight"]
    assert (q_b.start, q_b.shape) == (16384, (16384, 1024))
    sinks = plan.slices["blk.7.attn_sinks.weight"]
    assert (sinks.start, sinks.shape, sinks.n_bytes) == (32, (32,), 128)
    out_b = plan.slices["blk.7.attn_output_b.weight"]
    assert (out_b.start, out_b.shape) == (4096, (4096, 4096))
    info = FULL_TENSORS["blk.7.attn_output_b.weight"]
    (piece,) = out_b.ranges
    assert (piece.offset, piece.n_bytes, piece.count, piece.stride) == (
        info.offset + 128 * 34,
        128 * 34,
        4096,
        256 * 34,
    )
    gate = plan.slices["blk.7.ffn_gate_shexp.weight"]
    down = plan.slices["blk.7.ffn_down_shexp.weight"]
    assert (gate.start, gate.shape) == (1024, (1024, 4096))
    assert (down.start, down.shape) == (1024, (4096, 1024))
    assert plan.slices["output.weight"].start == 64640


def intervals(plans, name):
    found = sorted(p for plan in plans for r in plan.slices[name].ranges for p in r.pieces())
    merged = []
    for start, stop in found:
        if merged and start < merged[-1][1]:
            return None  # overlap
        if merged and start == merged[-1][1]:
            merged[-1][1] = stop
        else:
            merged.append([start, stop])
    return merged


@st.composite
def models(draw):
    groups = draw(st.sampled_from([1, 2, 4, 8, 16]))
    sizes = attrs.evolve(
        SMALL,
        layers=draw(st.integers(1, 4)),
        hash_layers=1,
        vocab=draw(st.integers(8, 300)),
        groups=groups,
        heads=groups * draw(st.integers(1, 2)),
        group_rank=draw(st.sampled_from([32, 64, 96])),
        experts=draw(st.integers(8, 40)),
        d_expert=draw(st.sampled_from([256, 512, 2048])),
    )
    shared = draw(st.sampled_from([Q8_0, Q2_K, IQ2_XXS, F32]))
    order = draw(st.permutations(range(sizes.experts)))
    layer = LayerPlacement(
        shards=tuple(
            tuple(sorted(order[i] for i in shard_blocks(sizes.experts, v))) for v in range(N_SHARDS)
        )
    )
    placement = Placement(
        layers=tuple(
            layer if draw(st.booleans()) else LayerPlacement.contiguous(sizes.experts)
            for _ in range(sizes.layers)
        )
    )
    return sizes, tensors_of(sizes, shared=shared), placement


@settings(max_examples=40)
@given(models(), st.sampled_from(Mode))
def test_ranks_together_keep_every_byte_and_share_none_of_a_cut_tensor(model, mode):
    sizes, tensors, placement = model
    shape = shape_of(sizes)
    for world in possible_worlds(shape, mode):
        plans = [small(mode, world, r, placement, tensors, shape) for r in range(world)]
        for name, info in tensors.items():
            cut = cut_of(name)
            if cut.applies(mode) or world == 1:
                assert intervals(plans, name) == [[info.offset, info.offset + info.n_bytes]], name
            else:
                for plan in plans:
                    assert intervals([plan], name) == [[info.offset, info.offset + info.n_bytes]]


@settings(max_examples=40)
@given(models(), st.sampled_from(Mode), st.sampled_from(WORLDS), st.data())
def test_the_bytes_of_a_slice_are_the_slice_of_the_array(model, mode, world, data):
    """Reading the ranges in order gives exactly the rows, columns or experts that are promised."""
    sizes, tensors, placement = model
    shape = shape_of(sizes)
    if world not in possible_worlds(shape, mode):
        return
    rank = data.draw(st.integers(0, world - 1))
    plan = small(mode, world, rank, placement, tensors, shape)
    name = data.draw(st.sampled_from([n for n, s in plan.slices.items() if s.cut != Cut.NONE]))
    info, s = tensors[name], plan.slices[name]
    whole = np.arange(info.n_bytes, dtype=np.int64)
    read = [whole[a - info.offset : b - info.offset] for r in s.ranges for a, b in r.pieces()]
    got = np.concatenate(read) if read else whole[:0]
    per_block = (info.type.block_elements, info.type.block_bytes)
    grid = whole.reshape(*reversed(info.ne[1:]), info.ne[0] // per_block[0], per_block[1])
    stop = s.start + (s.shape[-1] if s.cut.is_columns else s.shape[0])
    if s.cut is Cut.EXPERTS:
        want = grid[list(s.experts)]
    elif s.cut.is_columns:
        want = grid[:, s.start // per_block[0] : stop // per_block[0]]
    elif len(info.ne) == 1:
        want = grid[s.start : stop]
    else:
        want = grid[s.start : stop]
    assert got.tolist() == want.reshape(-1).tolist()
    assert s.n_bytes == got.size


@settings(max_examples=40)
@given(models(), st.sampled_from(Mode))
def test_every_shard_means_the_same_weights_in_every_world(model, mode):
    sizes, tensors, placement = model
    shape = shape_of(sizes)

    def by_shard(world):
        out = {}
        for rank in range(world):
            plan = small(mode, world, rank, placement, tensors, shape)
            for name, s in plan.slices.items():
                if not s.shards:
                    continue
                kept = owned_shards(world, rank) if len(s.shards) < 8 or world == 1 else range(8)
                for v, local in zip(kept, s.shards, strict=True):
                    ids = (
                        [s.experts[i] for i in local]
                        if s.experts
                        else [s.start + local.start, s.start + local.stop]
                        if local
                        else []
                    )
                    assert out.setdefault((name, v), ids) == ids
        return out

    reference = by_shard(1)
    assert len({v for _, v in reference}) == 8
    for world in possible_worlds(shape, mode):
        assert by_shard(world) == reference


def test_a_placement_moves_whole_experts_and_keeps_the_totals():
    placement = Placement.balanced(6, 16, {4: [float(i % 3) for i in range(16)]})
    plan = small(EP, 2, 0, placement)
    s = plan.slices["blk.4.ffn_down_exps.weight"]
    assert s.experts == placement.layers[4].experts_of_rank(2, 0)
    assert s.experts != tuple(range(8))
    assert plan.total_bytes == small(EP, 2, 0).total_bytes


def test_a_contiguous_rank_reads_one_slice_per_expert_tensor():
    for rank in range(4):
        plan = full(EP, 4, rank)
        for s in plan.slices.values():
            if s.cut is Cut.EXPERTS:
                assert len(s.ranges) == 1
                assert s.experts == tuple(range(64 * rank, 64 * rank + 64))


def test_tensors_that_the_model_does_not_use_are_not_mapped():
    names = ("blk.6.nextn.eh_proj.weight", "blk.6.attn_norm.weight", "rope_freqs.weight")
    tensors = SMALL_TENSORS | {n: info_of(n, (32,), F32, 1) for n in names}
    plan = small(TP, 2, 0, tensors=tensors)
    assert plan.skipped == names
    assert plan.total_bytes == small(TP, 2, 0).total_bytes


# --- worlds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "experts", "ep", "tp"),
    [
        (8, 256, (1, 2, 4, 8), (1, 2, 4, 8)),
        (4, 16, (1, 2, 4, 8), (1, 2, 4)),
        (2, 16, (1, 2, 4, 8), (1, 2)),
        (1, 16, (1, 2, 4, 8), (1,)),
        (8, 7, (1, 2, 4), (1, 2, 4)),
        (8, 9, (1, 2, 4, 8), (1, 2, 4, 8)),
        (8, 4, (1, 2, 4), (1, 2, 4)),
    ],
)
def test_which_worlds_divide_a_shape(groups, experts, ep, tp):
    shape = attrs.evolve(FULL_SHAPE, n_groups=groups, n_experts=experts, n_used=1)
    assert possible_worlds(shape, EP) == ep
    assert possible_worlds(shape, TP) == tp


@pytest.mark.parametrize(
    ("mode", "world", "changes", "reason", "text"),
    [
        (TP, 8, {"n_groups": 4}, "output_groups", "deepseek4.attention.output_group_count is 4"),
        (TP, 8, {"n_groups": 4}, "output_groups", "worlds that fit: 1, 2, 4"),
        (TP, 8, {"n_vocab": 7}, "vocabulary", "deepseek4.vocab_size is 7"),
        (EP, 8, {"n_experts": 6}, "experts", "deepseek4.expert_count is 6"),
        (EP, 8, {"n_experts": 6}, "experts", "--expert-parallel with --tensor-parallel-world 8"),
        (TP, 3, {}, "world_size", "--tensor-parallel with --tensor-parallel-world 3"),
        (EP, 16, {}, "world_size", "must be one of 1, 2, 4, 8"),
    ],
)
def test_a_world_that_does_not_fit_is_refused_with_field_and_values(
    mode, world, changes, reason, text
):
    shape = attrs.evolve(FULL_SHAPE, **changes)
    with pytest.raises(WorldRefused) as caught:
        check_world(shape, mode, world)
    assert caught.value.reason == reason
    assert text in str(caught.value)


def test_a_cut_inside_a_quant_block_is_refused_by_tensor_name():
    sizes = attrs.evolve(SMALL, group_rank=16)
    tensors, shape = tensors_of(sizes), shape_of(sizes)
    small(TP, 2, 0, tensors=tensors, shape=shape)  # 64 of 128 columns: on a block boundary
    with pytest.raises(WorldRefused) as caught:
        small(TP, 8, 0, tensors=tensors, shape=shape)
    assert caught.value.reason == "quant_block"
    assert "blk.0.attn_output_b.weight (Q8_0)" in str(caught.value)
    assert "column 16, inside a quant block of 32" in str(caught.value)


def test_a_shared_expert_of_one_block_lives_on_one_rank():
    tensors = tensors_of(SMALL, shared=Q2_K)  # 256 lanes are one block of 256
    kept = [small(EP, 4, r, tensors=tensors).bytes_by_class()[C.SHARED] for r in range(4)]
    assert kept[:3] == [0, 0, 0]
    assert kept[3] == small(EP, 1, 0, tensors=tensors).bytes_by_class()[C.SHARED]


@pytest.mark.parametrize(
    ("name", "ne", "text"),
    [
        ("blk.1.attn_sinks.weight", (7,), r"shape \(8,\) expected .*, found \(7,\)"),
        ("blk.1.attn_output_b.weight", (256, 256), r"shape \(256, 512\) expected"),
        ("blk.1.ffn_up_exps.weight", (256, 16, 256), r"shape \(16, 256, 256\) expected"),
        ("output.weight", (256, 511), r"shape \(512, 256\) expected .*, found \(511, 256\)"),
    ],
)
def test_a_tensor_of_another_size_is_refused_by_name(name, ne, text):
    tensors = {**SMALL_TENSORS, name: info_of(name, ne, F32, 64)}
    with pytest.raises(ConfigError, match=f"tensor {name}: {text}"):
        small(TP, 2, 0, tensors=tensors)


def test_only_the_documented_tensors_are_cut():
    names = [name for name in SMALL_TENSORS if cut_of(name) is not Cut.NONE]
    cut = {re.sub(r"^blk\.\d+\.", "", name) for name in names}
    assert cut == {
        "output.weight",
        "attn_q_b.weight",
        "attn_sinks.weight",
        "attn_output_a.weight",
        "attn_output_b.weight",
        "ffn_gate_exps.weight",
        "ffn_up_exps.weight",
        "ffn_down_exps.weight",
        "ffn_gate_shexp.weight",
        "ffn_up_shexp.weight",
        "ffn_down_shexp.weight",
    }
    assert cut_of("blk.2.indexer.attn_q_b.weight") is Cut.NONE
    assert cut_of("blk.2.output.weight") is Cut.NONE


def test_lanes_cannot_be_cut_without_the_down_projection():
    tensors = {k: v for k, v in SMALL_TENSORS.items() if k != "blk.2.ffn_down_shexp.weight"}
    with pytest.raises(ConfigError, match=r"cut without tensor blk\.2\.ffn_down_shexp\.weight"):
        small(EP, 2, 0, tensors=tensors)


def test_a_placement_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="placement is for 5 layers of 16 experts, the model has"):
        small(EP, 2, 0, Placement.contiguous(5, 16))


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ConfigError, match="rank must be from 0 to 1"):
        small(EP, 2, 2)
