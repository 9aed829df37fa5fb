import re
import sys
import time
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from ds4.errors import InvalidRequest, ModelFileError
from ds4.model.tokenizer import PRE_TOKENIZERS, StreamDecoder, Tokenizer
from tests.model.tiny_vocabulary import METADATA, PROMPTS, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SPECIAL_TEXTS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
]
# Characters that Python's own (older) table knows: the libraries compared may know newer ones.
KNOWN = st.characters(exclude_categories=["Cs", "Cn"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
CODEY = st.text(st.sampled_from(" \t\r\n\u00a0\u3000aZé1２今は.'`~$€_<>/｜DSML🚀\u0301"))
SPECIAL_MIX = st.lists(
    st.sampled_from([*SPECIAL_TEXTS, "a", " ", "<", "｜", "DSML", "think>"])
).map("".join)

BYTE_CHARACTERS = {}
for _b in [*range(33, 127), *range(161, 173), *range(174, 256)]:
    BYTE_CHARACTERS[_b] = chr(_b)
for _b in range(256):
    if _b not in BYTE_CHARACTERS:
        BYTE_CHARACTERS[_b] = chr(256 + sum(1 for b in BYTE_CHARACTERS.values() if ord(b) > 255))


# The published passes, written down apart from the module's own patterns.
REFERENCE_PASSES = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+"
    r"|[^\p{L}\p{P}\p{S}\n\r]?[\p{M}\p{L}]+"
    r"|[ ]?[\p{S}\p{P}]+[\n\r]*"
    r"|\s*[\n\r]+|\s+(?!\S)|\s+",
)


def reference_pieces(text: str) -> list[str]:
    """The three passes with the `regex` module; matches and gaps both become pieces."""
    pieces = [text]
    for pattern in REFERENCE_PASSES:
        again = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece, flags=regex.V0):
                again += [piece[at : match.start()], match.group()]
                at = match.end()
            again.append(piece[at:])
        pieces = [piece for piece in again if piece]
    return pieces


def reference_ids(text: str) -> list[int]:
    """BPE as its definition says it: merge the lowest-ranked pair, leftmost first, repeat."""
    ids = {token: i for i, token in enumerate(METADATA["tokenizer.ggml.tokens"])}
    rank = {tuple(m.split(" ")): r for r, m in enumerate(METADATA["tokenizer.ggml.merges"])}
    out = []
    for piece in reference_pieces(text):
        symbols = [BYTE_CHARACTERS[b] for b in piece.encode("utf-8")]
        while True:
            pairs = [(rank[p], i) for i, p in enumerate(pairwise(symbols)) if p in rank]
            if not pairs:
                break
            _, i = min(pairs)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        out += [ids[s] for s in symbols]
    return out


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: repr(p["text"][:30]))
def test_prompts_of_the_test_models_have_the_ids_llama_cpp_gives(prompt):
    assert TOKENIZER.encode(prompt["text"], special=True) == prompt["ids"]
    assert TOKENIZER.decode(prompt["ids"]) == prompt["text"]


@given(TEXT | CODEY | SPECIAL_MIX, st.booleans())
def test_decoding_what_was_encoded_gives_the_text_back(text, special):
    assert TOKENIZER.decode(TOKENIZER.encode(text, special=special)) == text


@given(st.text(KNOWN) | CODEY)
def test_ids_equal_those_of_bpe_done_by_its_definition(text):
    assert TOKENIZER.encode(text, special=False) == reference_ids(text)


@pytest.mark.parametrize("category", ["L", "M", "N", "P", "S"])
def test_the_regex_engine_knows_every_general_category_that_python_knows(category):
    known = [
        c
        for c in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(c) not in {"Cn", "Cs"}
    ]
    split = Split(Regex(rf"\p{{{category}}}+"), behavior="removed")
    outside = set()
    for piece, _ in split.pre_tokenize_str("".join(known)):
        outside.update(piece)
    assert outside == {c for c in known if unicodedata.category(c)[0] != category}


@given(SPECIAL_MIX | TEXT)
def test_untrusted_text_never_yields_a_special_id(text):
    assert not any(TOKENIZER.is_control(i) for i in TOKENIZER.encode(text, special=False))


