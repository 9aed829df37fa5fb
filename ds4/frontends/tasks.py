"""What `ds4` does with an opened model: answer one prompt, chat, or run a diagnostic."""

from __future__ import annotations

import argparse
import threading
import time

from ds4.api import Model
from ds4.errors import InvalidRequest
from ds4.frontends.answer import Ending, run_turn
from ds4.frontends.conversation import Conversation, Turn
from ds4.frontends.dumps import (
    Diagnostics,
    Interrupted,
    decode_consistency,
    dump_all_logits,
    dump_logits,
    dump_logprobs,
    perplexity,
)
from ds4.frontends.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from ds4.frontends.interrupt import Interrupt
from ds4.frontends.line_editor import open_editor
from ds4.frontends.options import DEFAULT_LOGPROBS, MAX_LOGPROBS
from ds4.frontends.prompt import Prompt
from ds4.frontends.repl import Chat, ChatOptions
from ds4.frontends.terminal import Terminal
from ds4.frontends.thinking import effective_mode
from ds4.frontends.trace import Trace
from ds4.model.template import ChatTemplate
from ds4.sampling import SamplingParams

__all__ = ["Tasks"]

_PATIENCE_S = 2.0


class Tasks:
    """The tasks of one run.

    Args:
      args: parsed command line.
      terminal: streams.
      model: the loaded model; the caller closes it.
      trace: gets prompts and answers.
      template: chat template to render with; None for the model's own layout.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        terminal: Terminal,
        model: Model,
        trace: Trace,
        template: ChatTemplate | None = None,
    ) -> None:
        self._args = args
        self._terminal = terminal
        self._model = model
        self._trace = trace
        self._template = template
        self._interrupt = Interrupt(terminal.note)
        seed = args.seed if args.seed is not None else time.time_ns() % 2**64
        self._sampling = SamplingParams(
            temperature=args.temp, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=seed
        )

    def run(self, prompt: Prompt) -> int:
        """Do what the command line asks for; returns the exit status."""
        args = self._args
        if args.logprobs_top_k is not None and args.dump_logprobs is None:
            self._terminal.note("--logprobs-top-k has no effect without --dump-logprobs")
        self._trace.fields(
            "run",
            {
                "model": self._model.path,
                "backend": self._model.backend,
                "context": self._model.n_ctx,
                "sampling": self._sampling,
                "thinking": args.thinking,
            },
        )
        self._warm_up()
        is_diagnostic = prompt.score is not None or any(
            value is not None
            for value in (args.dump_logprobs, args.dump_logits, args.decode_consistency)
        )
        if is_diagnostic:
            try:
                return self._diagnostic(prompt)
            except Interrupted:
                self._terminal.error("interrupted; nothing was written")
                return EXIT_INTERRUPTED
        if prompt.is_interactive:
            self._chat(prompt)
            return EXIT_OK
        return self._answer(prompt)

    def _warm_up(self) -> None:
        """Load or compile the kernels before anything is timed."""
        notice = threading.Timer(
            _PATIENCE_S,
            self._terminal.note,
            ["getting the kernels ready; the first start on a machine compiles them"],
        )
        notice.daemon = True
        notice.start()
        try:
            with self._interrupt.guard():
                self._model.warm_up()
        finally:
            notice.cancel()
        if self._interrupt.asked:
            raise KeyboardInterrupt

    def _conversation(self, prompt: Prompt) -> Conversation:
        return Conversation(
            self._model,
            system=self._args.system,
            prefix=prompt.prefix,
            raw=self._args.raw_prompt,
            template=self._template,
        )

    def _turn(self, conversation: Conversation, prompt: Prompt, option: str) -> Turn:
        if prompt.ids is not None:
            return conversation.given(prompt.ids)
        mode, note = effective_mode(self._args.thinking, self._model.n_ctx)
        if note is not None:
            self._terminal.note(note)
            self._trace.section("note", note)
        return conversation.render(prompt.require(option), mode)

    def _answer(self, prompt: Prompt) -> int:
        conversation = self._conversation(prompt)
        outcome = run_turn(
            conversation,
            self._turn(conversation, prompt, "-p"),
            max_tokens=self._args.tokens,
            sampling=self._sampling,
            terminal=self._terminal,
            interrupt=self._interrupt,
            trace=self._trace,
        )
        if outcome.ending is Ending.CONTEXT:
            self._terminal.note("the answer was cut: the context is full")
        return EXIT_INTERRUPTED if outcome.ending is Ending.STOPPED else EXIT_OK

    def _chat(self, prompt: Prompt) -> None:
        options = ChatOptions(
            thinking=self._args.thinking,
            max_tokens=self._args.tokens,
            sampling=self._sampling,
            system=self._args.system,
            prefix=prompt.prefix,
            raw=self._args.raw_prompt,
            template=self._template,
        )
        chat = Chat(
            self._model,
            options,
            terminal=self._terminal,
            interrupt=self._interrupt,
            trace=self._trace,
        )
        chat.run(open_editor(self._terminal))

    def _diagnostic(self, prompt: Prompt) -> int:
        args = self._args
        run = Diagnostics(model=self._model, terminal=self._terminal, interrupt=self._interrupt)
        if prompt.score is not None:
            if not prompt.score:
                raise InvalidRequest(f"--perplexity-file {args.perplexity_file}: holds no text")
            perplexity(run, prompt.score, max_tokens=args.tokens)
            return EXIT_OK
        option = next(
            f"--{name.replace('_', '-')}"
            for name in ("dump_logprobs", "dump_logits", "decode_consistency")
            if getattr(args, name) is not None
        )
        conversation = self._conversation(prompt)
        ids = self._turn(conversation, prompt, option).ids
        conversation.close()
        self._trace.tokens("prompt", ids, self._model.tokenizer.decode(ids))
        if args.dump_logprobs is not None:
            top_k = min(args.logprobs_top_k or DEFAULT_LOGPROBS, MAX_LOGPROBS)
            dump_logprobs(run, ids, args.dump_logprobs, max_tokens=args.tokens, top_k=top_k)
        elif args.dump_logits is not None:
            name = args.dump_logits
            if name.endswith(".npz") or (prompt.ids is not None and not name.endswith(".json")):
                dump_all_logits(run, ids, name)
            else:
                dump_logits(run, ids, name)
        elif not decode_consistency(run, ids, args.decode_consistency):
            return EXIT_FAILED
        return EXIT_OK
