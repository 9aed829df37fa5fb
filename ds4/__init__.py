"""ds4: distributed inference for DeepSeek V4 Flash 2-bit GGUF files.

import ds4

with ds4.open_model() as model:
    for piece in model.generate("Tell me a story about a fox."):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

from ds4.api import Model, ModelOptions, Session, bundled_model, open_model
from ds4.errors import (
    ConfigError,
    ContextOverflow,
    Ds4Error,
    InvalidRequest,
    ModelFileError,
    RequestError,
    SnapshotError,
)
from ds4.model.chat import Message, ThinkingMode
from ds4.sampling import SamplingParams

__all__ = [
    "ConfigError",
    "ContextOverflow",
    "Ds4Error",
    "InvalidRequest",
    "Message",
    "Model",
    "ModelFileError",
    "ModelOptions",
    "RequestError",
    "SamplingParams",
    "Session",
    "SnapshotError",
    "ThinkingMode",
    "__version__",
    "bundled_model",
    "open_model",
]

__version__ = "0.1.0"
