"""Finds the reasoning-effort texts of DeepSeek V4 inside a model file's own chat template.

The texts belong to the model, so ds4 neither carries nor invents them: a text is used only if its
SHA-256 is the published one. This module renders nothing (`ds4.model.chat` does).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import attrs
import jinja2
from jinja2 import nodes

__all__ = ["ABSOLUTE_MAXIMUM", "BEYOND_MAXIMUM", "EffortText", "EffortTexts", "find_effort_texts"]


@attrs.frozen(kw_only=True)
class EffortText:
    """How to recognise a text.

    Attributes:
      start: its first words.
      n_bytes: its length in UTF-8.
      sha256: hexadecimal digest of those bytes.
    """

    start: str
    n_bytes: int
    sha256: str


ABSOLUTE_MAXIMUM = EffortText(
    start="Reasoning Effort: Absolute maximum",
    n_bytes=476,
    sha256="f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",
)
"""`high` in the 0731 release, `max` in the preview."""

BEYOND_MAXIMUM = EffortText(
    start="Reasoning Effort: Beyond maximum —",
    n_bytes=528,
    sha256="53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",
)
"""`max` in the 0731 release."""


@attrs.frozen(kw_only=True)
class EffortTexts:
    """The verified texts of one model file; None where the file does not hold one."""

    absolute_maximum: str | None = None
    beyond_maximum: str | None = None


def _literal(node: nodes.Node) -> str | None:
    """The text of a literal or of literals joined by `+` or `~`; None for anything else.

    Jinja's own optimizer would also evaluate powers and products that a file may hold to hurt.
    """
    match node:
        case nodes.Const(value=str() as text):
            return text
        case nodes.TemplateData(data=text):
            return text
        case nodes.Add(left=left, right=right):
            parts = [_literal(left), _literal(right)]
        case nodes.Concat(nodes=items):
            parts = [_literal(item) for item in items]
        case _:
            return None
    return None if None in parts else "".join(part for part in parts if part is not None)


def _strings(template: str) -> Iterator[str]:
    """Every text a template holds: literals (joined where they are concatenated) and output."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    try:
        tree = environment.parse(template)
        kinds = (nodes.Const, nodes.TemplateData, nodes.Add, nodes.Concat)
        yield from (text for node in tree.find_all(kinds) if (text := _literal(node)) is not None)
    except (jinja2.TemplateError, RecursionError):
        # Not a template that ds4 could render either; the raw text may still hold what is sought.
        yield template


def _find(template: str, wanted: EffortText) -> str | None:
    for text in _strings(template):
        at = text.find(wanted.start)
        while at >= 0:
            found = text[at:].encode("utf-8", errors="surrogatepass")[: wanted.n_bytes]
            if hashlib.sha256(found).hexdigest() == wanted.sha256:
                return found.decode("utf-8")
            at = text.find(wanted.start, at + 1)
    return None


def find_effort_texts(
    template: str | None,
    *,
    absolute_maximum: EffortText = ABSOLUTE_MAXIMUM,
    beyond_maximum: EffortText = BEYOND_MAXIMUM,
) -> EffortTexts:
    """Search a `tokenizer.chat_template` for both texts.

    Args:
      template: Jinja source, or None when the file carries none.
      absolute_maximum: the first text to look for.
      beyond_maximum: the second text to look for.
    """
    if not template:
        return EffortTexts()
    return EffortTexts(
        absolute_maximum=_find(template, absolute_maximum),
        beyond_maximum=_find(template, beyond_maximum),
    )
