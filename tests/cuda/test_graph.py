"""Buckets, and the sizes of buffers and states, by arithmetic alone."""

import pytest

from ds4.cuda.graph import bucket_of
from ds4.cuda.memory import state_elements
from ds4.errors import ConfigError
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.tensors import load_shape
from ds4.partition.memory import partial_state_bytes, session_rows_bytes


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8)])
def test_rows_go_to_the_smallest_bucket_that_holds_them(rows, bucket):
    assert bucket_of(rows) == bucket


def test_more_rows_than_the_largest_bucket_are_refused():
    with pytest.raises(ConfigError, match="9 rows"):
        bucket_of(9)


def test_a_session_s_state_has_the_size_that_the_memory_guard_counts():
    with GGUFFile.open("tests/data/v4-tiny-q2.gguf") as file:
        shape = load_shape(file)
    fixed, growing = state_elements(shape, 1024)
    counted = session_rows_bytes(shape, 1024, 4) + partial_state_bytes(shape)
    assert 4 * (fixed + growing) == counted