@given(SPECIAL_MIX)
def test_special_matching_maps_exactly_the_special_strings(text):
    ids = TOKENIZER.encode(text, special=True)
    spans = re.split("(" + "|".join(map(re.escape, SPECIAL_TEXTS)) + ")", text)
    expected = []
    for index, span in enumerate(spans):
        if index % 2:
            expected.append(METADATA["tokenizer.ggml.tokens"].index(span))
        else:
            expected += TOKENIZER.encode(span, special=False)
    assert ids == expected


@given(st.lists(st.integers(0, TOKENIZER.n_vocab - 1)))
def test_a_stream_gives_the_same_text_as_decoding_at_once(ids):
    stream = StreamDecoder(TOKENIZER)
    parts = [stream.feed(i) for i in ids]
    assert "".join(parts) + stream.flush() == TOKENIZER.decode(ids)


@given(TEXT)
def test_a_stream_of_valid_text_never_shows_half_a_character(text):
    stream = StreamDecoder(TOKENIZER)
    shown = ""
    for i in TOKENIZER.encode(text, special=False):
        shown += stream.feed(i)
        assert text.startswith(shown)
    assert shown == text
    assert stream.flush() == ""


def test_special_tokens_keep_their_literal_bytes():
    for text in SPECIAL_TEXTS:
        (token,) = TOKENIZER.encode(text, special=True)
        assert TOKENIZER.token_bytes(token) == text.encode("utf-8")
        assert TOKENIZER.is_control(token)
        assert TOKENIZER.special_id(text) == token
    assert TOKENIZER.special_id("Hello") is None
    assert TOKENIZER.special.dsml == TOKENIZER.special_id("｜DSML｜")
    assert TOKENIZER.special.latest_reminder is None


def test_every_byte_is_one_token_and_tokens_may_end_inside_a_character():
    pieces = [TOKENIZER.token_bytes(i) for i in TOKENIZER.encode("🚀", special=False)]
    assert len(pieces) > 1
    assert b"".join(pieces).decode("utf-8") == "🚀"


def test_a_lone_surrogate_is_refused_with_its_place():
    with pytest.raises(InvalidRequest, match=r"U\+D83D at index 2"):
        TOKENIZER.encode("ab\ud83dc", special=False)


@pytest.mark.parametrize("token", [-1, 768])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(InvalidRequest, match=f"from 0 to 767, got {token}"):
        TOKENIZER.decode([0, token])


def test_the_latest_reminder_token_is_found_when_the_vocabulary_has_it():
    tokens = [*METADATA["tokenizer.ggml.tokens"], "<｜latest_reminder｜>"]
    types = [*METADATA["tokenizer.ggml.token_type"], 4]
    made = Tokenizer.from_metadata(
        "f",
        METADATA
        | {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
            "deepseek4.vocab_size": 769,
        },
    )
    assert made.special.latest_reminder == 768
    assert made.is_control(768)


def _tokens_with(index: int, text: str) -> list[str]:
    tokens = list(METADATA["tokenizer.ggml.tokens"])
    tokens[index] = text
    return tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model: expected 'gpt2', found 'llama'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model: expected 'gpt2', found nothing"),
        ({"tokenizer.ggml.pre": "glm4"}, "'joyai-llm', found 'glm4'"),
        ({"tokenizer.ggml.pre": 3}, "found 3"),
        ({"tokenizer.ggml.tokens": None}, "expected an array of strings, found nothing"),
        ({"tokenizer.ggml.tokens": "abc"}, "expected an array of strings, found str"),
        ({"tokenizer.ggml.tokens": []}, "at least one string"),
        ({"tokenizer.ggml.tokens": ["a", 1]}, r"tokens\[1\]: expected a string, found int"),
        ({"tokenizer.ggml.merges": None}, "merges: expected an array of strings"),
        ({"tokenizer.ggml.merges": ["in"]}, r"merges\[0\]: expected two tokens .* found 'in'"),
        ({"tokenizer.ggml.merges": ["i n", "i  n"]}, r"merges\[1\]: expected two tokens"),
        ({"tokenizer.ggml.merges": ["i Ġzz"]}, r"merges\[0\]: .*'Ġzz' is not"),
        ({"tokenizer.ggml.merges": ["x x"]}, r"merges\[0\]: .*'xx' is not"),
        ({"tokenizer.ggml.token_type": [1, 2]}, r"expected 768 integers, found shape \(2,\)"),
        ({"tokenizer.ggml.token_type": [1.0] * 768}, "expected 768 integers"),
        ({"deepseek4.vocab_size": 769}, "expected 769 tokens, as deepseek4.vocab_size says"),
        (
            {"tokenizer.ggml.tokens": _tokens_with(700, "in")},
            r"tokens\[263\].*'in' again as token 700",
        ),
        ({"tokenizer.ggml.tokens": _tokens_with(3, "!!!!")}, r"none for byte 33 \('!'\)"),
        ({"tokenizer.ggml.tokens": _tokens_with(762, "a今")}, r"tokens\[762\].*byte-level.*'今'"),
        ({"tokenizer.ggml.tokens": _tokens_with(2, "\ud800｜")}, r"tokens\[2\].*lone surrogates"),
        ({"tokenizer.ggml.tokens": _tokens_with(765, "<thinks>")}, "special token '<think>'"),
        ({"tokenizer.ggml.eos_token_id": 2}, "eos_token_id: expected 1, .* found 2"),
    ],
)
def test_damaged_metadata_is_refused_by_name(change: dict[str, object], message: str):
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_metadata("broken.gguf", METADATA | change)


