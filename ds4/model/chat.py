"""Prompt layout of DeepSeek V4: messages in, token ids out.

Invariant: role and structure markers are special ids put there by this module; the text of every
message, tool schema and tool result is encoded with special matching off, so no content can open a
turn, close reasoning or call a tool. Rendering is a pure function of its arguments: nothing in a
prompt depends on time or chance, which is what makes prefixes reusable. This module does not know
HTTP bodies or sessions.

Source: the model's published prompt format (0731 release and preview). Where the published encoder
leaves a case open, the choice is stated at the place.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal

import attrs

from ds4.errors import ConfigError, InvalidRequest
from ds4.model.effort import EffortTexts, find_effort_texts
from ds4.model.tokenizer import SpecialTokens, Tokenizer
from ds4.model.toolcall import Mark, ToolCall, render_calls
from ds4.model.toolcall.dsml import Piece, render_call_opening

__all__ = ["ChatRenderer", "Message", "Role", "ThinkingMode", "align_to_live"]

Role = Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")


class ThinkingMode(enum.Enum):
    """How much the model is asked to reason before it answers."""

    NONE = "none"
    """The answer starts at once."""
    LOW = "low"
    """Reasoning without any effort text: the 0731 release's own default."""
    HIGH = "high"
    """Reasoning; on a 0731 model with its effort text, elsewhere the same as LOW."""
    MAX = "max"
    """Reasoning with the model's strongest effort text; refused where the file holds none."""


@attrs.frozen(kw_only=True)
class Message:
    """One message of a conversation.

    Attributes:
      role: who speaks. `developer` is treated as `system`.
      content: the visible text.
      reasoning: an assistant's reasoning, when known.
      tool_calls: an assistant's calls.
      tool_block: exact text of the sampled block that held `tool_calls`, from the blank line before
        it to its end. Rendered instead of a canonical form, so that the prompt repeats what the
        model wrote. It must come from ds4's own memory, never from a client.
      tool_call_id: of a tool result, the call it answers.

    Raises:
      InvalidRequest: an unknown role, or a field that does not belong to the role.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = attrs.field(default=(), converter=tuple)
    tool_block: str | None = None
    tool_call_id: str = ""

    def __attrs_post_init__(self) -> None:
        if self.role not in _ROLES:
            raise InvalidRequest(f"role must be one of {', '.join(_ROLES)}, got {self.role!r}")
        if not isinstance(self.content, str):
            raise InvalidRequest(f"content must be text, got {type(self.content).__name__}")
        if self.role != "assistant":
            for name in ("reasoning", "tool_calls", "tool_block"):
                if getattr(self, name):
                    raise InvalidRequest(f"a {self.role} message cannot hold {name}")
        if self.tool_call_id and self.role != "tool":
            raise InvalidRequest(f"a {self.role} message cannot hold tool_call_id")


# One line that Claude Code puts first in its system text and that differs in every request; with it
# in the prompt no prefix would ever match.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n|\Z)")

_TOOLS_HEAD: tuple[Piece, ...] = (
    "## Tools\n\nTools are available to help with the user's request. To call them, write one \"<",
    Mark.DSML,
    'tool_calls>" block in this form:\n\n<',
    Mark.DSML,
    "tool_calls>\n<",
    Mark.DSML,
    'invoke name="$TOOL_NAME">\n<',
    Mark.DSML,
    'parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</',
    Mark.DSML,
    "parameter>\n...\n</",
    Mark.DSML,
    "invoke>\n<",
    Mark.DSML,
    'invoke name="$TOOL_NAME2">\n...\n</',
    Mark.DSML,
    "invoke>\n</",
    Mark.DSML,
    "tool_calls>\n\n"
    'Write a string parameter as it is, with string="true". Write a parameter of any other type '
    '(number, boolean, array, object) as JSON, with string="false".\n\n'
    "When thinking is on (the turn starts with ",
    Mark.THINK,
    "), finish all reasoning inside ",
    Mark.THINK,
    "...",
    Mark.END_THINK,
    " before the first tool call or the answer. Otherwise begin the tool calls or the answer right "
    "after ",
    Mark.END_THINK,
    ".\n\n### Available Tool Schemas\n\n",
)
_TOOLS_TAIL = (
    "\n\nUse only these tools, with exactly the names and parameter schemas given above.\n"
)


def _json(value: object, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} cannot be written as JSON: {error}") from error


def _tool_pieces(tools: Sequence[Mapping[str, object]]) -> Iterable[Piece]:
    yield from _TOOLS_HEAD
    for index, tool in enumerate(tools):
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise InvalidRequest(f"tools[{index}] needs a name")
        yield ("\n" if index else "") + _json(dict(tool), f"tools[{index}]")
    yield _TOOLS_TAIL


class _Prompt:
    """Collects text and special ids; adjacent text is encoded as one span, as in training."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._ids: list[int] = []

    def text(self, text: str) -> None:
        self._text.append(text)

    def special(self, token: int) -> None:
        self._flush()
        self._ids.append(token)

    def pieces(self, pieces: Iterable[Piece]) -> None:
        special = self._tokenizer.special
        marks = {Mark.THINK: special.think, Mark.END_THINK: special.end_think}
        for piece in pieces:
            if isinstance(piece, Mark):
                self.special(marks.get(piece, special.dsml))
            else:
                self.text(piece)

    def ids(self) -> list[int]:
        self._flush()
        return self._ids

    def _flush(self) -> None:
        text = "".join(self._text)
        self._text.clear()
        if text:
            self._ids.extend(self._tokenizer.encode(text, special=False))


