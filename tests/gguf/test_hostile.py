"""Every way a file can be wrong gives one error line that says where, and what was expected."""

import os
import re
import struct

import pytest

from ds4.errors import ModelFileError, QuantFormatError, UnsupportedModelError
from ds4.gguf import GGUFFile, QuantType
from ds4.gguf.constants import ValueType
from tests.gguf.files import File, array, key, scalar, string, tensor, u32, u64

F32 = QuantType.F32
LINE = re.compile(
    r"^(?P<path>/.*): (?P<what>.+?)( at byte (?P<offset>\d+))?: expected .+, found .+$"
)


def refusal(path, data=None):
    """The error that opening the file gives, after checking the form of its text."""
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    error = caught.value
    assert "\n" not in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 600
    match = LINE.match(str(error))
    assert match, str(error)
    assert match["path"] == str(path)
    assert error.path == str(path)
    if match["offset"] is not None:
        assert int(match["offset"]) == error.offset <= path.stat().st_size
    return error


def test_every_proper_prefix_of_a_file_is_refused(tmp_path):
    data = File().build()
    for length in range(1, len(data)):
        error = refusal(tmp_path / "m.gguf", data[:length])
        assert type(error) is ModelFileError
        assert error.offset is not None


def test_truncation_at_each_section_boundary_names_the_section(tmp_path):
    file = File()
    whole = file.build()
    at = {"magic": 4, "version": 8, "tensor count": 16, "key count": 24}
    expected = {
        at["magic"]: "version at byte 4: expected 4 bytes, found 0 left in the file",
        at["version"]: "tensor count at byte 8: expected 8 bytes, found 0 left in the file",
        at["tensor count"]: "key count at byte 16: expected 8 bytes, found 0 left in the file",
        at["key count"]: "key count at byte 16: expected at most 0, found 4",
    }
    keys_end = 24 + sum(map(len, file.keys))
    expected[keys_end] = "tensor 0 name length at byte"
    header_end = len(file.header())
    expected[header_end] = "tensor first data at byte"
    data_start = header_end + -header_end % 32
    expected[data_start] = "tensor first data at byte"
    expected[data_start + 64] = "tensor second data at byte"
    expected[len(whole) - 1] = "tensor second data at byte"
    for length, text in expected.items():
        assert text in str(refusal(tmp_path / "m.gguf", whole[:length]))