@pytest.mark.parametrize("value", [np.array([0, 1]), np.array([0]), np.array([]), [], True, "0"])
@pytest.mark.parametrize("name", ["tokenizer.ggml.bos_token_id", "deepseek4.vocab_size"])
def test_what_is_no_number_where_one_belongs_is_refused_by_name(name, value):
    changed = METADATA | {"general.architecture": "deepseek4", name: value}
    with pytest.raises(ModelFileError, match=name.rpartition(".")[2]):
        Tokenizer.from_metadata("broken.gguf", changed)


def test_token_types_are_optional():
    bare = {k: v for k, v in METADATA.items() if k != "tokenizer.ggml.token_type"}
    # Without types the pad token is known by its bar alone.
    made = Tokenizer.from_metadata("f", bare)
    assert made.encode("<｜▁pad▁｜>x<think>", special=True) == TOKENIZER.encode(
        "<｜▁pad▁｜>x<think>", special=True
    )


def full_size_metadata(n_vocab: int) -> dict[str, object]:
    """A vocabulary of the released models' size: every token is an earlier one plus one byte."""
    specials = [t for t in SPECIAL_TEXTS if t != "<｜▁pad▁｜>"]
    tokens = [BYTE_CHARACTERS[b] for b in range(256)]
    known, merges, parent = set(tokens), [], 0
    while len(tokens) < n_vocab - len(specials):
        for b in range(256):
            token = tokens[parent] + BYTE_CHARACTERS[b]
            if token not in known and len(tokens) < n_vocab - len(specials):
                known.add(token)
                merges.append(f"{tokens[parent]} {BYTE_CHARACTERS[b]}")
                tokens.append(token)
        parent += 1
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": tokens + specials,
        "tokenizer.ggml.merges": merges,
    }


def test_a_vocabulary_of_full_size_builds_quickly():
    metadata = full_size_metadata(129_280)
    start = time.process_time()
    made = Tokenizer.from_metadata("f", metadata)
    elapsed_s = time.process_time() - start
    assert made.n_vocab == 129_280
    assert made.decode(made.encode("the harbour", special=False)) == "the harbour"
    # Measured 0.5 s on two shared cores; the bound only catches quadratic building.
    assert elapsed_s < 10


@pytest.mark.parametrize("unit", [" ", "a", "\n", "7", " \t", "é", "｜", "<"])
def test_long_runs_of_one_character_take_linear_time(unit):
    text = unit * (300_000 // len(unit)) + "x"
    start = time.process_time()
    ids = TOKENIZER.encode(text, special=True)
    elapsed_s = time.process_time() - start
    assert TOKENIZER.decode(ids) == text
    assert elapsed_s < 10  # measured under 1 s; quadratic behaviour takes minutes


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(st.text(KNOWN, max_size=60))
def test_random_unicode_agrees_with_the_reference_at_length(text):
    assert TOKENIZER.encode(text, special=False) == reference_ids(text)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize("mark", "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
def test_an_ascii_mark_joins_the_letters_behind_it(name, mark):
    passes = [Split(Regex(p), behavior="isolated") for p in PRE_TOKENIZERS[name]]
    pieces = Sequence(passes).pre_tokenize_str(f"1{mark}ab 今{mark}é")
    assert [piece for piece, _ in pieces] == ["1", f"{mark}ab", " ", "今", mark, "é"]
