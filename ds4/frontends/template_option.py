"""`--chat-template`: a Jinja template from a file, or the one inside the model file."""

from __future__ import annotations

from ds4.frontends.arguments import UsageError
from ds4.frontends.files import read_text
from ds4.gguf import GGUFFile
from ds4.model.template import ChatTemplate

__all__ = ["FROM_MODEL", "read_template"]

FROM_MODEL = "model"
"""The value that stands for the model file's own template; a file of that name is `./model`."""

_OPTION = "--chat-template"


def read_template(value: str, file: GGUFFile) -> ChatTemplate:
    """Compile the template that the option names.

    Raises:
      UsageError: the model file holds none.
      FileError: the file cannot be read.
      ConfigError: it is not a template.
    """
    if value != FROM_MODEL:
        return ChatTemplate(read_text(_OPTION, value), origin=f"{_OPTION} {value}")
    source = file.metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        raise UsageError(f"argument {_OPTION}: {value!r}: {file.path} holds no chat template")
    return ChatTemplate(source, origin=f"{_OPTION} {value}")
