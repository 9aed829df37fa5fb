"""The header of a full-size DeepSeek V4 Flash file, written by the `gguf` package over a hole."""

import gguf
import pytest

from ds4.gguf import GGUFFile
from ds4.model.deepseek4.tensors import bytes_by_class, bytes_read_per_token, load_shape
from tools.make_sparse import N_MERGES, N_VOCAB, vocabulary, write


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("full") / "full.gguf"
    n_tensors, n_bytes = write(path)
    assert n_tensors == 1328
    assert path.stat().st_size == n_bytes
    return path


def test_the_q2_mix_has_the_published_tensors_and_bytes(path):
    with GGUFFile.open(path) as file:
        assert len(file.tensors) == 1328
        assert sum(info.n_bytes for info in file.tensors.values()) == 86_714_775_900
        shape = load_shape(file)
        assert sum(n for _, n in bytes_by_class(file, shape).values()) == 86_714_775_900
        assert sum(bytes_read_per_token(file, shape).values()) == 9_559_118_244


def test_the_vocabulary_reads_back_in_full(path):
    tokens, merges, types = vocabulary()
    assert len(tokens) == N_VOCAB
    assert len(merges) == N_MERGES
    with GGUFFile.open(path) as file:
        assert list(file.metadata["tokenizer.ggml.tokens"]) == tokens
        assert list(file.metadata["tokenizer.ggml.merges"]) == merges
        assert file.metadata["tokenizer.ggml.token_type"].tolist() == types


def test_only_the_header_takes_space_on_disk(path):
    with GGUFFile.open(path) as file:
        name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.OUTPUT] + ".weight"
        assert not file.rows(name, N_VOCAB - 1).any()
        assert path.stat().st_blocks * 512 < file.data_offset + (1 << 20)
