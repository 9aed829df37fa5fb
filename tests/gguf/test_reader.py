"""The header reader against the `gguf` package's reader and writer."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import ModelFileError
from ds4.gguf import GGUFFile, QuantType, StringArray
from ds4.gguf.constants import ValueType
from ds4.gguf.reader import MAX_HEADER_BYTES, MAX_KEYS, MAX_STRING_BYTES, MAX_STRINGS, MAX_TENSORS
from tests.gguf.files import FORMATS, File, array, key, scalar, tensor, u32

ROOT = Path(__file__).parents[2]
SMALL = ("small", "version-2", "every-value-type", "every-tensor-type", "alignment-4096")
STORED_FILES = [
    *(ROOT / "fuzz" / "corpus" / "fuzz_gguf" / name for name in SMALL),
    *sorted(ROOT.glob("tests/data/**/*.gguf")),
    *sorted(ROOT.glob("ds4/models/*.gguf")),
]


def write(path, data):
    path.write_bytes(data)
    return path


def assert_reads_like_the_package(path):
    reader = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        fields = {k: v for k, v in reader.fields.items() if not k.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        assert file.version == reader.fields["GGUF.version"].contents()
        assert file.data_offset == reader.data_offset
        assert file.alignment == reader.alignment
        assert file.file_bytes == os.path.getsize(path)
        for name, field in fields.items():
            value = file.metadata[name]
            expected = field.contents()
            if isinstance(value, np.ndarray):
                assert value.dtype == reader.gguf_scalar_to_np[field.types[-1]]
                np.testing.assert_array_equal(value, expected)
            elif isinstance(value, StringArray):
                assert list(value) == expected
            else:
                assert type(value) is type(expected)
                assert value == expected or value != value
        assert list(file.tensors) == [t.name for t in reader.tensors]
        for expected in reader.tensors:
            info = file.tensors[expected.name]
            assert info.name == expected.name
            assert info.ne == tuple(expected.shape.tolist())
            assert info.shape == info.ne[::-1]
            assert int(info.type) == int(expected.tensor_type)
            assert info.offset == expected.data_offset
            assert info.n_bytes == expected.n_bytes == info.row_bytes * info.n_rows
            np.testing.assert_array_equal(
                file.rows(info.name).ravel(), expected.data.reshape(-1).view(np.uint8)
            )


@pytest.mark.parametrize("align", [32, 8, 4096])
def test_a_file_of_the_packages_writer_reads_the_same_in_every_field(tmp_path, align):
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "deepseek4")
    if align != 32:
        writer.add_custom_alignment(align)
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -32768)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 1.5)
    writer.add_float64("a.f64", float("nan"))
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "｜DSML｜")
    writer.add_array("b.numbers", [1, -2, 3])
    writer.add_array("b.floats", [0.5, 1.5])
    writer.add_array("b.bools", [True, False])
    writer.add_array("b.words", ["a", "ž", "x" * 300])
    rng = np.random.default_rng(1)
    writer.add_tensor("f32", rng.standard_normal((3, 5), dtype=np.float32))
    writer.add_tensor("f16", rng.standard_normal((2, 3, 7)).astype(np.float16))
    for kind in (QuantType.Q8_0, QuantType.Q2_K, QuantType.IQ2_XXS, QuantType.MXFP4):
        raw = rng.integers(0, 256, (2, 3, 2 * kind.block_bytes), dtype=np.uint8)
        writer.add_tensor(kind.name, raw, raw_dtype=gguf.GGMLQuantizationType(int(kind)))
    writer.add_tensor("i32", np.arange(6, dtype=np.int32).reshape(1, 1, 2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_reads_like_the_package(path)


def test_arrays_of_every_type_read_the_same_as_by_the_package(tmp_path):
    file = File()
    for kind in FORMATS:
        top = 1 if kind is ValueType.BOOL else 100
        file.with_key(f"array.{kind.name}", array(kind, [0, 1, top]))
        file.with_key(f"scalar.{kind.name}", scalar(kind, 1))
    assert_reads_like_the_package(write(tmp_path / "m.gguf", file.build()))


@pytest.mark.parametrize("path", STORED_FILES, ids=lambda p: p.name)
def test_a_stored_file_reads_the_same_in_every_field(path):
    assert_reads_like_the_package(path)


@settings(max_examples=30, deadline=None)
@given(
    words=st.lists(st.text(max_size=8), max_size=6),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6),
    text=st.text(),
    dims=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_any_values_read_back_as_they_were_written(tmp_path_factory, words, numbers, text, dims):
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    size = 4 * int(np.prod(dims))
    file = File(tensors=[tensor("t", dims, QuantType.F32, 0)], data=bytes(size))
    file.with_key("w", array(ValueType.STRING, words))
    file.with_key("n", array(ValueType.INT64, numbers))
    file.with_key("t", scalar(ValueType.STRING, text))
    with GGUFFile.open(write(path, file.build())) as read:
        assert read.metadata["w"] == words
        assert read.metadata["n"].tolist() == numbers
        assert read.metadata["t"] == text
        assert read.tensors["t"].ne == tuple(dims)
        assert read.rows("t").shape == (size // 4 // dims[0], 4 * dims[0])


def test_version_2_is_read_like_version_3(tmp_path):
    with GGUFFile.open(write(tmp_path / "m.gguf", File(version=u32(2)).build())) as file:
        assert file.version == 2
        assert file.rows("second").shape == (3, 34)


def test_a_file_without_tensors_needs_no_data_section(tmp_path):
    data = File(tensors=[], data=b"").header()
    with GGUFFile.open(write(tmp_path / "m.gguf", data)) as file:
        assert file.tensors == {}
        assert file.metadata["flag"] is True


def test_rows_are_counted_through_the_outer_dimensions_and_cannot_be_written(tmp_path):
    data = bytes(range(2 * 3 * 4))
    file = File(tensors=[tensor("t", [4, 3, 2], QuantType.F16, 0)], data=data * 2)
    with GGUFFile.open(write(tmp_path / "m.gguf", file.build())) as read:
        info = read.tensors["t"]
        assert (info.row_bytes, info.n_rows, info.shape) == (8, 6, (2, 3, 4))
        everything = np.frombuffer(data * 2, np.uint8).reshape(6, 8)
        np.testing.assert_array_equal(read.rows("t"), everything)
        np.testing.assert_array_equal(read.rows("t", 2), everything[2:])
        np.testing.assert_array_equal(read.rows("t", 1, 3), everything[1:4])
        assert read.rows("t", 6).shape == (0, 8)
        assert read.rows("t", 0, 0).shape == (0, 8)
        with pytest.raises(ValueError, match="read-only"):
            read.rows("t")[0, 0] = 1


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 7), (7, None), (6, 1), (2, -1)])
def test_rows_outside_the_tensor_are_refused(tmp_path, first, count):
    file = File(tensors=[tensor("t", [4, 3, 2], QuantType.F16, 0)], data=bytes(48))
    with (
        GGUFFile.open(write(tmp_path / "m.gguf", file.build())) as read,
        pytest.raises(ModelFileError, match=r"rows of tensor t at byte .*within 0 to 6, found"),
    ):
        read.rows("t", first, count)


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    with (
        GGUFFile.open(write(tmp_path / "m.gguf", File().build())) as file,
        pytest.raises(ModelFileError, match="tensor third: expected a tensor, found no such"),
    ):
        file.rows("third")


def test_views_outlive_close_and_a_closed_file_gives_no_new_ones(tmp_path):
    file = GGUFFile.open(write(tmp_path / "m.gguf", File().build()))
    view = file.rows("first")
    file.close()
    file.close()
    assert bytes(view.ravel()) == bytes(range(64))
    with pytest.raises(ValueError, match="closed"):
        file.rows("first")


def test_opening_leaves_no_file_descriptor_behind_after_a_failure(tmp_path):
    good = write(tmp_path / "good.gguf", File().build())
    bad = write(tmp_path / "bad.gguf", File(n_keys=9).build())
    before = len(os.listdir("/proc/self/fd"))
    GGUFFile.open(good).close()
    with pytest.raises(ModelFileError):
        GGUFFile.open(bad)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_string_array_behaves_like_a_list(tmp_path):
    with GGUFFile.open(write(tmp_path / "m.gguf", File().build())) as file:
        words = file.metadata["words"]
    expected = ["a", "", "žluť", "𝔻"]
    assert isinstance(words, StringArray)
    assert len(words) == 4
    assert list(words) == expected
    assert [words[i] for i in range(-4, 4)] == expected + expected
    assert words[1:3] == expected[1:3]
    assert words[::-1] == expected[::-1]
    assert words == expected
    assert words == tuple(expected)
    assert words != [*expected, "b"]
    assert words != "a"
    assert "žluť" in words
    assert words.index("𝔻") == 3
    assert list(reversed(words)) == expected[::-1]
    assert repr(words) == "StringArray(['a', '', 'žluť', ...], n=4)"
    with pytest.raises(IndexError):
        words[4]
    with pytest.raises(IndexError):
        words[-5]


CHILD = """
import re, sys
from pathlib import Path
from ds4.errors import ModelFileError
from ds4.gguf import GGUFFile
try:
    file = GGUFFile.open(sys.argv[1])
    print("opened", len(file.tensors), len(file.metadata))
