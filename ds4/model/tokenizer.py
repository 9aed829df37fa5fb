r"""Byte-level BPE tokenizer built from a GGUF file's own vocabulary and merges.

Invariants: `decode(encode(text, special=False)) == text` for every text, and text encoded with
`special=False` never yields a special token's id, whatever it spells. This module knows nothing of
roles or prompt layout (`ds4.model.chat`) and opens no file.

Source: GGUF keys `tokenizer.ggml.*`; the three pre-tokenizer passes are those of the model's
published tokenizer, each re-splitting the pieces of the pass before it. Hugging Face `tokenizers`
runs them; Oniguruma's `\p{..}` classes are true Unicode categories, as the passes require.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np
from tokenizers import Regex
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Passes

from ds4.errors import InvalidRequest, ModelFileError

__all__ = ["PRE_TOKENIZERS", "SpecialTokens", "StreamDecoder", "Tokenizer"]

_ASCII_MARKS = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"
_DEEPSEEK_PASSES = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"[{_ASCII_MARKS}][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+",
)
PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "joyai-llm": _DEEPSEEK_PASSES,
    "deepseek-v3": _DEEPSEEK_PASSES,
    "hunyuan-dense": _DEEPSEEK_PASSES,
}
"""`tokenizer.ggml.pre` to its regular expressions, applied in order, in Oniguruma syntax."""

# GGUF token types.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_BAR = "｜"  # U+FF5C appears in special tokens only: as bytes it maps to three other characters.


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character to byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in = {chr(b): b for b in printable}
    hidden = [b for b in range(256) if b not in set(printable)]
    stand_in.update({chr(256 + i): b for i, b in enumerate(hidden)})
    return stand_in


_BYTE_OF = _byte_alphabet()


@attrs.frozen(kw_only=True)
class SpecialTokens:
    """Ids of the tokens that prompts and outputs are structured by, looked up by their text.

    Attributes:
      bos: begins every prompt.
      eos: ends every assistant turn; generation stops on it.
      user: opens a user turn.
      assistant: opens an assistant turn.
      think: opens reasoning.
      end_think: closes reasoning.
      dsml: the marker inside every tool-call tag.
      latest_reminder: opens a reminder; None in vocabularies that lack it.
    """

    bos: int
    eos: int
    user: int
    assistant: int
    think: int
    end_think: int
    dsml: int
    latest_reminder: int | None = None


_SPECIAL_TEXT = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "user": "<｜User｜>",
    "assistant": "<｜Assistant｜>",
    "think": "<think>",
    "end_think": "</think>",
    "dsml": "｜DSML｜",
    "latest_reminder": "<｜latest_reminder｜>",
}
_OPTIONAL = {"latest_reminder"}


def _strings(path: str, metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        found = "nothing" if value is None else type(value).__name__
        raise ModelFileError(path, key, expected="an array of strings", found=found)
    items = list(value)
    if not items:
        raise ModelFileError(path, key, expected="at least one string", found="an empty array")
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise ModelFileError(
                path, f"{key}[{index}]", expected="a string", found=type(item).__name__
            )
    return items


def _choice(path: str, metadata: Mapping[str, object], key: str, accepted: Iterable[str]) -> str:
    value = metadata.get(key)
    names = sorted(accepted)
    if not isinstance(value, str) or value not in names:
        found = "nothing" if value is None else repr(value)
        raise ModelFileError(path, key, expected=" or ".join(map(repr, names)), found=found)
    return value


def _token_types(path: str, metadata: Mapping[str, object], n_vocab: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    value = metadata.get(key)
    if value is None:
        return [_NORMAL] * n_vocab
    types = np.asarray(value)
    if types.shape != (n_vocab,) or not np.issubdtype(types.dtype, np.integer):
        raise ModelFileError(
            path,
            key,
            expected=f"{n_vocab} integers",
            found=f"shape {types.shape} of {types.dtype}",
        )
    return [int(t) for t in types]


def _merge_pairs(
    path: str, merges: Sequence[str], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    pairs = []
    for rank, text in enumerate(merges):
        # Byte-level tokens hold no space (byte 32 is written U+0120), so one space separates.
        left, space, right = text.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelFileError(
                path,
                f"tokenizer.ggml.merges[{rank}]",
                expected="two tokens separated by one space",
                found=repr(text),
            )
        for token in (left, right, left + right):
            if token not in vocab:
                raise ModelFileError(
                    path,
                    f"tokenizer.ggml.merges[{rank}]",
                    expected="parts and result in the vocabulary",
                    found=f"{token!r} is not",
                )
        pairs.append((left, right))
    return pairs


class Tokenizer:
    """Text to token ids and back.

    Build it with `from_metadata`. Immutable afterwards and safe to share between threads.

    Attributes:
      special: ids of the structural tokens.
      n_vocab: number of token ids.
    """

    special: SpecialTokens
    n_vocab: int

    def __init__(
        self,
        *,
        model: HuggingFaceTokenizer,
        token_bytes: Sequence[bytes],
        special: SpecialTokens,
        special_ids: Mapping[str, int],
        control: frozenset[int],
    ) -> None:
        self._model = model
        self._bytes = tuple(token_bytes)
        self._special_ids = dict(special_ids)
        self._control = control
        self.special = special
        self.n_vocab = len(self._bytes)
        # Longest first, so that at one place the longest special string wins.
        names = sorted(self._special_ids, key=lambda text: (-len(text), text))
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")")

    @classmethod
    def from_metadata(cls, path: str, metadata: Mapping[str, object]) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes.

        Args:
          path: the file, for error messages only.
          metadata: the file's key-value pairs. Reads `tokenizer.ggml.{model, pre, tokens,
            token_type, merges, bos_token_id, eos_token_id}` and, where present,
            `{general.architecture}.vocab_size`.

        Raises:
          ModelFileError: a key is missing or malformed, the tokenizer kind is not one that ds4
            runs, tokens repeat, a merge is not made of known tokens, one of the 256 byte tokens or
            of the structural tokens is missing, or the counts disagree.
        """
        _choice(path, metadata, "tokenizer.ggml.model", ["gpt2"])
        pre = _choice(path, metadata, "tokenizer.ggml.pre", PRE_TOKENIZERS)
        tokens = _strings(path, metadata, "tokenizer.ggml.tokens")
        merges = _strings(path, metadata, "tokenizer.ggml.merges")
        types = _token_types(path, metadata, len(tokens))

        size_key = f"{metadata.get('general.architecture')}.vocab_size"
        vocab_size = metadata.get(size_key)
        if vocab_size is not None and not _is_number(vocab_size, len(tokens)):
            raise ModelFileError(
                path,
                "tokenizer.ggml.tokens",
                expected=f"{vocab_size} tokens, as {size_key} says",
                found=len(tokens),
            )
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            again = next(i for i, token in enumerate(tokens) if vocab[token] != i)
            raise ModelFileError(
                path,
                f"tokenizer.ggml.tokens[{again}]",
                expected="every token once",
                found=f"{tokens[again]!r} again as token {vocab[tokens[again]]}",
            )
        for character, byte in _BYTE_OF.items():
            if character not in vocab:
                raise ModelFileError(
                    path,
                    "tokenizer.ggml.tokens",
                    expected="a token for each of the 256 bytes",
                    found=f"none for byte {byte} ({character!r})",
                )
        special = _special_tokens(path, metadata, vocab)
        named = {i for i in attrs.astuple(special) if i is not None}
        literal = {
            i
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if i in named or kind in (_CONTROL, _USER_DEFINED) or _BAR in token
        }
        control = {i for i in literal if types[i] == _CONTROL or _BAR in tokens[i]} | named
        token_bytes = [
            _token_bytes(path, i, token, types[i], literal=i in literal)
            for i, token in enumerate(tokens)
        ]
        model = HuggingFaceTokenizer(BPE(vocab=vocab, merges=_merge_pairs(path, merges, vocab)))
        model.pre_tokenizer = _pre_tokenizer(PRE_TOKENIZERS[pre])
        return cls(
            model=model,
            token_bytes=token_bytes,
            special=special,
            special_ids={tokens[i]: i for i in literal},
            control=frozenset(control),
        )

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Encode text.

        Args:
          text: any text without lone surrogates.
          special: True splits the text at special-token strings first and maps those to their ids,
            for text written by ds4 or by the operator. False treats all of it as ordinary text, for
            text from users, tools and clients: no special id can come out.

        Raises:
          InvalidRequest: the text holds a lone surrogate; names its index.
        """
        _check_text(text)
        if not special:
            return self._encode_span(text)
        ids: list[int] = []
        for span, token in self.split_special(text):
            ids.extend(self._encode_span(span) if token is None else [token])
        return ids

    def split_special(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Split text at special-token strings, longest match first.

        Yields:
          Each special string with its id and, in place, each non-empty span between with None.
        """
        # The pattern is one group: odd items are special strings, even ones the spans between.
        for index, span in enumerate(self._special_pattern.split(text)):
            if index % 2:
                yield span, self._special_ids[span]
            elif span:
                yield span, None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
          InvalidRequest: an id outside the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Exact bytes of one token. They may begin or end inside a UTF-8 character.

        Raises:
          InvalidRequest: an id outside the vocabulary.
        """
        if not 0 <= token < self.n_vocab:
            raise InvalidRequest(f"token id must be from 0 to {self.n_vocab - 1}, got {token}")
        return self._bytes[token]

    def is_control(self, token: int) -> bool:
        """Whether a token structures the stream instead of being part of its text."""
        return token in self._control

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The strings that `encode` with `special` recognises."""
        return tuple(self._special_ids)

    def special_id(self, text: str) -> int | None:
        """Id of the special token spelled `text`, or None."""
        return self._special_ids.get(text)

    def _encode_span(self, text: str) -> list[int]:
        return list(self._model.encode(text, add_special_tokens=False).ids)


