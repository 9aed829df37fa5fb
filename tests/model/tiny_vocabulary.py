"""The 768-token test vocabulary: metadata as a GGUF reader gives it, prompts with known ids.

The ids were made together with the test models and agree with llama.cpp's tokenizer.
"""

import json
from pathlib import Path

from ds4.model.tokenizer import Tokenizer

_DATA = json.loads(
    (Path(__file__).parent / "vectors" / "tiny_vocabulary.json").read_text(encoding="utf-8")
)
METADATA: dict[str, object] = _DATA["metadata"]
PROMPTS: list[dict[str, object]] = _DATA["prompts"]


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata("tiny.gguf", METADATA)