def _kind(message: Message) -> str:
    """Messages of one kind that stand together share one opening."""
    match message.role:
        case "user" | "tool":
            return "user"
        case "system" | "developer":
            return "system"
        case role:
            return role


def _system_text(messages: Iterable[Message]) -> list[str]:
    texts = (_BILLING_LINE.sub("", message.content) for message in messages)
    return [text for text in texts if text]


def _user_text(messages: Sequence[Message], call_order: Mapping[str, int]) -> str:
    results = [message for message in messages if message.role == "tool"]
    # Results stand in the order of the calls they answer; the places between texts stay.
    results.sort(key=lambda message: call_order.get(message.tool_call_id, len(call_order)))
    in_order = iter(results)
    return "\n\n".join(
        _tool_result(next(in_order).content) if message.role == "tool" else message.content
        for message in messages
    )


def _tool_result(text: str) -> str:
    inner = text.replace("</tool_result>", "&lt;/tool_result>")
    return f"<tool_result>{inner}</tool_result>"


class ChatRenderer:
    """Renders conversations for one model.

    Build it with `from_metadata`. Immutable and safe to share between threads.

    Attributes:
      effort: the effort texts found in the model file.
      default_mode: the mode of a request that names none.
    """

    def __init__(self, tokenizer: Tokenizer, effort: EffortTexts | None = None) -> None:
        self._tokenizer = tokenizer
        self.effort = effort or EffortTexts()
        # Only a 0731 file holds both texts, and that release puts nothing in by default. For other
        # files HIGH inserts nothing either, so the default is plain reasoning everywhere.
        self.default_mode = ThinkingMode.LOW if self._is_0731 else ThinkingMode.HIGH

    @classmethod
    def from_metadata(cls, tokenizer: Tokenizer, metadata: Mapping[str, object]) -> ChatRenderer:
        """Build the renderer, taking effort texts from the file's own chat template."""
        template = metadata.get("tokenizer.chat_template")
        return cls(tokenizer, find_effort_texts(template if isinstance(template, str) else None))

    @property
    def _is_0731(self) -> bool:
        return None not in (self.effort.absolute_maximum, self.effort.beyond_maximum)

    def effort_text(self, mode: ThinkingMode) -> str:
        """The text that `mode` puts first in the prompt; empty for most.

        Raises:
          ConfigError: mode `max` on a model file that does not hold its text.
        """
        match mode:
            case ThinkingMode.HIGH:
                return (self.effort.absolute_maximum or "") if self._is_0731 else ""
            case ThinkingMode.MAX:
                text = self.effort.beyond_maximum or self.effort.absolute_maximum
                if text is None:
                    raise ConfigError(
                        "thinking mode max needs the model's own effort text, and the chat "
                        "template in this model file does not hold it; use high, low or none"
                    )
                return text
            case _:
                return ""

    def render(
        self,
        messages: Sequence[Message],
        *,
        mode: ThinkingMode | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        response_schema: Mapping[str, object] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """Render a conversation up to the point where the model goes on.

        Args:
          messages: oldest first.
          mode: thinking mode; None means `default_mode`.
          tools: OpenAI function objects (name, description, parameters), written in this order and
            with their keys in the order given.
          response_schema: JSON schema that the answer is asked to follow.
          continue_final: leave a final assistant message open, for the model to continue, instead
            of opening a new assistant turn.

        Returns:
          Token ids, starting with BOS. Unless `continue_final`, they end with the assistant marker
          and the opening (thinking) or closing (no thinking) think marker.

        Raises:
          InvalidRequest: a lone surrogate, a tool without a name, a schema that is not JSON, a
            reminder on a model without that marker, or nothing to continue.
          ConfigError: mode `max` without its text.
        """
        if continue_final and (not messages or messages[-1].role != "assistant"):
            raise InvalidRequest("only a final assistant message can be continued")
        mode = mode or self.default_mode
        prompt = _Prompt(self._tokenizer)
        prompt.special(self._special.bos)
        prompt.text(self.effort_text(mode))
        n_head = next((i for i, m in enumerate(messages) if _kind(m) != "system"), len(messages))
        self._head(prompt, messages[:n_head], tools, response_schema)
        body = messages[n_head:]
        last_user = max((i for i, m in enumerate(body) if _kind(m) == "user"), default=-1)
        keep_from = 0 if tools else last_user
        self._turns(prompt, body, mode, keep_reasoning_from=keep_from, open_final=continue_final)
        if not continue_final:
            self._open_assistant(prompt, mode)
        return prompt.ids()

    def render_turn(
        self, live: Sequence[int], messages: Sequence[Message], *, mode: ThinkingMode | None = None
    ) -> list[int]:
        """Render only what follows on a live token timeline: the next turn, ready to generate.

        Nothing that stands in `live` is rendered again, so reasoning that a full `render` would
        drop stays visible to the model. A turn that was cut short is closed first.

        Args:
          live: all tokens of the session so far, as rendered and sampled.
          messages: what is new, usually one user message or the results of the last calls.
          mode: thinking mode of the new turn.

        Returns:
          The ids to append to `live`.

        Raises:
          InvalidRequest: `live` is empty; otherwise as `render`.
        """
        if not live:
            raise InvalidRequest("a turn can only follow a session that has tokens")
        prompt = _Prompt(self._tokenizer)
        for token in self._closing(live):
            prompt.special(token)
        mode = mode or self.default_mode
        self._turns(prompt, messages, mode, keep_reasoning_from=0, open_final=False)
        self._open_assistant(prompt, mode)
        return prompt.ids()

    def forced_call(self, name: str | None) -> list[int]:
        """Ids to put after a prompt so that the model calls a tool.

        Args:
          name: the tool, or None to let the model choose one: then its name comes next.
        """
        prompt = _Prompt(self._tokenizer)
        prompt.pieces(render_call_opening(name))
        return prompt.ids()

    @property
    def _special(self) -> SpecialTokens:
        return self._tokenizer.special

    def _head(
        self,
        prompt: _Prompt,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        response_schema: Mapping[str, object] | None,
    ) -> None:
        parts: list[Iterable[Piece]] = [[text] for text in _system_text(messages)]
        if tools:
            parts.append(_tool_pieces(tools))
        if response_schema is not None:
            schema = _json(dict(response_schema), "response schema")
            parts.append(
                [f"## Response Format:\n\nReply only with JSON that follows this schema:\n{schema}"]
            )
        for index, part in enumerate(parts):
            if index:
                prompt.text("\n\n")
            prompt.pieces(part)

    def _turns(
        self,
        prompt: _Prompt,
        messages: Sequence[Message],
        mode: ThinkingMode,
        *,
        keep_reasoning_from: int,
        open_final: bool,
    ) -> None:
        call_order: dict[str, int] = {}
        index = 0
        before = ""
        for kind, grouped in groupby(messages, key=_kind):
            group = list(grouped)
            if kind == "assistant":
                for offset, message in enumerate(group):
                    at = index + offset
                    self._assistant(prompt, message, mode, keep=at >= keep_reasoning_from)
                    if not (open_final and at == len(messages) - 1):
                        prompt.special(self._special.eos)
                    call_order = {call.id: i for i, call in enumerate(message.tool_calls)}
            elif kind == "user":
                prompt.special(self._special.user)
                prompt.text(_user_text(group, call_order))
            elif kind == "system":
                # System text inside a conversation has no marker of its own. After user text a
                # blank line keeps the two apart; after an end-of-turn token nothing is needed.
                texts = _system_text(group)
                prompt.text("\n\n".join(["", *texts] if texts and before == "user" else texts))
            else:
                self._reminders(prompt, group)
            index += len(group)
            before = kind

    def _reminders(self, prompt: _Prompt, messages: Sequence[Message]) -> None:
        if self._special.latest_reminder is None:
            raise InvalidRequest("this model has no latest_reminder role")
        for message in messages:
            prompt.special(self._special.latest_reminder)
            prompt.text(message.content)

    def _assistant(
        self, prompt: _Prompt, message: Message, mode: ThinkingMode, *, keep: bool
    ) -> None:
        prompt.special(self._special.assistant)
        if keep and mode is not ThinkingMode.NONE:
            prompt.special(self._special.think)
            prompt.text(message.reasoning or "")
        prompt.special(self._special.end_think)
        prompt.text(message.content)
        if message.tool_block is not None:
            first, *rest = message.tool_block.split(Mark.DSML.value)
            prompt.text(first)
            for text in rest:
                prompt.special(self._special.dsml)
                prompt.text(text)
        elif message.tool_calls:
            prompt.pieces(render_calls(message.tool_calls))

    def _open_assistant(self, prompt: _Prompt, mode: ThinkingMode) -> None:
        prompt.special(self._special.assistant)
        thinking = mode is not ThinkingMode.NONE
        prompt.special(self._special.think if thinking else self._special.end_think)

    def _closing(self, live: Sequence[int]) -> list[int]:
        """What a live timeline lacks before the next turn may open."""
        special = self._special
        turn = (special.eos, special.user, special.assistant)
        at = next((i for i in range(len(live) - 1, -1, -1) if live[i] in turn), None)
        if at is None or live[at] != special.assistant:
            return []  # no assistant turn is open
        if special.end_think in live[at:]:
            return [special.eos]
        return [special.end_think, special.eos]


def align_to_live(tokenizer: Tokenizer, live: Sequence[int], prompt: Sequence[int]) -> list[int]:
    """Respell a prompt with the tokens a session already holds, as far as the two say the same.

    What a model samples need not be split the way the tokenizer would split the same text, and then
    a rendered history shares fewer tokens with the session than it could.

    Args:
      tokenizer: of both.
      live: tokens of a session.
      prompt: a rendered prompt.

    Returns:
      Ids with the same special tokens and the same bytes as `prompt`, starting with as many tokens
      of `live` as end where a token of `prompt` ends.
    """
    i = j = n_live = n_prompt = _common_length(live, prompt)
    left = right = b""  # what one side spells beyond the other; at a common boundary both are empty
    while True:
        from_live = not left
        source, at = (live, i) if from_live else (prompt, j)
        if at == len(source):
            break
        token = source[at]
        if tokenizer.is_control(token):
            # Inside a span the other side has text here; at a boundary it must hold the same token.
            if left or right or j == len(prompt) or prompt[j] != token:
                break
            i, j = i + 1, j + 1
        elif from_live:
            left, i = tokenizer.token_bytes(token), i + 1
        else:
            right, j = tokenizer.token_bytes(token), j + 1
        n = min(len(left), len(right))
        if left[:n] != right[:n]:
            break
        left, right = left[n:], right[n:]
        if not left and not right:
            n_live, n_prompt = i, j
    return [*live[:n_live], *prompt[n_prompt:]]


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((k for k in range(n) if a[k] != b[k]), n)
