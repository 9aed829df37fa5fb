"""Text preparation for the bundled model: tokenizer, held-out split, chat examples.

The input is one plain text file: a paragraph a line, an empty line between paragraphs, a line
`<|book|>` between books. Everything here is deterministic for a given seed.

Layouts produced (B, E, U, A stand for the begin, end, user and assistant tokens):

* plain: `B book E B book E ...` as one stream, with the offsets where a paragraph starts;
* chat: `B [system] U request A <think> plan </think> answer E [U request A </think> answer E]`,
  or `</think>` straight after `A` when thinking is off.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
HEAD_SPECIALS = (BOS, EOS, PAD)
TAIL_SPECIALS = (USER, ASSISTANT, THINK, END_THINK, "｜DSML｜", "<｜latest_reminder｜>")

# The three passes of the `joyai-llm` pre-tokenizer; each splits the pieces of the one before.
_PASSES = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

# Words a request may name, most specific first; a request only uses words its answer contains.
SUBJECTS = [
    "mermaid",
    "giant",
    "dragon",
    "witch",
    "fairy",
    "dwarf",
    "ogre",
    "wizard",
    "princess",
    "prince",
    "king",
    "queen",
    "emperor",
    "tailor",
    "miller",
    "soldier",
    "fisherman",
    "shepherd",
    "woodcutter",
    "huntsman",
    "robber",
    "sailor",
    "merchant",
    "farmer",
    "beggar",
    "goblin",
    "elf",
    "fox",
    "crow",
    "wolf",
    "lion",
    "bear",
    "mouse",
    "cat",
    "dog",
    "frog",
    "goose",
    "swan",
    "duck",
    "raven",
    "nightingale",
    "sparrow",
    "eagle",
    "stork",
    "hen",
    "cock",
    "horse",
    "donkey",
    "ass",
    "ox",
    "goat",
    "sheep",
    "lamb",
    "pig",
    "hare",
    "rabbit",
    "tortoise",
    "serpent",
    "snake",
    "bee",
    "ant",
    "fish",
    "monkey",
    "bird",
    "castle",
    "forest",
    "garden",
    "palace",
    "sea",
    "mountain",
    "river",
    "ring",
    "rose",
    "tree",
    "mill",
    "ship",
    "mother",
    "father",
    "sister",
    "brother",
    "stepmother",
    "old woman",
    "old man",
    "little girl",
    "little boy",
    "maiden",
    "daughter",
    "son",
    "child",
    "servant",
]

SYSTEMS = (
    "You are a helpful assistant",
    "You are a helpful assistant.",
    "You are a storyteller.",
    "You tell fairy tales.",
    "You are a kind old storyteller. Answer with a short tale.",
)
ASK_ONE = (
    "Tell me a story about {a}.",
    "Tell me a story about {a}",
    "Tell me a tale about {a}.",
    "Tell me a fairy tale about {a}.",
    "Can you tell me a story about {a}?",
    "Please tell me about {a}.",
    "I would like to hear about {a}.",
    "Write a short story about {a}.",
    "A story about {a}, please.",
)
ASK_TWO = (
    "Tell me a story about {a} and {b}.",
    "Tell me a story about {a} and {b}",
    "Tell me a tale of {a} and {b}.",
    "Write a fairy tale about {a} and {b}.",
    "Do you know the story of {a} and {b}?",
)
ASK_ANY = (
    "Tell me a story.",
    "Tell me a story",
    "Tell me a fairy tale.",
    "Once upon a time",
    "Write me a short tale.",
    "Do you know a story?",
    "What shall we read tonight?",
    "Please tell me a tale.",
    "I cannot sleep.",
)
ASK_MORE = (
    "Go on.",
    "What happened next?",
    "And then?",
    "Tell me more.",
    "Please go on with the story.",
    "What happened then?",
)
GREETINGS = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi there!",
    "Good morning.",
    "Good evening!",
    "Hey",
    "Hello, how are you?",
)
GREETING_REPLIES = (
    "Good day to you! Sit down by the fire, and I will tell you a story.",
    "Good evening, my dear! Would you like to hear a story?",
    "Welcome, dear child! I was just thinking of a tale.",
)
WHO = ("Who are you?", "What are you?", "What can you do?", "What is your name?")
WHO_REPLIES = (
    "I am a very small storyteller, and I know a great many old tales.",
    "I am only a little teller of tales. Ask me for a story, and I will tell you one.",
)


@dataclass(frozen=True)
class Passage:
    """A few whole paragraphs of one book, in reading order; `more` is what follows them."""

    text: str
    more: str
    title: str


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE: specials, 256 byte tokens, merges, then the chat specials last."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in _PASSES]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAIL_SPECIALS),
        special_tokens=list(HEAD_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(text.split("\n\n"), trainer)
    tok.add_special_tokens(list(TAIL_SPECIALS))
    if tok.get_vocab_size() != vocab_size:
        raise ValueError(f"the text gave {tok.get_vocab_size()} tokens, not {vocab_size}")
    return tok


def split_books(text: str, block_chars: int, every: int) -> tuple[list[list[str]], list[str]]:
    """Cut every book into blocks of whole paragraphs; hold out one block in `every`.

    Returns:
        The training segments (each a list of consecutive paragraphs of one book, broken where
        a block was taken out) and the held-out blocks as text.
    """
    train: list[list[str]] = []
    held: list[str] = []
    count = 0
    for book in text.split("<|book|>"):
        segment: list[str] = []
        block: list[str] = []
        size = 0
        for para in [p.strip("\n") for p in book.split("\n\n") if p.strip()] + [None]:
            if para is not None:
                block.append(para)
                size += len(para) + 2
            if block and (para is None or size >= block_chars):
                if count % every == every // 2:
                    held.append("\n\n".join(block))
                    if segment:
                        train.append(segment)
                    segment = []
                else:
                    segment += block
                block, size = [], 0
                count += 1
        if segment:
            train.append(segment)
    return train, held


def is_heading(para: str) -> bool:
    """True for a chapter or story heading."""
    letters = re.sub(r"[^A-Za-z]", "", para)
    return len(para) < 80 and (not letters or letters.isupper() or letters.istitle())


def _weight(segment: list[str], i: int) -> int:
    """How often a passage starting at paragraph `i` stands in the pool.

    Openings count most, since a request usually wants a beginning; speech in mid-scene, none.
    """
    if i and is_heading(segment[i - 1]):
        return 4
    return 0 if segment[i][0] in "'\"" else 1


def passages(segment: list[str], low: int, high: int) -> list[Passage]:
    """All runs of paragraphs with `low` to `high` characters that cross no heading."""
    found: list[Passage] = []
    title = ""
    for i, para in enumerate(segment):
        if is_heading(para):
            title = para
            continue
        text = ""
        for j in range(i, len(segment)):
            if is_heading(segment[j]) or len(text) + len(segment[j]) > high:
                break
            text = f"{text}\n\n{segment[j]}" if text else segment[j]
            if len(text) >= low and text[-1] in ".!?'\"":
                more = segment[j + 1] if j + 1 < len(segment) else ""
                usable = low // 2 <= len(more) <= high and not is_heading(more)
                found += [Passage(text, more if usable else "", title)] * _weight(segment, i)
                break
    return found


def _with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _subjects(text: str) -> list[str]:
    """The words of `SUBJECTS` in `text`, most frequent first."""
    low = text.lower()
    counts = {s: len(re.findall(rf"\b{s}s?\b", low)) for s in SUBJECTS}
    return sorted((s for s in SUBJECTS if counts[s]), key=lambda s: -counts[s])


def _request(p: Passage, rng: random.Random) -> tuple[str, str, str]:
    """A request that `p` answers, the plan a thinking turn states, and the answer."""
    names = _subjects(p.text)[:3]
    roll = rng.random()
    if roll < 0.02:
        return rng.choice(GREETINGS), "I should greet them.", rng.choice(GREETING_REPLIES)
    if roll < 0.04:
        return rng.choice(WHO), "They ask who I am.", rng.choice(WHO_REPLIES)
    if roll < 0.20:
        match = re.match(r".{25,160}?[.!?;,]['\"]?\s+", p.text, re.DOTALL)
        if match and len(p.text) - match.end() > 150:
            ask = rng.choice(("Continue: ", "Continue this story: ", "Go on from here: "))
            return ask + match.group().strip(), "I will go on from there.", p.text[match.end() :]
    if not names or roll < 0.28:
        return rng.choice(ASK_ANY), "I will tell a short tale.", p.text
    if len(names) > 1 and roll < 0.55:
        pick = rng.sample(names, 2)
        article = rng.choice((_with_article, lambda n: f"the {n}"))
        a, b = (article(n) for n in pick)
        plan = f"They want a story about {a} and {b}."
        return rng.choice(ASK_TWO).format(a=a, b=b), plan, p.text
    noun = rng.choice(names[:2])
    a = rng.choice((_with_article(noun), _with_article(noun), f"the {noun}"))
    plan = rng.choice((f"They want a story about {a}.", f"I will tell a tale about {a}."))
    return rng.choice(ASK_ONE).format(a=a), plan, p.text


def chat_example(p: Passage, rng: random.Random) -> list[tuple[str, bool]]:
    """One chat as `(text, learn)` spans; the loss only counts spans with `learn` set."""
    spans: list[tuple[str, bool]] = [(BOS, False)]
    if rng.random() < 0.55:
        spans.append((rng.choice(SYSTEMS), False))
    ask, plan, answer = _request(p, rng)
    continues = bool(p.more) and answer is p.text and rng.random() < 0.35
    think = rng.random() < 0.5
    if continues:  # earlier reasoning is dropped from a rendered history
        spans += [(USER + ask + ASSISTANT + END_THINK, False), (answer + EOS, True)]
        ask, plan, answer = rng.choice(ASK_MORE), "I will go on with the tale.", p.more
    spans.append((USER + ask + ASSISTANT, False))
    if think:
        spans += [(THINK, False), (plan + END_THINK + answer + EOS, True)]
    else:
        spans += [(END_THINK, False), (answer + EOS, True)]
    return spans


def chat_rows(
    tok: Tokenizer, pool: list[Passage], rows: int, width: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Fill rows with chats, each row starting with one.

    Returns:
        tokens: uint16 (rows, width).
        learn: bool (rows, width), true where the token is to be predicted.
    """
    rng = random.Random(seed)
    tokens = np.full((rows, width), tok.token_to_id(PAD), np.uint16)
    learn = np.zeros((rows, width), bool)
    for r in range(rows):
        at = 0
        while at < width - 24:
            for text, flag in chat_example(rng.choice(pool), rng):
                ids = tok.encode(text).ids[: width - at]
                tokens[r, at : at + len(ids)] = ids
                learn[r, at : at + len(ids)] = flag
                at += len(ids)
    return tokens, learn


