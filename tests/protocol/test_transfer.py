"""Snapshots in pieces: put together they are the same bytes, or an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import ConfigError, SnapshotError
from ds4.protocol.transfer import Assembler, pieces, snapshot_hash


@given(st.binary(max_size=200), st.integers(1, 50))
def test_pieces_put_together_are_the_same_bytes(data, size):
    assembler = Assembler(len(data))
    for index, piece in pieces(data, size):
        assert 0 < len(piece) <= size
        assembler.add(index, piece)
    assert data == assembler.finish(snapshot_hash(data))


@given(st.binary(min_size=1, max_size=50), st.integers(0, 399))
def test_a_flipped_bit_is_seen(data, bit):
    damaged = bytearray(data)
    damaged[bit // 8 % len(data)] ^= 1 << bit % 8
    assembler = Assembler(len(data))
    assembler.add(0, bytes(damaged))
    with pytest.raises(SnapshotError, match="damaged"):
        assembler.finish(snapshot_hash(data))


def test_a_piece_out_of_order_is_refused():
    assembler = Assembler(10)
    assembler.add(0, b"a")
    for index in (0, 2):
        with pytest.raises(SnapshotError, match="expected 1"):
            assembler.add(index, b"b")


def test_more_than_declared_is_refused_before_it_is_kept():
    assembler = Assembler(3)
    assembler.add(0, b"abc")
    with pytest.raises(SnapshotError, match="larger than 3"):
        assembler.add(1, b"d")
    assert len(assembler) == 3


def test_a_chunk_size_below_one_is_refused():
    with pytest.raises(ConfigError):
        list(pieces(b"x", 0))