class StreamDecoder:
    """Turns token ids into text as they come, never splitting a character.

    The concatenation of everything returned equals `Tokenizer.decode` of all ids fed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Return the characters that `token` completes; empty while one is still incomplete.

        Raises:
          InvalidRequest: an id outside the vocabulary.
        """
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """Return what is left at the end of a stream (an unfinished character becomes U+FFFD)."""
        return self._decoder.decode(b"", final=True)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"text holds a lone surrogate U+{ord(text[error.start]):04X} at index {error.start}"
        ) from error


def _pre_tokenizer(passes: Sequence[str]) -> PreTokenizer:
    steps: list[PreTokenizer] = [Split(Regex(p), behavior="isolated") for p in passes]
    return Passes([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


def _is_number(value: object, expected: int | None) -> bool:
    """Whether a metadata value is this integer; an array, which cannot be compared, is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value == expected


def _special_tokens(
    path: str, metadata: Mapping[str, object], vocab: Mapping[str, int]
) -> SpecialTokens:
    ids = {name: vocab.get(text) for name, text in _SPECIAL_TEXT.items()}
    for name, token in ids.items():
        if token is None and name not in _OPTIONAL:
            raise ModelFileError(
                path,
                "tokenizer.ggml.tokens",
                expected=f"the special token {_SPECIAL_TEXT[name]!r}",
                found="no such token",
            )
    for name in ("bos", "eos"):
        key = f"tokenizer.ggml.{name}_token_id"
        claimed = metadata.get(key)
        if claimed is not None and not _is_number(claimed, ids[name]):
            raise ModelFileError(
                path, key, expected=f"{ids[name]}, the id of {_SPECIAL_TEXT[name]!r}", found=claimed
            )
    return SpecialTokens(**ids)  # type: ignore[arg-type]  # None only where optional, checked above


def _token_bytes(path: str, index: int, token: str, kind: int, *, literal: bool) -> bytes:
    try:
        if not literal:
            return bytes([_BYTE_OF[character] for character in token])
    except KeyError as error:
        if kind == _NORMAL:
            raise ModelFileError(
                path,
                f"tokenizer.ggml.tokens[{index}]",
                expected="byte-level characters only",
                found=f"{token!r}, which holds {error.args[0]!r}",
            ) from error
    try:
        return token.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ModelFileError(
            path,
            f"tokenizer.ggml.tokens[{index}]",
            expected="text without lone surrogates",
            found=ascii(token),
        ) from error
