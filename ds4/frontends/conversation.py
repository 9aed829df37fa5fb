"""A conversation whose transcript is the session's own token timeline.

Invariant: between calls the timeline holds whole turns, plus at most one sampled token that is not
fed yet. A turn whose prompt fails or is stopped leaves no trace; an answer that is stopped keeps
what was produced; where even going back fails, it begins again. This module prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import attrs

from ds4.api import Model, Progress, Session
from ds4.errors import Ds4Error, InvalidRequest
from ds4.ids import Token
from ds4.model.chat import Message, ThinkingMode, align_to_live
from ds4.model.template import ChatTemplate
from ds4.sampling import SamplingParams
from ds4.steps import Want

__all__ = ["Conversation", "ConversationLostError", "Turn", "opens_reasoning"]


class ConversationLostError(Ds4Error):
    """A turn failed, and so did going back to before it: the conversation begins again, empty."""

    code = "conversation_lost"

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the conversation is lost and begins again")


@attrs.frozen(kw_only=True)
class Turn:
    """A user's turn, rendered and ready to be fed.

    Attributes:
      keep: length that the timeline is cut to first. Only a chat template, which may write earlier
        turns differently once they are past, ever cuts.
      ids: what is fed.
      message: the turn, for a template's transcript; None without one.
    """

    keep: int
    ids: list[int]
    message: Message | None = None


class Conversation:
    """Turns on one session.

    Args:
      model: the loaded model.
      n_ctx: context of the session in tokens; None means the model's.
      system: system text; "" for none.
      prefix: earlier turns, rendered before the first one.
      raw: turns are plain text to continue, without markers.
      template: a chat template to render with, instead of the model's own layout.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int | None = None,
        system: str = "",
        prefix: Sequence[Message] = (),
        raw: bool = False,
        template: ChatTemplate | None = None,
    ) -> None:
        self.model = model
        self.raw = raw
        self.template = template
        self.session: Session = model.session(n_ctx)
        # Without a template only the first turn needs it: the timeline itself is the transcript.
        self._head = [Message(role="system", content=system)] if system else []
        self._head += prefix
        self._transcript = list(self._head)
        self._unfed: list[int] = []

    @property
    def live(self) -> list[int]:
        """All tokens of the conversation, the one that is sampled but not fed included."""
        return [*self.session.tokens, *self._unfed]

    def given(self, ids: Sequence[int]) -> Turn:
        """A turn of token ids, taken as they are."""
        return Turn(keep=len(self.session), ids=[*self._unfed, *ids])

    def render(self, text: str, mode: ThinkingMode | None) -> Turn:
        """Render a user's turn, up to where the model goes on.

        Raises:
          ConfigError: mode `max` on a model without its text.
          InvalidRequest: text that cannot be encoded, or a template that fails.
        """
        live = self.live
        if self.raw:
            head = [] if live else [self.model.tokenizer.special.bos]
            return self.given([*head, *self.model.tokenizer.encode(text, special=False)])
        message = Message(role="user", content=text)
        if self.template is not None:
            return self._render_template(self.template, message, mode)
        if live:
            return self.given(self.model.chat.render_turn(live, [message], mode=mode))
        return self.given(self.model.chat.render([*self._transcript, message], mode=mode))

    def _render_template(
        self, template: ChatTemplate, message: Message, mode: ThinkingMode | None
    ) -> Turn:
        tokenizer = self.model.tokenizer
        prompt = template.render(
            tokenizer, [*self._transcript, message], mode=mode or self.model.chat.default_mode
        )
        if not prompt:
            raise InvalidRequest("the chat template renders this conversation to nothing")
        live = self.live
        prompt = align_to_live(tokenizer, live, prompt)
        # At least one token is fed, and only what was fed can be kept.
        most = min(len(self.session), len(prompt) - 1)
        keep = next((i for i in range(most) if live[i] != prompt[i]), most)
        return Turn(keep=keep, ids=prompt[keep:], message=message)

    def answer(
        self,
        turn: Turn,
        *,
        max_tokens: int,
        sampling: SamplingParams,
        progress: Progress | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Generator[Token, None, None]:
        """Feed what `render` returned, then yield the answer's tokens.

        Ends after end-of-sequence, `max_tokens`, a full context, or when `stop` says so.

        Raises:
          ContextOverflow: the turn does not fit.
          ConversationLostError: the model failed and keeps failing.
          Ds4Error: the model failed.
        """
        before = list(self.session.tokens)
        sampled: list[int] = []
        try:
            if turn.keep < len(before):
                self.session.rewind(turn.keep)
            for token in self.session.generate(
                turn.ids, max_tokens=max_tokens, sampling=sampling, progress=progress, stop=stop
            ):
                sampled.append(token)
                self._unfed = [token]
                yield token
        finally:
            try:
                self._settle(turn, before, sampled)
            except (Ds4Error, FloatingPointError) as error:
                self._restart()
                raise ConversationLostError(str(error)) from error

    def _settle(self, turn: Turn, before: list[int], sampled: list[int]) -> None:
        """Make timeline, executor and transcript agree after a turn, whatever became of it."""
        if sampled:
            # After a failed step the executor may be ahead of the timeline; cutting to the
            # timeline's own length brings the two together.
            self.session.rewind(len(self.session))
            if turn.message is not None:
                self._transcript += [turn.message, self._message(turn.ids, sampled)]
        else:
            self.session.rewind(turn.keep)
            if turn.keep < len(before):
                self.session.feed(before[turn.keep :], want=Want.NOTHING)

    def _restart(self) -> None:
        """Begin again with nothing but the system text and the earlier turns given."""
        self.session.close()
        self._unfed = []
        self._transcript = list(self._head)
        self.session = self.model.session(self.session.n_ctx)

    def _message(self, prompt: Sequence[int], sampled: Sequence[int]) -> Message:
        """The answer as a template sees it."""
        special = self.model.tokenizer.special
        text = [token for token in sampled if token != special.eos]
        at = text.index(special.end_think) if special.end_think in text else -1
        if at < 0 and opens_reasoning(self.model, prompt):
            at = len(text)  # cut short inside the reasoning
        decode = self.model.tokenizer.decode
        return Message(
            role="assistant", content=decode(text[at + 1 :]), reasoning=decode(text[: max(at, 0)])
        )

    def close(self) -> None:
        """Free the session."""
        self.session.close()


def opens_reasoning(model: Model, ids: Sequence[int]) -> bool:
    """Whether what follows these ids is reasoning."""
    special = model.tokenizer.special
    marks = (special.think, special.end_think, special.eos, special.user)
    return next((token for token in reversed(ids) if token in marks), None) == special.think
