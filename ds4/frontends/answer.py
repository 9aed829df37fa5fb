"""One turn as the user sees it: progress, the answer as it comes, and the rates after it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from enum import Enum

import attrs

from ds4.frontends.conversation import Conversation, Turn, opens_reasoning
from ds4.frontends.interrupt import Interrupt
from ds4.frontends.progress import PrefillProgress, Rates
from ds4.frontends.terminal import DIM, RESET, Terminal
from ds4.frontends.trace import Trace
from ds4.model.tokenizer import StreamDecoder, Tokenizer
from ds4.sampling import SamplingParams

__all__ = ["AnswerWriter", "Ending", "Outcome", "run_turn"]


class Ending(Enum):
    """Why an answer ended."""

    END = "end of sequence"
    LENGTH = "token limit"
    CONTEXT = "context is full"
    STOPPED = "interrupted"


@attrs.frozen
class Outcome:
    """How a turn went."""

    ending: Ending
    rates: Rates


class AnswerWriter:
    """Writes sampled tokens to standard output as text.

    The text is exactly what was generated, the marker that ends reasoning included, so that a
    program that reads it can tell the two parts apart. On a terminal with colours the reasoning is
    dimmed instead, and a blank line stands in place of the marker.

    Args:
      terminal: where to.
      tokenizer: of the model.
      thinking: whether the answer starts inside reasoning.
    """

    def __init__(self, terminal: Terminal, tokenizer: Tokenizer, *, thinking: bool) -> None:
        self._out = terminal.stdout
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._dims = terminal.dims_output
        self._dimmed = False
        self._last = ""
        if thinking:
            self._dim()

    def _dim(self) -> None:
        if self._dims and not self._dimmed:
            self._out.write(DIM)
            self._dimmed = True

    def _undim(self) -> None:
        if self._dimmed:
            self._out.write(RESET)
            self._dimmed = False

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._last = text[-1]

    def token(self, token: int) -> None:
        """Write what a token completes."""
        special = self._tokenizer.special
        if self._dims and token in (special.think, special.end_think):
            self._write(self._decoder.flush())
            self._decoder = StreamDecoder(self._tokenizer)
            if token == special.think:
                self._dim()
            else:
                had_text = bool(self._last)
                self._undim()
                self._write("\n\n" if had_text else "")
        else:
            self._write(self._decoder.feed(token))
        self._out.flush()

    def end(self) -> None:
        """Write what is left, and end the last line."""
        self._write(self._decoder.flush())
        self._undim()
        if self._last != "\n":
            self._out.write("\n")
        self._out.flush()


def run_turn(
    conversation: Conversation,
    turn: Turn,
    *,
    max_tokens: int,
    sampling: SamplingParams,
    terminal: Terminal,
    interrupt: Interrupt,
    trace: Trace,
) -> Outcome:
    """Feed a rendered turn and write the answer.

    Args:
      conversation: the one that goes on.
      turn: what it grows by.
      max_tokens: most tokens to sample.
      sampling: how to choose them.
      terminal: where the answer and the rates go.
      interrupt: guards the steps.
      trace: gets prompt, answer and rates.

    Raises:
      Ds4Error: the turn does not fit or the model failed. What was written stays written.
    """
    tokenizer = conversation.model.tokenizer
    if turn.keep < len(conversation.session):
        trace.section("timeline", f"cut to its first {turn.keep} tokens")
    trace.tokens("prompt", turn.ids, tokenizer.decode(turn.ids))
    progress = PrefillProgress(terminal, len(turn.ids))
    rates = Rates(prefill_tokens=len(turn.ids))
    sampled: list[int] = []
    # Closing the generator is what rolls a failed turn back, so it happens here and not whenever it
    # is collected.
    with (
        interrupt.guard(),
        contextlib.closing(
            conversation.answer(
                turn,
                max_tokens=max_tokens,
                sampling=sampling,
                progress=progress,
                stop=interrupt,
            )
        ) as tokens,
    ):
        with progress:
            first = next(tokens, None)
        if first is not None:
            writer = AnswerWriter(
                terminal, tokenizer, thinking=opens_reasoning(conversation.model, turn.ids)
            )
            try:
                for token in itertools.chain([first], tokens):
                    rates.token()
                    sampled.append(token)
                    if token != tokenizer.special.eos:
                        writer.token(token)
            finally:
                writer.end()
    ending = _ending(conversation, sampled, interrupt, max_tokens)
    trace.tokens("answer", sampled, tokenizer.decode(sampled))
    trace.fields("outcome", {"ended by": ending.value, "rates": rates})
    if sampled and not terminal.quiet:
        terminal.line(str(rates))
    return Outcome(ending, rates)


def _ending(
    conversation: Conversation, sampled: Sequence[int], interrupt: Interrupt, max_tokens: int
) -> Ending:
    if sampled and sampled[-1] == conversation.model.tokenizer.special.eos:
        return Ending.END
    if interrupt.asked:
        return Ending.STOPPED
    if len(sampled) >= max_tokens:
        return Ending.LENGTH
    return Ending.CONTEXT