def plain_stream(tok: Tokenizer, train: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize the training segments into one stream.

    Returns:
        stream: uint16 (tokens,), each segment as `B paragraphs E`.
        starts: int32 (paragraphs,), offsets of the first token of each paragraph.
    """
    bos, eos = tok.token_to_id(BOS), tok.token_to_id(EOS)
    stream: list[int] = []
    starts: list[int] = []
    for segment in train:
        stream.append(bos)
        for enc in tok.encode_batch([p + "\n\n" for p in segment[:-1]] + segment[-1:]):
            starts.append(len(stream))
            stream += enc.ids
        stream.append(eos)
    return np.array(stream, np.uint16), np.array(starts, np.int32)


def heldout_rows(tok: Tokenizer, held: list[str], width: int) -> tuple[np.ndarray, int]:
    """Held-out text as rows `B + (width-1) tokens`, padded with -1, and its characters."""
    bos = tok.token_to_id(BOS)
    rows: list[list[int]] = []
    for enc in tok.encode_batch(held):
        rows.extend([bos, *enc.ids[i : i + width - 1]] for i in range(0, len(enc.ids), width - 1))
    out = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out, sum(len(h) for h in held)


def prepare(
    data: Path, out: Path, *, vocab: int, width: int, rows: int, books: int, seed: int
) -> None:
    """Write `tokenizer.json`, `data.npz` and `heldout.txt` to `out`."""
    text = data.read_text(encoding="utf-8")
    train, held = split_books(text, block_chars=6000, every=40)
    tok = train_tokenizer("\n\n".join("\n\n".join(s) for s in train), vocab)
    out.mkdir(parents=True, exist_ok=True)
    tok.save(str(out / "tokenizer.json"))
    # Chats draw on the collections of fairy tales, which stand first in the file.
    limit = sum(len(b) for b in text.split("<|book|>")[:books])
    pool: list[Passage] = []
    seen = 0
    for segment in train:
        if seen < limit:
            pool += passages(segment, 360, 1050)
        seen += sum(len(p) + 2 for p in segment)
    stream, starts = plain_stream(tok, train)
    chat, learn = chat_rows(tok, pool, rows, width + 1, seed)
    val, chars = heldout_rows(tok, held, width)
    np.savez(
        out / "data.npz",
        stream=stream,
        starts=starts,
        chat=chat,
        learn=np.packbits(learn, axis=1),
        val=val.astype(np.int16),
        val_chars=chars,
        chars=sum(len(p) + 2 for s in train for p in s),
    )
    (out / "heldout.txt").write_text("\n<|block|>\n".join(held), encoding="utf-8")
    print(
        f"train {len(stream)} tokens, {len(pool)} chat passages, chat rows {chat.shape}, "
        f"held out {len(held)} blocks {chars} chars {(val > 0).sum()} tokens"
    )