BAD_FILES = {
    # Counts and lengths
    "2^63 keys": (
        File(n_keys=2**63),
        "key count at byte 16: expected at most .* 9223372036854775808",
    ),
    "2^64-1 tensors": (File(n_tensors=2**64 - 1), "tensor count at byte 8: expected at most"),
    "more keys than there are": (
        File(n_keys=5),
        "tensor 0 name length at byte 224: expected at most 255 bytes, found 562949953421312",
    ),
    "more tensors than there are": (File(n_tensors=3), "tensor 2 name"),
    "key of 2^63 bytes": (
        File(keys=[u64(2**63) + b"abc" + u32(4)]),
        "key 0 length at byte 24: expected at most 65535 bytes, found 9223372036854775808",
    ),
    "key behind the end": (File(keys=[u64(60000) + b"abc"]), "key 0 at byte 32: .* 60000 bytes"),
    "string of 2^63 bytes": (
        File(keys=[key("s", u32(ValueType.STRING) + u64(2**63))]),
        "key s length at byte 37: expected at most 4194304 bytes",
    ),
    "string behind the end": (
        File(keys=[key("s", u32(ValueType.STRING) + u64(5000))]),
        r"key s at byte 45: expected 5000 bytes, found \d+ left in the file",
    ),
    "tensor name of 2^63 bytes": (
        File(tensors=[u64(2**63) + b"abc"] * 9),
        "tensor 0 name length .* at most 255 bytes",
    ),
    "2^63 numbers": (
        File().with_key("n", array(ValueType.INT32, b"", 2**63)),
        "key n item count at byte 222: expected at most",
    ),
    "2^63 strings": (
        File().with_key("n", array(ValueType.STRING, b"", 2**63)),
        "key n item count at byte 222: expected at most",
    ),
    "string in an array of 2^63 bytes": (
        File().with_key("n", array(ValueType.STRING, string("a") + u64(2**63), 2)),
        r"key n\[1\] length at byte 239: expected at most 4194304 bytes, found 92233",
    ),
    "string in an array behind the end": (
        File().with_key("n", array(ValueType.STRING, string("a") + u64(9999), 2)),
        r"key n\[1\] at byte 247: expected 9999 bytes",
    ),
    "string array cut off in a length": (
        File(tensors=[], data=b"", alignment=1).with_key(
            "n", array(ValueType.STRING, string("a") + string("1234567890123456") + b"xyz", 3)
        ),
        r"key n\[2\] length at byte 263: expected 8 bytes, found 3 left in the file",
    ),
    # Types
    "unknown value type": (
        File(keys=[key("k", u32(13) + bytes(8))]),
        "key k type at byte 33: expected a value type of 0 to 12, found 13",
    ),
    "unknown item type": (
        File().with_key("n", array(99, b"\0", 1)),
        "key n items type at byte 218: .* found 99",
    ),
    "nested array": (
        File().with_key("n", u32(9) + u32(9) + u64(1) + u32(4) + u64(1) + u32(7)),
        "key n items at byte 218: expected numbers or strings, found nested arrays",
    ),
    "boolean of 2": (
        File().with_key("b", scalar(ValueType.BOOL, 2)),
        "key b at byte 218: expected 0 or 1 for a boolean, found 2",
    ),
    "boolean of 255 in an array": (
        File().with_key("b", array(ValueType.BOOL, [0, 1, 255])),
        r"key b\[2\] at byte 232: expected 0 or 1 for a boolean, found 255",
    ),
    # Names
    "duplicate key": (
        File().with_key("flag", scalar(ValueType.BOOL, 1)),
        "key flag at byte 205: expected each key once, found it again",
    ),
    "empty key": (
        File().with_key("", scalar(ValueType.BOOL, 1)),
        "key 4 at byte 205: expected a name",
    ),
    "key that is not UTF-8": (
        File().with_key(b"a\xff", scalar(ValueType.BOOL, 1)),
        "key 4 at byte 214: expected UTF-8, found byte 0xff",
    ),
    "string that is not UTF-8": (
        File().with_key("s", scalar(ValueType.STRING, b"\xe2\x82")),
        "key s at byte 226: expected UTF-8, found byte 0xe2",
    ),
    "item that is not UTF-8": (
        File().with_key("s", array(ValueType.STRING, [b"ok", b"a\xc3", b"\xa9"])),
        r"key s\[1\] at byte 249: expected UTF-8, found",
    ),
    "item cut inside a character at the end": (
        File(tensors=[], data=b"").with_key("s", array(ValueType.STRING, [b"\xf0\x9f\x92"])),
        r"key s\[0\] at byte 238: expected UTF-8, found unexpected end of data",
    ),
    "duplicate tensor": (
        File(tensors=[tensor("t", [1], F32, 0), tensor("t", [1], F32, 32)]),
        "tensor t at byte 238: expected each tensor once",
    ),
    "empty tensor name": (File(tensors=[tensor("", [1, 1], F32, 0)]), "tensor 0 name .* a name"),
    "tensor name that is not UTF-8": (
        File(tensors=[tensor(b"\x80", [1, 1], F32, 0)]),
        "tensor 0 name at byte 213: expected UTF-8",
    ),
    "newline and escape codes in a key": (
        File(keys=[key("a\n\x1b[2J\u2028b", u32(77) + bytes(9))]),
        r"key a\\n\\x1b\[2J\\u2028b type at byte .*found 77",
    ),
    "very long key": (
        File(keys=[key("k" * 60000, u32(77))]),
        r"key k{80}\.\.\. type at byte 60032",
    ),
    # Alignment
    "alignment of 0": (
        File().with_key("general.alignment", scalar(ValueType.UINT32, 0)),
        "key general.alignment at byte 230: expected a power of two, found 0",
    ),
    "alignment of 48": (
        File().with_key("general.alignment", scalar(ValueType.UINT32, 48)),
        "key general.alignment .* a power of two, found 48",
    ),
    "alignment of -32": (
        File().with_key("general.alignment", scalar(ValueType.INT32, -32)),
        "key general.alignment .* a power of two, found -32",
    ),
    "alignment as text": (
        File().with_key("general.alignment", scalar(ValueType.STRING, "32")),
        "key general.alignment .* an integer, found a value of type str",
    ),
    "alignment beyond the file": (
        File().with_key("general.alignment", scalar(ValueType.UINT64, 2**63)),
        "tensor first data .* within the file's .* found bytes 9223372036854775808 to",
    ),
    # Shapes and places
    "no dimensions": (
        File(tensors=[tensor("t", [], F32, 0)] * 2),
        "tensor t dimension count at byte 214: expected 1 to 4, found 0",
    ),
    "five dimensions": (
        File(tensors=[tensor("t", [1] * 5, F32, 0)]),
        "tensor t dimension count .* 1 to 4, found 5",
    ),
    "2^32-1 dimensions": (
        File(tensors=[tensor("t", [1, 1], F32, 0, n_dims=2**32 - 1)]),
        "tensor t dimension count .* 1 to 4, found 4294967295",
    ),
    "dimension of 0": (
        File(tensors=[tensor("t", [4, 0], F32, 0)]),
        r"tensor t dimensions at byte 218: expected sizes above 0, found \[4, 0\]",
    ),
    "size that overflows 64 bits": (
        File(tensors=[tensor("t", [2**63, 2], F32, 0)]),
        "tensor t data .* within the file's .* found bytes",
    ),
    "size that wraps around to a small one": (
        File(tensors=[tensor("t", [2**32, 2**32, 1, 1], F32, 0)]),
        "tensor t data .* within the file's",
    ),
    "offset outside the file": (
        File(tensors=[tensor("t", [1], F32, 1 << 20)]),
        "tensor t data .* within the file's",
    ),
    "offset near 2^64": (
        File(tensors=[tensor("t", [1], F32, 2**64 - 32)]),
        "tensor t data .* within the file's",
    ),
    "offset that is not aligned": (
        File(tensors=[tensor("t", [1], F32, 4)]),
        "tensor t data at byte 205: expected an offset that is a multiple of 32, found 4",
    ),
    "tensors that overlap": (
        File(tensors=[tensor("a", [16], F32, 0), tensor("b", [8], F32, 32)]),
        r"tensor b data at byte 320: expected an offset from 352 on, behind tensor a, found 320",
    ),
    "tensors that overlap, listed the other way round": (
        File(tensors=[tensor("b", [8], F32, 32), tensor("a", [16], F32, 0)]),
        "tensor b data .* behind tensor a",
    ),
    "two tensors in one place": (
        File(tensors=[tensor("a", [8], F32, 0), tensor("b", [8], F32, 0)]),
        "tensor b data .* behind tensor a",
    ),
    # Container
    "version 1": (File(version=u32(1)), "version at byte 4: expected GGUF version 2 or 3, found 1"),
    "version 4": (File(version=u32(4)), "version .* 2 or 3, found 4"),
    "version 0": (File(version=u32(0)), "version .* 2 or 3, found 0"),
    "other magic": (File(magic=b"GGML"), "magic at byte 0: expected b'GGUF', found b'GGML'"),
}


