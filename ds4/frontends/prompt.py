"""Where the prompt comes from: an option, a file, piped input, or a person at a terminal."""

from __future__ import annotations

import argparse

import attrs

from ds4.frontends.arguments import UsageError
from ds4.frontends.files import decode_text, read_text, read_token_ids
from ds4.frontends.prefix import parse_prefix
from ds4.frontends.terminal import Terminal, is_terminal
from ds4.model.chat import Message

__all__ = ["Prompt", "read_prompt"]


@attrs.frozen(kw_only=True)
class Prompt:
    """What was given.

    Attributes:
      text: prompt as text.
      ids: prompt as token ids, to be used as they are.
      prefix: earlier turns.
      score: text to score instead of a prompt.
    """

    text: str | None = None
    ids: list[int] | None = None
    prefix: tuple[Message, ...] = ()
    score: str | None = None

    @property
    def is_interactive(self) -> bool:
        """Nothing was given and a person can be asked."""
        return self.text is None and self.ids is None and self.score is None

    def require(self, option: str) -> str:
        """The text, for an option that cannot do without.

        Raises:
          UsageError: there is none.
        """
        if self.text is None:
            raise UsageError(f"argument {option}: needs a prompt: -p, --prompt-file or piped input")
        return self.text


def read_prompt(args: argparse.Namespace, terminal: Terminal, n_vocab: int) -> Prompt:
    """Read the prompt that the command line asks for.

    Standard input is read, whole and as one prompt, only when no option gives a prompt and it is no
    terminal. The line break at its very end, which `echo` adds, does not belong to the prompt.

    Raises:
      UsageError: options that exclude each other, or empty input.
      FileError: a file that cannot be used.
    """
    if args.prefix_file is not None and args.raw_prompt:
        raise UsageError("argument --prefix-file: not allowed with argument --raw-prompt")
    if args.chat_template is not None and args.raw_prompt:
        raise UsageError("argument --chat-template: not allowed with argument --raw-prompt")
    given = [args.prompt, args.prompt_file, args.tokens_file]
    if args.perplexity_file is not None:
        if any(value is not None for value in given):
            raise UsageError("argument --perplexity-file: not allowed with a prompt")
        text = read_text("--perplexity-file", args.perplexity_file)
        return Prompt(score=text)
    prefix: tuple[Message, ...] = ()
    if args.prefix_file is not None:
        text = read_text("--prefix-file", args.prefix_file)
        prefix = tuple(parse_prefix("--prefix-file", args.prefix_file, text))
    if args.prompt is not None:
        return Prompt(text=args.prompt, prefix=prefix)
    if args.prompt_file is not None:
        return Prompt(text=read_text("--prompt-file", args.prompt_file), prefix=prefix)
    if args.tokens_file is not None:
        return Prompt(ids=read_token_ids("--tokens-file", args.tokens_file, n_vocab))
    if is_terminal(terminal.stdin):
        return Prompt(prefix=prefix)
    text = decode_text("standard", "input", terminal.read_input()).removesuffix("\n")
    if not text:
        raise UsageError("no prompt: standard input is empty; use -p TEXT or --prompt-file FILE")
    return Prompt(text=text, prefix=prefix)