except ModelFileError as error:
    print("refused", error)
# Not getrusage: its peak is inherited from the parent.
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def open_in_child(path):
    """What opening prints, and the peak memory of the process in MB."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=120,
    )
    said, peak = done.stdout.splitlines()
    return said, int(peak) / 1024


def sparse(path, head, size=80 << 30):
    write(path, head)
    os.truncate(path, size)
    return path


def test_an_80_gib_file_opens_without_touching_its_data(tmp_path):
    rows = (70 << 30) // 4096
    file = File(tensors=[tensor("big", [1024, rows], QuantType.F32, 0)], data=b"")
    path = sparse(tmp_path / "m.gguf", file.build())
    said, peak = open_in_child(path)
    assert said == "opened 1 4"
    assert peak < 100
    with GGUFFile.open(path) as read:
        assert not read.rows("big", rows - 1).any()
    # Data blocks that exist on disk: reading the header must not have filled the hole.
    assert path.stat().st_blocks * 512 < 1 << 20


HOSTILE_SPARSE = {
    "counts": (
        File(n_keys=MAX_KEYS, tensors=[], n_tensors=MAX_TENSORS),
        "key 4 at byte 205: expected a name, found an empty string",
    ),
    "empty strings": (
        File(tensors=[], data=b"").with_key("s", array(ValueType.STRING, b"", MAX_STRINGS)),
        "opened 0 5",
    ),
    "wide strings": (
        File(tensors=[]).with_key(
            "s", array(ValueType.STRING, ["𝔻" * (MAX_STRING_BYTES // 4)] * 3 + [""] * 10**6)
        ),
        "opened 0 5",
    ),
    "2^63 strings": (
        File().with_key("s", array(ValueType.STRING, b"", 2**63)),
        f"key s item count at byte 222: expected at most {MAX_STRINGS}, found {2**63}",
    ),
    "numbers": (
        File().with_key("n", array(ValueType.UINT8, b"", MAX_HEADER_BYTES - 4096)),
        "expected a name, found an empty string",
    ),
    "2^63 numbers": (
        File().with_key("n", array(ValueType.FLOAT64, b"", 2**63)),
        f"key n item count at byte 222: expected at most {(MAX_HEADER_BYTES - 230) // 8}, found",
    ),
    "tensors": (
        File(
            keys=[],
            tensors=[tensor(f"{i}", [1], QuantType.F32, 32 * i) for i in range(MAX_TENSORS)],
        ),
        f"opened {MAX_TENSORS} 0",
    ),
    "keys": (
        File(
            keys=[key(f"{i}", array(ValueType.STRING, [b"a"])) for i in range(MAX_KEYS)],
            tensors=[],
        ),
        f"opened 0 {MAX_KEYS}",
    ),
    "header without end": (
        File(n_keys=6).with_key("n", array(ValueType.UINT8, b"", MAX_HEADER_BYTES - 232)),
        f"key 5 length at byte {MAX_HEADER_BYTES - 2}: expected a header of at most",
    ),
}


@pytest.mark.parametrize(("file", "outcome"), HOSTILE_SPARSE.values(), ids=HOSTILE_SPARSE)
def test_a_hostile_sparse_file_is_settled_below_160_mb(tmp_path, file, outcome):
    said, peak = open_in_child(sparse(tmp_path / "m.gguf", file.build()))
    assert outcome in said
    assert peak < 160  # of which the interpreter and NumPy have 30


def test_a_fifo_is_refused_at_once(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    failures = []

    def attempt():
        try:
            GGUFFile.open(path)
        except ModelFileError as error:
            failures.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert failures == [
        f"{path}: model file: expected a regular file, found a device, pipe or socket"
    ]


def test_the_gguf_package_is_not_imported_at_run_time():
    code = "import sys, ds4.gguf; sys.exit('gguf' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