@pytest.mark.parametrize(("file", "text"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_malformed_file_is_refused_with_place_expected_and_found(tmp_path, file, text):
    error = refusal(tmp_path / "m.gguf", file.build())
    assert type(error) is ModelFileError
    assert error.offset is not None
    assert re.search(text, str(error)), str(error)


@pytest.mark.parametrize("kind", [2, 14, 28, 40, 41])
def test_a_type_of_ggml_that_ds4_does_not_run_is_unsupported_and_named(tmp_path, kind):
    error = refusal(tmp_path / "m.gguf", File(tensors=[tensor("t", [256], kind, 0)]).build())
    assert type(error) is UnsupportedModelError
    assert re.search(
        rf"tensor t type at byte 226: expected one of F32.*\w+ \(type {kind}\)", str(error)
    )


@pytest.mark.parametrize("kind", [4, 5, 31, 38, 42, 2**32 - 1])
def test_a_type_that_ggml_does_not_know_is_refused_by_number(tmp_path, kind):
    error = refusal(tmp_path / "m.gguf", File(tensors=[tensor("t", [256], kind, 0)]).build())
    assert type(error) is ModelFileError
    assert str(error).endswith(f"found unknown type {kind}")


@pytest.mark.parametrize(
    ("kind", "row"),
    [(QuantType.Q8_0, 33), (QuantType.Q2_K, 128), (QuantType.IQ2_XXS, 255), (QuantType.MXFP4, 1)],
)
def test_a_row_that_is_not_whole_blocks_is_a_quant_format_error(tmp_path, kind, row):
    error = refusal(tmp_path / "m.gguf", File(tensors=[tensor("t", [row, 256], kind, 0)]).build())
    assert type(error) is QuantFormatError
    text = f"tensor t row at byte 218: expected a multiple of {kind.block_elements} elements"
    assert f"{text} for {kind.name}, found {row}" in str(error)


def test_a_big_endian_file_is_named_as_such(tmp_path):
    data = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    error = refusal(tmp_path / "m.gguf", data)
    assert type(error) is UnsupportedModelError
    assert "byte order at byte 4: expected a little-endian file, found a big-endian one" in str(
        error
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "expected a GGUF file, found an empty file"),
        (b"GG", "magic at byte 0: expected 4 bytes, found 2 left in the file"),
        (b"PK\x03\x04" + bytes(100), r"magic at byte 0: expected b'GGUF', found b'PK\x03\x04'"),
        (bytes(1000), r"magic at byte 0: expected b'GGUF', found b'\x00\x00\x00\x00'"),
    ],
    ids=["empty", "two bytes", "a zip archive", "zeros"],
)
def test_a_file_of_another_kind_is_refused(tmp_path, data, text):
    assert text in str(refusal(tmp_path / "m.gguf", data))


