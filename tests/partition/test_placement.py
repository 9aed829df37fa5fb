"""Placements obey the partition laws, and their files are read strictly."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import ConfigError
from ds4.partition.placement import LayerPlacement, Placement, hash_layer_load, imbalance
from ds4.partition.placement_file import (
    dump_placement,
    load_placement,
    parse_placement,
    placement_for,
)
from ds4.partition.shards import N_SHARDS, WORLDS, shard_blocks

loads = st.lists(st.floats(0, 1e6), min_size=1, max_size=64)


@st.composite
def placements(draw):
    n = draw(st.integers(1, 48))
    order = draw(st.permutations(range(n)))
    return LayerPlacement(
        shards=tuple(tuple(sorted(order[i] for i in shard_blocks(n, v))) for v in range(N_SHARDS))
    )


def check_laws(p):
    n = p.n_experts
    everything = [e for experts in p.shards for e in experts]
    assert sorted(everything) == list(range(n))
    assert [len(s) for s in p.shards] == [len(shard_blocks(n, v)) for v in range(N_SHARDS)]
    shard_of, local_of = p.shard_of(), p.local_of()
    assert all(p.shards[shard_of[g]][local_of[g]] == g for g in range(n))
    for world in WORLDS:
        tables = [p.local_table(world, rank) for rank in range(world)]
        assert (sum(t.owned.astype(int) for t in tables) == 1).all()
        for t in tables:
            assert [t.experts[t.local[g]] for g in t.experts] == list(t.experts)
            assert (t.local[~t.owned] == -1).all()
    if n % N_SHARDS == 0:
        assert len({len(s) for s in p.shards}) == 1


@given(placements())
def test_any_placement_is_a_partition_with_a_consistent_remap(p):
    check_laws(p)


@given(st.integers(1, 400))
def test_the_contiguous_placement_is_a_partition(n):
    p = LayerPlacement.contiguous(n)
    check_laws(p)
    assert p.is_contiguous
    assert p.experts_of_rank(1, 0) == tuple(range(n))


@given(loads)
def test_the_balanced_placement_is_a_partition(load):
    check_laws(LayerPlacement.balanced(load))


@given(placements(), st.sampled_from(WORLDS))
def test_a_rank_owns_exactly_what_its_shards_own(p, world):
    per_rank = N_SHARDS // world
    for rank in range(world):
        mine = p.shards[rank * per_rank : (rank + 1) * per_rank]
        assert p.experts_of_rank(world, rank) == tuple(e for s in mine for e in s)


@given(placements())
def test_contiguous_if_and_only_if_each_rank_reads_one_slice(p):
    def one_slice(experts):
        return not experts or list(experts) == list(range(experts[0], experts[0] + len(experts)))

    slices = all(one_slice(s) for s in p.shards) and one_slice(p.experts_of_rank(1, 0))
    assert p.is_contiguous == slices


def lpt_by_hand(load):
    room = [len(shard_blocks(len(load), v)) for v in range(N_SHARDS)]
    total = [0.0] * N_SHARDS
    lists = [[] for _ in range(N_SHARDS)]
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        best = None
        for v in range(N_SHARDS):
            if room[v] and (best is None or total[v] < total[best]):
                best = v
        room[best] -= 1
        total[best] += load[expert]
        lists[best].append(expert)
    return tuple(tuple(sorted(experts)) for experts in lists)


@given(loads)
def test_balanced_follows_the_lpt_rule_with_its_tie_breaks(load):
    assert LayerPlacement.balanced(load).shards == lpt_by_hand(load)


def test_lpt_ties_go_to_the_lower_expert_and_the_lower_shard():
    p = LayerPlacement.balanced([1.0] * 16)
    assert p.shards == tuple((v, v + 8) for v in range(8))


def test_lpt_respects_room_even_when_one_expert_carries_everything():
    load = [0.0] * 16
    load[5] = 100.0
    p = LayerPlacement.balanced(load)
    assert p.shard_of()[5] == 0
    assert [len(s) for s in p.shards] == [2] * 8


def test_balancing_helps_a_skewed_load_and_never_hurts_a_uniform_one():
    skewed = [8.0] * 4 + [1.0] * 28
    contiguous, balanced = LayerPlacement.contiguous(32), LayerPlacement.balanced(skewed)
    assert imbalance(contiguous, skewed, 8) == pytest.approx(32 / 7.5)
    assert imbalance(balanced, skewed, 8) < 1.5
    uniform = [3.0] * 32
    for world in WORLDS:
        before = imbalance(LayerPlacement.contiguous(32), uniform, world)
        assert imbalance(LayerPlacement.balanced(uniform), uniform, world) == before == 1.0


def test_no_load_at_all_counts_as_balanced():
    assert imbalance(LayerPlacement.contiguous(8), [0.0] * 8, 4) == 1.0


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        (((0,), (1,)), "needs 8 lists of experts, got 2"),
        (((),) * 8, "needs 1 to 65536 experts, got 0"),
        (((0,), (1,), (2,), (3,), (4,), (5,), (6,), (6,)), "expert 6 is in shard 6 and shard 7"),
        (((0,), (1,), (2,), (3,), (4,), (5,), (6,), (8,)), "shard 7 names expert 8"),
        (((1, 0), *((2 * v, 2 * v + 1) for v in range(1, 8))), "shard 0 must be in ascending"),
        (((0, 1, 2), (3,), *((2 * v, 2 * v + 1) for v in range(2, 8))), "shard 0 must own 2 of 16"),
    ],
)
def test_a_placement_that_is_no_partition_is_refused_with_the_reason(shards, text):
    with pytest.raises(ConfigError, match=text):
        LayerPlacement(shards=shards)


@pytest.mark.parametrize("load", [[1.0, float("nan")], [1.0, -1.0], [float("inf")], [], [[1.0]]])
def test_a_load_that_is_no_load_is_refused(load):
    with pytest.raises(ConfigError, match="load"):
        LayerPlacement.balanced(load)


def test_owners_outside_the_shards_are_refused():
    with pytest.raises(ConfigError, match="expert 1 is placed on shard 8"):
        LayerPlacement.from_owners([0, 8])


def test_owner_tables_round_trip():
    p = LayerPlacement.balanced([float(i % 5) for i in range(24)])
    assert LayerPlacement.from_owners(p.shard_of().tolist()) == p


def test_the_digest_depends_on_every_layer_and_owner_and_on_nothing_else():
    base = Placement.contiguous(3, 16)
    load = [float(i) for i in range(16)]
    others = [Placement.balanced(3, 16, {layer: load}) for layer in range(3)]
    others += [Placement.contiguous(4, 16), Placement.contiguous(3, 17)]
    digests = [base.digest()] + [p.digest() for p in others]
    assert len(set(digests)) == len(digests)
    assert Placement.contiguous(3, 16).digest() == base.digest()
    owners = bytes(v for v in range(8) for _ in range(2)) * 3
    expected = hashlib.blake2b(
        bytes([16, 0, 0, 0, 3, 0, 0, 0]) + owners, digest_size=16, person=b"ds4-placement"
    )
    assert base.digest() == expected.digest()


def test_balanced_leaves_layers_without_a_load_contiguous():
    p = Placement.balanced(3, 16, {1: [float(i) for i in range(16)]})
    assert [layer.is_contiguous for layer in p.layers] == [True, False, True]


@pytest.mark.parametrize(
    ("loads_", "text"),
    [({3: [1.0] * 16}, "load given for layer 3 of 3"), ({0: [1.0]}, "has 1 entries for 16")],
)
def test_loads_that_do_not_fit_the_model_are_refused(loads_, text):
    with pytest.raises(ConfigError, match=text):
        Placement.balanced(3, 16, loads_)


def test_layers_must_agree_on_the_number_of_experts():
    with pytest.raises(ConfigError, match="layer 1 places 8 experts, layer 0 places 16"):
        Placement(layers=(LayerPlacement.contiguous(16), LayerPlacement.contiguous(8)))


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_hash_load_is_the_closed_form(seed, weighted):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 12, (50, 3)).astype(np.int32)
    frequency = rng.random(50) if weighted else None
    expected = [
        sum((1.0 if frequency is None else frequency[t]) * (table[t] == e).sum() for t in range(50))
        for e in range(12)
    ]
    np.testing.assert_allclose(hash_layer_load(table, 12, frequency), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("table", "frequency", "text"),
    [
        (np.array([[0, 16]]), None, "token 0 slot 1 names expert 16"),
        (np.array([[0, 1], [-1, 2]]), None, "token 1 slot 0 names expert -1"),
        (np.zeros(7, np.int32), None, r"must be \[tokens, experts per token\]"),
        (np.zeros((2, 2), np.int32), np.ones(3), "one entry per token"),
        (np.zeros((2, 2), np.int32), np.array([1.0, np.nan]), "finite"),
    ],
)
def test_bad_hash_tables_are_refused(table, frequency, text):
    with pytest.raises(ConfigError, match=text):
        hash_layer_load(table, 16, frequency)


def test_balancing_a_uniform_hash_table_gains_exactly_nothing():
    table = np.arange(32 * 6).reshape(-1, 6) % 32
    load = hash_layer_load(table, 32)
    assert set(load.tolist()) == {6.0}
    for world in WORLDS:
        before = imbalance(LayerPlacement.contiguous(32), load, world)
        assert before - imbalance(LayerPlacement.balanced(load), load, world) == 0.0


# --- files -------------------------------------------------------------------------------------


def document(**changes):
    body = {
        "format": "ds4-placement",
        "version": 1,
        "n_experts": 16,
        "layers": {"1": [[v + 8, v] for v in range(8)], "2": "contiguous"},
    }
    body.update(changes)
    return json.dumps({k: v for k, v in body.items() if v is not None})


def test_a_file_gives_the_placement_it_describes(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(document())
    p = load_placement(path, n_layers=3, n_experts=16)
    assert p.layers[1].shards == tuple((v, v + 8) for v in range(8))
    assert [layer.is_contiguous for layer in p.layers] == [True, False, True]


@given(placements())
def test_files_round_trip(layer):
    n = layer.n_experts
    p = Placement(layers=(LayerPlacement.contiguous(n), layer))
    assert parse_placement(dump_placement(p), n_layers=2, n_experts=n) == p


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected a JSON object, got list"),
        (document(format="x"), "format must be 'ds4-placement', got 'x'"),
        (document(version=2), "version must be 1, got 2"),
        (document(version=True), "version must be 1, got True"),
        (document(n_experts=8), "n_experts must be 16, got 8"),
        (document(n_experts=None), "n_experts must be 16, got None"),
        (document(layer={}), "unknown key 'layer'"),
        (document(layers=[]), "layers must be an object, got list"),
        (document(layers={"3": "contiguous"}), "'3' is no layer number from 0 to 2"),
        (document(layers={"01": "contiguous"}), "'01' is no layer number"),
        (document(layers={"-1": "contiguous"}), "'-1' is no layer number"),
        (document(layers={"9" * 5000: "contiguous"}), "is no layer number"),
        (document(layers={"0": "balanced"}), 'layer 0: must be "contiguous" or eight lists'),
        (document(layers={"0": [[0, 1.5]]}), "layer 0: entry 0 must be a list of whole expert"),
        (document(layers={"0": [[0, True]]}), "layer 0: entry 0 must be a list of whole expert"),
        (document(layers={"0": [[v] for v in range(8)]}), "layer 0: places 8 experts"),
        (document(layers={"0": [[0, 1]] * 8}), "layer 0: expert 0 is in shard 0 and shard 1"),
        ('{"format": "ds4-placement", "format": "ds4-placement"}', "'format' is given twice"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_placement(text, n_layers=3, n_experts=16, source="p.json")
    assert str(caught.value).startswith("p.json: ")
    assert len(str(caught.value)) < 400


def test_a_missing_or_huge_file_is_refused_by_path(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: cannot read the placement: No such file"):
        load_placement(tmp_path / "none.json", n_layers=1, n_experts=8)
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ConfigError, match=r"big\.json: larger than 16777216 bytes"):
        load_placement(big, n_layers=1, n_experts=8)


def test_bytes_that_are_not_utf8_are_refused():
    with pytest.raises(ConfigError, match="not JSON"):
        parse_placement(b"\xff\xfe\xfa{", n_layers=1, n_experts=8)


def test_the_option_names_a_rule_or_a_file(tmp_path):
    table = np.array([[0, 1], [0, 2], [0, 3], [1, 2]])
    sizes = {"n_layers": 3, "n_experts": 16, "hash_tables": {1: table}}
    assert placement_for("contiguous", **sizes) == Placement.contiguous(3, 16)
    balanced = placement_for("balanced", **sizes)
    assert balanced.layers[0].is_contiguous
    assert balanced.layers[1] == LayerPlacement.balanced([3.0, 2.0, 2.0, 1.0] + [0.0] * 12)
    path = tmp_path / "mine.json"
    path.write_text(dump_placement(balanced))
    assert placement_for(str(path), **sizes) == balanced
    with pytest.raises(ConfigError, match="ballanced: cannot read the placement"):
        placement_for("ballanced", **sizes)
