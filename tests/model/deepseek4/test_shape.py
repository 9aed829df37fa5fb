from __future__ import annotations

import numpy as np
import pytest

from ds4.errors import ModelFileError, UnsupportedModelError
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.shape import DeepSeek4Shape, Rope
from ds4.model.deepseek4.tensors import TensorClass, bytes_read_per_token, load_shape
from tests.modelmaker import metadata, write_model

PUBLISHED = Rope(
    base=160000.0, factor=16.0, original_context=65536, beta_fast=32.0, beta_slow=1.0, n_dims=64
)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones():
    plain = 160000.0 ** (-2.0 * np.arange(32) / 64)
    found = PUBLISHED.frequencies()
    np.testing.assert_array_equal(found[:16], plain[:16])
    np.testing.assert_allclose(found[25:], plain[25:] / 16, rtol=1e-15)
    between = found[16:25] / plain[16:25]
    assert (np.diff(between) < 0).all()
    assert ((between > 1 / 16) & (between < 1)).all()


def test_window_layers_have_plain_frequencies():
    shape = DeepSeek4Shape.from_metadata("x", metadata())
    np.testing.assert_allclose(
        shape.rope(0).frequencies(), 10000.0 ** (-2.0 * np.arange(32) / 64), rtol=1e-15
    )
    assert shape.rope(1) == shape.rope(2) == shape.rope_compressed


def test_a_trailing_draft_block_is_not_a_layer():
    values = metadata(nextn_predict_layers=1)
    names = {"blk.2.nextn.eh_proj.weight"}
    assert DeepSeek4Shape.from_metadata("x", values).n_layers == 3
    assert DeepSeek4Shape.from_metadata("x", values, names).n_layers == 2


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"attention__head_count_kv": 2}, UnsupportedModelError, "head_count_kv: expected 1"),
        ({"attention__output_group_count": 3}, ModelFileError, "a divisor of 8 heads, found 3"),
        ({"rope__dimension_count": 130}, ModelFileError, "an even number up to 128, found 130"),
        ({"expert_used_count": 17}, ModelFileError, "at most 16 experts, found 17"),
        ({"attention__compress_ratios": [0, 2, 4]}, UnsupportedModelError, "0, 4 or 128"),
        ({"attention__compress_ratios": [0, 4]}, ModelFileError, "at least 3 entries, found 2"),
        ({"expert_gating_func": 2}, UnsupportedModelError, "sqrt-softplus"),
        ({"expert_weights_norm": False}, UnsupportedModelError, "expected True, found False"),
        ({"expert_group_count": 4}, UnsupportedModelError, "0 or absent, found 4"),
        ({"rope__scaling__type": "linear"}, UnsupportedModelError, "'yarn', found 'linear'"),
        ({"hash_layer_count": 4}, ModelFileError, "0 to 3, found 4"),
        ({"swiglu_clamp_shexp": [1.0, 1.0, 1.0]}, UnsupportedModelError, "swiglu_clamp_shexp"),
    ],
)
def test_a_contradiction_names_key_expected_and_found(change, error, text):
    with pytest.raises(error, match="key") as caught:
        DeepSeek4Shape.from_metadata("some.gguf", metadata(**change))
    assert text in str(caught.value)
    assert str(caught.value).startswith("some.gguf: ")


def test_indexer_keys_are_also_found_under_their_alias():
    values = metadata()
    for part in ("head_count", "key_length", "top_k"):
        values[f"deepseek4.indexer.{part}"] = values.pop(f"deepseek4.attention.indexer.{part}")
    assert DeepSeek4Shape.from_metadata("x", values).index_top_k == 4


def test_bytes_read_per_token_count_one_row_of_tables_and_k_of_e_experts(tmp_path):
    path = write_model(tmp_path / "m.gguf")
    with GGUFFile.open(path) as file:
        shape = load_shape(file)
        read = bytes_read_per_token(file, shape)
        assert read[TensorClass.EMBEDDING] == 256 * 2
        assert read[TensorClass.HASH] == 4 * 4
        whole = sum(file.tensors[f"blk.{i}.ffn_down_exps.weight"].n_bytes for i in range(3))
        assert read[TensorClass.ROUTED_DOWN] == whole * 4 // 16
