"""The interactive mode: turns, commands, and what happens when one of them fails.

A failed turn is reported and leaves the conversation as it was; only leaving ends the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import attrs

from ds4.api import Model
from ds4.errors import Ds4Error
from ds4.frontends.answer import Ending, run_turn
from ds4.frontends.arguments import integer
from ds4.frontends.commands import COMMANDS_HELP, Command, UnknownCommand, parse_line
from ds4.frontends.conversation import Conversation
from ds4.frontends.files import read_text
from ds4.frontends.interrupt import Interrupt
from ds4.frontends.line_editor import LineEditor
from ds4.frontends.progress import Rates
from ds4.frontends.terminal import Terminal
from ds4.frontends.thinking import Thinking, effective_mode
from ds4.frontends.trace import Trace
from ds4.model.chat import Message, ThinkingMode
from ds4.model.template import ChatTemplate
from ds4.sampling import SamplingParams

__all__ = ["Chat", "ChatOptions"]


@attrs.frozen(kw_only=True)
class ChatOptions:
    """What the command line fixes for a chat.

    Attributes:
      thinking: mode to start with.
      max_tokens: most tokens of an answer.
      sampling: how tokens are chosen.
      system: system text.
      prefix: earlier turns.
      raw: no chat markers.
      template: chat template to render with; None for the model's own layout.
    """

    thinking: Thinking
    max_tokens: int
    sampling: SamplingParams
    system: str = ""
    prefix: Sequence[Message] = ()
    raw: bool = False
    template: ChatTemplate | None = None


_MODES: dict[str, Thinking] = {"/think": "think", "/think-max": "max", "/nothink": "none"}


class Chat:
    """One interactive run.

    Args:
      model: the loaded model; the caller closes it.
      options: see there.
      terminal: streams.
      interrupt: guards the steps.
      trace: gets every turn.
    """

    def __init__(
        self,
        model: Model,
        options: ChatOptions,
        *,
        terminal: Terminal,
        interrupt: Interrupt,
        trace: Trace,
    ) -> None:
        self._model = model
        self._options = options
        self._terminal = terminal
        self._interrupt = interrupt
        self._trace = trace
        self._thinking: Thinking = options.thinking
        self._rates: Rates | None = None
        self._conversation = self._start(model.n_ctx)

    def _start(self, n_ctx: int) -> Conversation:
        return Conversation(
            self._model,
            n_ctx=n_ctx,
            system=self._options.system,
            prefix=self._options.prefix,
            raw=self._options.raw,
            template=self._options.template,
        )

    def run(self, editor: LineEditor) -> None:
        """Serve entries until the user leaves."""
        self._say(f"{self._model.path}, context {self._model.n_ctx}; /help lists the commands")
        try:
            while True:
                try:
                    entry = parse_line(editor.read())
                    if isinstance(entry, Command):
                        if entry.name in ("/quit", "/exit"):
                            return
                        self._command(entry)
                    elif entry is not None:
                        self._turn(entry)
                except EOFError:
                    return
                except KeyboardInterrupt:
                    self._say("Ctrl+D or /quit leaves")
                except UnknownCommand as hint:
                    self._say(str(hint))
                except (Ds4Error, FloatingPointError) as error:
                    self._terminal.error(str(error))
        finally:
            self._conversation.close()

    def _say(self, text: str) -> None:
        """Answer to a command; the user asked for it, so `quiet` does not hide it."""
        self._terminal.line(text)

    def _mode(self) -> ThinkingMode | None:
        mode, note = effective_mode(self._thinking, self._conversation.session.n_ctx)
        if note is not None:
            self._terminal.note(note)
            self._trace.section("note", note)
        return mode

    def _turn(self, text: str) -> None:
        outcome = run_turn(
            self._conversation,
            self._conversation.render(text, self._mode()),
            max_tokens=self._options.max_tokens,
            sampling=self._options.sampling,
            terminal=self._terminal,
            interrupt=self._interrupt,
            trace=self._trace,
        )
        if outcome.rates.tokens:
            self._rates = outcome.rates
        if outcome.ending is Ending.CONTEXT:
            self._say("the context is full; /ctx N starts again with a larger one")
        elif outcome.ending is Ending.STOPPED:
            kept = "what was written is kept" if outcome.rates.tokens else "the turn is dropped"
            self._say(f"stopped; {kept}")

    def _command(self, command: Command) -> None:
        match command.name:
            case "/help":
                self._say(COMMANDS_HELP)
            case "/status":
                self._status()
            case "/ctx":
                self._resize(command.argument)
            case "/read":
                text = read_text("/read", command.argument)
                if not text.strip():
                    raise UnknownCommand(f"/read {command.argument}: the file holds no text")
                self._turn(text)
            case name:
                self._thinking = _MODES[name]
                self._say(f"thinking mode from the next turn on: {self._thinking_text()}")

    def _thinking_text(self) -> str:
        mode, _ = effective_mode(self._thinking, self._conversation.session.n_ctx)
        return (mode or self._model.chat.default_mode).value

    def _resize(self, argument: str) -> None:
        try:
            n_ctx = integer(1, self._model.shape.n_ctx_train)(argument)
        except argparse.ArgumentTypeError as error:
            raise UnknownCommand(f"/ctx: {error}") from error
        fresh = self._start(n_ctx)
        self._conversation.close()
        self._conversation = fresh
        self._say(f"new session with a context of {n_ctx} tokens; the transcript is gone")

    def _status(self) -> None:
        model, session = self._model, self._conversation.session
        used = len(self._conversation.live)
        rows = {
            "model": model.path,
            "backend": model.backend,
            "ranks": "1",
            "context": f"{used} of {session.n_ctx} tokens used",
            "thinking": self._thinking_text(),
            "sampling": _sampling_text(self._options.sampling),
            "last answer": str(self._rates) if self._rates else "none yet",
        }
        width = max(map(len, rows))
        self._say("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()))


def _sampling_text(sampling: SamplingParams) -> str:
    if sampling.temperature == 0.0:
        return "the likeliest token"
    return (
        f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, min-p"
        f" {sampling.min_p:g}, top-k {sampling.top_k or 'off'}, seed {sampling.seed}"
    )
