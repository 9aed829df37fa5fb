"""A conversation whose transcript is the session's own token timeline.

Invariant: between calls the timeline holds whole turns, plus at most one sampled token that is not
fed yet. A turn whose prompt fails or is stopped leaves no trace; an answer that is stopped keeps
what was produced. This module prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from ds4.api import Model, Progress, Session
from ds4.ids import Token
from ds4.model.chat import Message, ThinkingMode
from ds4.sampling import SamplingParams

__all__ = ["Conversation"]


class Conversation:
    """Turns on one session.

    Args:
      model: the loaded model.
      n_ctx: context of the session in tokens; None means the model's.
      system: system text; "" for none.
      prefix: earlier turns, rendered before the first one.
      raw: turns are plain text to continue, without markers.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int | None = None,
        system: str = "",
        prefix: Sequence[Message] = (),
        raw: bool = False,
    ) -> None:
        self.model = model
        self.raw = raw
        self.session: Session = model.session(n_ctx)
        self._system = system
        self._prefix = tuple(prefix)
        self._unfed: list[int] = []

    @property
    def live(self) -> list[int]:
        """All tokens of the conversation, the one that is sampled but not fed included."""
        return [*self.session.tokens, *self._unfed]

    def render(self, text: str, mode: ThinkingMode | None) -> list[int]:
        """Ids that a user's turn adds to the timeline, up to where the model goes on.

        Raises:
          ConfigError: mode `max` on a model without its text.
          InvalidRequest: text that cannot be encoded.
        """
        live = self.live
        if self.raw:
            head = list(self._unfed) if live else [self.model.tokenizer.special.bos]
            return [*head, *self.model.tokenizer.encode(text, special=False)]
        turn = Message(role="user", content=text)
        if live:
            return [*self._unfed, *self.model.chat.render_turn(live, [turn], mode=mode)]
        system = [Message(role="system", content=self._system)] if self._system else []
        return self.model.chat.render([*system, *self._prefix, turn], mode=mode)

    def answer(
        self,
        ids: Sequence[int],
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
          Ds4Error: the model failed.
        """
        before = len(self.session)
        produced = False
        try:
            for token in self.session.generate(
                ids, max_tokens=max_tokens, sampling=sampling, progress=progress, stop=stop
            ):
                produced = True
                self._unfed = [token]
                yield token
        finally:
            # After a failed step the executor may be ahead of the timeline; cutting to the
            # timeline's own length brings the two together.
            self.session.rewind(len(self.session) if produced else before)

    def close(self) -> None:
        """Free the session."""
        self.session.close()
