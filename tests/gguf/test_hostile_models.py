"""Well-formed GGUF files that are not a model ds4 can run: one `ModelFileError` line each.

The base is the header of a small DeepSeek V4 file, opened as a sparse file of full size.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from ds4.errors import ModelFileError, UnsupportedModelError
from ds4.gguf import GGUFFile, QuantType
from ds4.gguf.constants import ValueType
from ds4.model.deepseek4.tensors import load_shape
from tests.gguf.files import File, array, key, scalar, tensor
from tests.modelmaker import write_model

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus" / "fuzz_gguf"


@pytest.fixture
def model(tmp_path):
    """An opened file whose metadata and tensors a test may change."""
    path = tmp_path / "m.gguf"
    path.write_bytes((CORPUS / "deepseek4-tiny-q2-in-a-hole").read_bytes().removesuffix(b"~hole"))
    os.truncate(path, 1 << 30)
    with GGUFFile.open(path) as file:
        yield file


def refusal(file):
    with pytest.raises(ModelFileError) as caught:
        load_shape(file)
    text = str(caught.value)
    assert text.startswith(f"{file.path}: ")
    assert ": expected " in text
    assert ", found " in text
    assert text.isprintable()
    assert len(text) < 1000
    return caught.value


def test_the_base_file_is_accepted(model):
    assert load_shape(model).n_layers == 6


@pytest.mark.parametrize("architecture", ["deepseek41", "deepseek2", "deepseek32", "llama", ""])
def test_another_architecture_is_unsupported_and_named(model, architecture):
    model.metadata["general.architecture"] = architecture
    error = refusal(model)
    assert type(error) is UnsupportedModelError
    assert f"key general.architecture: expected 'deepseek4', found '{architecture}'" in str(error)


def test_a_pruned_file_is_unsupported(model):
    model.metadata["reap.enabled"] = True
    error = refusal(model)
    assert type(error) is UnsupportedModelError
    assert "key reap.enabled: expected an unpruned model, found a pruned (REAP) file" in str(error)


@pytest.mark.parametrize("name", ["mtp.0.e_proj.weight", "dspark.0.main_proj.weight"])
def test_a_draft_only_file_is_unsupported(tmp_path, name):
    file = File(
        keys=[key("general.architecture", scalar(ValueType.STRING, "deepseek4"))],
        tensors=[tensor(name, [8], QuantType.F32, 0)],
        data=bytes(32),
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(file.build())
    with GGUFFile.open(path) as opened:
        error = refusal(opened)
    assert type(error) is UnsupportedModelError
    assert "expected a main model, found a draft (MTP or DSpark) file" in str(error)


OPTIONAL = ("expert_gating_func", "expert_group", "rope.scaling.type", "swiglu_clamp_shexp")


def test_each_required_key_that_is_missing_is_named(model):
    original = dict(model.metadata)
    required = [
        name
        for name in original
        if name.startswith("deepseek4.")
        and not any(part in name for part in OPTIONAL)
        and not name.endswith(("context_length", "feed_forward_length", "embedding_length_out"))
    ]
    required.append("deepseek4.rope.scaling.original_context_length")
    required.append("deepseek4.expert_feed_forward_length")
    assert len(required) > 30
    for name in required:
        model.metadata = {k: v for k, v in original.items() if k != name}
        assert f"key {name}" in str(refusal(model))


WRONG_VALUES = {
    "numbers": np.array([1, 2], np.int32),
    "no numbers": np.array([], np.float32),
    "NaN among numbers": np.full(4096, np.nan, np.float32),
    "2^40 among numbers": np.full(4096, 2**40, np.uint64),
    "booleans": np.array([True] * 4096),
    "NaN": float("nan"),
    "infinity": float("inf"),
    "-1": -1,
    "2^64 - 1": 2**64 - 1,
    "text": "x",
    "long text with control characters": "a\n\x1b" * 100_000,
}


@pytest.mark.parametrize("value", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_value_of_the_wrong_type_or_size_in_any_key_gives_no_other_exception(model, value):
    original = dict(model.metadata)
    refused = 0
    for name in [*original, "reap.enabled", "deepseek4.nextn_predict_layers"]:
        model.metadata = {**original, name: value}
        try:
            load_shape(model)
        except ModelFileError:
            refused += 1
            refusal(model)
    assert refused > 25


def test_an_array_of_strings_where_numbers_belong_is_refused(tmp_path, model):
    path = tmp_path / "strings.gguf"
    words = array(ValueType.STRING, ["x" * 100_000] + ["\n"] * 4096)
    path.write_bytes(File(keys=[key("words", words)], tensors=[], data=b"").build())
    with GGUFFile.open(path) as other:
        words = other.metadata["words"]
    original = dict(model.metadata)
    for name in ("attention.compress_ratios", "swiglu_clamp_exp", "swiglu_clamp_shexp"):
        model.metadata = {**original, f"deepseek4.{name}": words}
        assert "expected finite numbers, found 'xxx" in str(refusal(model))
    model.metadata = {**original, "deepseek4.block_count": words}
    assert "expected a whole number, found StringArray(['xxx" in str(refusal(model))


def test_each_tensor_that_is_missing_is_named(model):
    original = dict(model.tensors)
    optional = [name for name in original if name.endswith("exp_probs_b.bias")]
    for name in original:
        model.tensors = {k: v for k, v in original.items() if k != name}
        if name in optional:
            load_shape(model)
        else:
            assert f"tensor {name}" in str(refusal(model))


def test_a_tensor_of_the_wrong_shape_or_type_is_named_with_its_offset(model):
    original = dict(model.tensors)
    others = {info.shape: info for info in original.values()}
    for name, info in original.items():
        wrong = next(other for shape, other in others.items() if shape != info.shape)
        model.tensors = {**original, name: wrong}
        error = refusal(model)
        assert f"tensor {name} at byte {wrong.offset}: expected dimensions" in str(error)


def test_a_routing_table_of_floats_is_refused(model):
    name = "blk.0.ffn_gate_tid2eid.weight"
    info = model.tensors[name]
    model.tensors[name] = type(info)(
        name, info.ne, info.shape, QuantType.F32, info.offset, info.n_bytes
    )
    assert "expected type I32, found F32" in str(refusal(model))


def test_gate_and_up_experts_of_different_types_are_unsupported(model):
    name = "blk.1.ffn_up_exps.weight"
    info = model.tensors[name]
    model.tensors[name] = type(info)(
        name, info.ne, info.shape, QuantType.Q2_K, info.offset, info.n_bytes
    )
    error = refusal(model)
    assert type(error) is UnsupportedModelError
    assert f"tensor {name} at byte {info.offset}: expected type IQ2_XXS" in str(error)
    assert str(error).endswith("found Q2_K")


def test_a_tensor_relabelled_to_a_smaller_type_is_refused_by_the_gap_it_leaves(tmp_path):
    path = write_model(tmp_path / "whole.gguf")
    data = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at : at + 4] == (1).to_bytes(4, "little"), "F16 in the file as written"
    data[at : at + 4] = (8).to_bytes(4, "little")
    bad = tmp_path / "relabelled.gguf"
    bad.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"right behind tensor token_embd\.weight"):
        GGUFFile.open(bad)