def test_a_missing_file_is_a_model_file_error(tmp_path):
    error = refusal(tmp_path / "none.gguf")
    assert str(error).endswith("expected a readable file, found No such file or directory")
    assert isinstance(error.__cause__, FileNotFoundError)


def test_a_directory_is_a_model_file_error(tmp_path):
    assert "expected a GGUF file, found a directory" in str(refusal(tmp_path))


def test_a_file_below_a_file_and_a_loop_of_links_are_model_file_errors(tmp_path):
    (tmp_path / "plain").write_bytes(b"x")
    assert "Not a directory" in str(refusal(tmp_path / "plain" / "m.gguf"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "symbolic links" in str(refusal(tmp_path / "loop"))


def test_a_path_with_a_nul_is_a_model_file_error():
    with pytest.raises(ModelFileError, match="expected a path, found embedded null byte"):
        GGUFFile.open("/tmp/a\0b")


def test_an_unreadable_file_is_a_model_file_error(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(File().build())

    def refuse(*_):  # the tests may run as root, whom permissions do not stop
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert str(refusal(path)).endswith("expected a readable file, found Permission denied")


def test_bytes_behind_the_last_tensor_are_no_error(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(File().build() + b"trailer")
    with GGUFFile.open(path) as file:
        assert list(file.tensors) == ["first", "second"]


def test_a_path_with_a_newline_and_two_spaces_stays_one_recognisable_line(tmp_path):
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(tmp_path / "a\nb  c.gguf")
    assert str(caught.value).startswith(f"{tmp_path}/a\\nb  c.gguf: model file: expected")
    assert caught.value.path == f"{tmp_path}/a\nb  c.gguf"


def test_a_very_long_value_is_cut_in_the_error_text():
    text = str(ModelFileError("m.gguf", "key k", expected="a number", found="x\n\0" * 10**6))
    assert len(text) < 1000
    assert text.isprintable()
    assert text.startswith("m.gguf: key k: expected a number, found x \\x00x \\x00")
    assert text.endswith("...")
