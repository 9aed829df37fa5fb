"""Golden bytes: a released frame never changes. Vectors are added to, never edited.

`python -m tests.protocol.test_vectors` writes vectors for messages that have none yet.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4.protocol.codec import CODEC, Envelope
from ds4.protocol.connection import Connection
from ds4.protocol.frame import HEADER_BYTES, frame
from ds4.protocol.messages import MESSAGES, Role
from ds4.protocol.version import Version
from fuzz.conversation import EXAMPLES

FOLDER = Path(__file__).parent / "vectors" / "v1"
PREFACE = "preface"
N, EPOCH, MINOR = 7, 1, 0


def cases():
    """(name, message); a second example of one kind gets a number."""
    seen: dict[str, int] = {}
    for message in EXAMPLES:
        count = seen[message.NAME] = seen.get(message.NAME, 0) + 1
        yield (message.NAME if count == 1 else f"{message.NAME}.{count}"), message


def read(name):
    """Hex with white space and comment lines that start with #."""
    lines = (FOLDER / f"{name}.hex").read_text().splitlines()
    return bytes.fromhex("".join(line for line in lines if not line.startswith("#")))


NAMES = sorted(path.stem for path in FOLDER.glob("*.hex") if path.stem != PREFACE)


@pytest.mark.parametrize("name", NAMES)
def test_golden_bytes_are_understood_and_are_what_is_sent(name):
    """The decoded message must be one of the examples: that pins what the bytes mean."""
    data = read(name)
    envelope = CODEC.decode(data[HEADER_BYTES:], MINOR)
    assert (envelope.n, envelope.epoch) == (N, EPOCH)
    assert envelope.message in EXAMPLES
    assert name.partition(".")[0] == envelope.message.NAME
    assert data == frame(CODEC.encode(envelope, MINOR), 2**26)


def test_the_golden_preface_is_what_is_sent():
    data = read(PREFACE)
    assert Version(1, 0) == Version.from_preface(data)
    assert data == Connection(Role.LEADER, version=Version(1, 0)).start()


def test_every_message_has_a_vector():
    assert {cls.NAME for cls in MESSAGES} <= set(NAMES)


def _write():
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = {name: frame(CODEC.encode(Envelope(N, EPOCH, m), MINOR), 2**26) for name, m in cases()}
    wanted[PREFACE] = Version(1, 0).preface()
    for name, data in wanted.items():
        path = FOLDER / f"{name}.hex"
        if path.exists():
            continue
        text = data.hex()
        lines = [text[i : i + 64] for i in range(0, len(text), 64)]
        path.write_text(f"# {name}, protocol 1.0\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    _write()
