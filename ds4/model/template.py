"""Jinja chat templates (a model file's own, or an operator's), run as untrusted programs.

A template may loop, but not forever: every iteration, call and filter is charged to a meter, sizes
are checked before strings grow, and the same template with the same input always gives the same
prompt or the same error, on a fast machine or a slow one. It reads no file, no clock and no chance.
Message text cannot forge special tokens, although the template's own text makes them. Used only
when asked for: `ds4.model.chat` is the layout that ds4 trusts.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import attrs
import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ds4.errors import ConfigError, InvalidRequest
from ds4.model.chat import Message, ThinkingMode
from ds4.model.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TemplateLimits"]

MAX_SOURCE_CHARS = 256 << 10
# Noncharacters: valid in text, never assigned a meaning.
_GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_MAX_BITS = 256
# What a template expression may raise; anything else is a bug of ds4.
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

# fmt: off
_STRING_METHODS = frozenset((
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower",
    "isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "title", "upper",
))
_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items",
    "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "safe", "select", "selectattr", "sort", "title", "trim", "unique",
    "upper",
)
# fmt: on
_GLOBALS = ("namespace", "range")


@attrs.frozen(kw_only=True)
class TemplateLimits:
    """What one rendering may cost.

    Attributes:
      steps: iterations, calls and filters, each weighted by the size of what it handles.
      chars: characters of output, and of any string made on the way.
    """

    steps: int = 1_000_000
    chars: int = 16 << 20


class _Meter:
    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._steps = 0
        self._chars = 0

    def charge(self, steps: int) -> None:
        self._steps += steps
        if self._steps > self._limits.steps:
            raise SecurityError(f"the template takes more than {self._limits.steps} steps")

    def size(self, chars: int) -> None:
        if chars > self._limits.chars:
            raise SecurityError(f"the template makes more than {self._limits.chars} characters")

    def output(self, chars: int) -> None:
        self._chars += chars
        self.size(self._chars)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 1


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


class _Instrument(NodeTransformer):
    """Rewrites a template so that all that can cost goes through the environment's meter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("metered", [node.iter])
        return self._ticked(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        return self._ticked(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        return self._ticked(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("joined", node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through("weighed", [node.expr])
        for operand in node.ops:
            operand.expr = _through("weighed", [operand.expr])
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through("weighed", [node])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through("weighed", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through("weighed", [node]) if node.ctx == "load" else node

    def _ticked(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        constant = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        tick = _through("tick", [nodes.Const(1 + constant // 64)])
        node.body = [nodes.ExprStmt(tick), *node.body]
        return node


def _through(method: str, arguments: Sequence[nodes.Node]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants would be evaluated while compiling, outside the meter
            extensions=["jinja2.ext.loopcontrols"],
            finalize=_finalize,
        )
        self.meter = _Meter(TemplateLimits())
        filters = {name: self.filters[name] for name in _FILTERS}
        self.filters = {name: self._metered_filter(name, f) for name, f in filters.items()}
        self.filters["tojson"] = self.tojson
        self.filters["string"] = self.text
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals["raise_exception"] = _raise_exception

    def tick(self, steps: int) -> None:
        """One turn of a loop or a macro."""
        self.meter.charge(steps)

    def metered(self, items: Iterable[object]) -> Iterator[object]:
        """Iterate, charging every item, those that a loop filter skips included."""
        for item in items:
            self.meter.charge(1)
            yield item

    def joined(self, *values: object) -> str:
        """The `~` operator."""
        texts = [self.text(value) for value in values]
        self._check_size(sum(map(len, texts)))
        return "".join(texts)

    def weighed(self, value: object) -> object:
        """Return `value`, charging what it takes to walk through it."""
        if isinstance(value, list | tuple | dict):
            self._weigh(value)
        else:
            self.meter.charge(1 + _length(value) // 64)
        return value

    def text(self, value: object) -> str:
        """Text of a value that a template may show."""
        if isinstance(value, str):
            return value
        if isinstance(value, list | tuple | dict):
            self.meter.size(self._weigh(value))
        elif value is not None and not isinstance(value, int | float | jinja2.Undefined):
            raise SecurityError(f"a {type(value).__name__} cannot be turned into text")
        return str(value)

    def tojson(
        self,
        value: object,
        *,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as chat templates expect it: no HTML escapes, non-ASCII text as it is."""
        if indent is not None and not 0 <= indent <= 16:
            raise SecurityError(f"tojson indent must be from 0 to 16, got {indent}")
        self.meter.size(self._weigh(value))
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            allow_nan=False,
        )

    def _weigh(self, value: object) -> int:
        """About how many characters a value has when written out, shared parts every time."""
        seen: dict[int, int] = {}

        def weight(item: object) -> int:
            if not isinstance(item, list | tuple | dict):
                return 8 + _length(item)
            if id(item) not in seen:
                seen[id(item)] = 1 << 60  # a value inside itself is too large
                self.meter.charge(1 + len(item) // 8)
                parts = [*item, *item.values()] if isinstance(item, dict) else item
                seen[id(item)] = 2 + sum(map(weight, parts))
                self.meter.size(seen[id(item)])
            return seen[id(item)]

        return weight(value)

    def wrap_str_format(self, value: object) -> None:
        """`str.format` is refused like any other method that is not listed."""

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if isinstance(obj, str) and attr not in _STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:
        self.meter.charge(1)
        receiver = getattr(__obj, "__self__", None)
        if isinstance(receiver, str):
            self._check_text(getattr(__obj, "__name__", ""), receiver, args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if isinstance(left, int | float) and isinstance(right, int | float):
            if operator == "**" and (abs(right) > 64 or _bits(left) > 4):
                raise SecurityError("** is limited to small numbers")
            if _bits(left) + _bits(right) > _MAX_BITS:
                raise SecurityError("a number is too large")
        elif operator == "*":
            length = max(_product(left, right), _product(right, left))
            self._check_size(
                length if isinstance(left, str) or isinstance(right, str) else 16 * length
            )
        elif operator == "+":
            length = _length(left) + _length(right)
            self._check_size(length if isinstance(left, str) else 16 * length)
        else:
            raise SecurityError(f"{operator} is available for numbers only")
        return super().call_binop(context, operator, left, right)

    def _check_size(self, length: int) -> None:
        self.meter.size(length)
        self.meter.charge(1 + length // 64)

    def _check_text(self, method: str, text: str, args: Sequence[object]) -> None:
        """Refuse a string operation before it makes too long a string."""
        length = len(text)
        if method == "replace" and len(args) >= 2:
            old, new = args[0], args[1]
            hits = text.count(old) if isinstance(old, str) else 0
            length += hits * _length(new)
        elif method == "join" and args:
            if not isinstance(args[0], list | tuple | str):
                raise SecurityError("join needs a list")
            self.weighed(args[0])
            length = sum(len(text) + _length(item) for item in args[0])
        self._check_size(length)

    def _metered_filter(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        # Some of Jinja's own filters want the context or the environment first; the mark is kept.
        passes = getattr(function, "jinja_pass_arg", None)

        def metered(*args: object, **kwargs: object) -> object:
            first, (value, *rest) = ((), args) if passes is None else (args[:1], args[1:])
            if name == "join":
                value = self._check_join(value, rest[0] if rest else kwargs.get("d", ""))
            elif name == "replace":
                named = [kwargs[key] for key in ("old", "new") if key in kwargs]
                self._check_text("replace", self.text(value), [*rest, *named])
            else:
                self.meter.charge(1 + _length(value) // 16)
            result = function(*first, value, *rest, **kwargs)
            if isinstance(result, str):
                self._check_size(len(result))
            return result

        if passes is not None:
            metered.jinja_pass_arg = passes  # type: ignore[attr-defined]  # Jinja's own protocol
        return metered

    def _check_join(self, value: object, separator: object) -> list[object]:
        if not isinstance(value, Iterable):
            raise SecurityError(f"join needs a list, got {type(value).__name__}")
        items = list(self.metered(value))
        self._check_size(sum(len(self.text(item)) + _length(separator) for item in items))
        return items


def _bits(value: float) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _product(sequence: object, factor: object) -> int:
    return _length(sequence) * factor if isinstance(factor, int) and factor > 0 else 0


@jinja2.pass_context
def _finalize(context: Context, value: object) -> str:
    """Charge every output; because it wants the context, Jinja folds no constant output either."""
    environment = context.environment
    assert isinstance(environment, _Environment)
    text = environment.text(value)
    environment.meter.output(len(text))
    return text


class ChatTemplate:
    """A compiled chat template. Safe to share between threads (renderings take turns).

    A template sees `messages` (role, content, reasoning_content, tool_calls in the OpenAI shape,
    tool_call_id), `tools`, `add_generation_prompt`, `bos_token`, `eos_token`, `enable_thinking`,
    `thinking` and `reasoning_effort`, and may call `raise_exception`.
    """

    def __init__(self, source: str, *, origin: str, limits: TemplateLimits | None = None) -> None:
        """Compile.

        Args:
          source: Jinja source.
          origin: where it came from, for error messages.
          limits: what one rendering may cost.

        Raises:
          ConfigError: not a template; names the line.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(
                f"{origin}: a template may have {MAX_SOURCE_CHARS} characters, got {len(source)}"
            )
        self._origin = origin
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source, name=origin, filename=origin)
            tree = _Instrument().visit(tree)
            for node in tree.find_all(nodes.Node):
                node.set_environment(self._environment)
                node.set_lineno(node.lineno or 1)
            code = self._environment.compile(tree, name=origin, filename=origin)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{origin}: line {error.lineno}: {error.message}") from error
        except (*_FAILURES, SyntaxError) as error:
            raise ConfigError(f"{origin}: cannot be compiled: {error}") from error
        self._template = jinja2.Template.from_code(
            self._environment, code, self._environment.make_globals(None)
        )

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        mode: ThinkingMode,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Render a conversation to token ids.

        Special tokens come from the template's own text and from nowhere else: message text that
        spells one is encoded as ordinary text.

        Args:
          tokenizer: of the model.
          messages: oldest first.
          mode: thinking mode, as the template's variables tell it.
          tools: OpenAI function objects.
          add_generation_prompt: what the variable of that name is.

        Raises:
          InvalidRequest: the template fails on this conversation or costs too much; names the line.
        """
        guard = _Guard(tokenizer, (self._plain(messages), list(tools)))
        variables = guard.protect(
            {
                "messages": self._plain(messages),
                "tools": [{"type": "function", "function": dict(tool)} for tool in tools] or None,
            }
        )
        assert isinstance(variables, dict)
        thinking = mode is not ThinkingMode.NONE
        text = self._run(
            variables
            | {
                "add_generation_prompt": add_generation_prompt,
                "bos_token": tokenizer.decode([tokenizer.special.bos]),
                "eos_token": tokenizer.decode([tokenizer.special.eos]),
                "enable_thinking": thinking,
                "thinking": thinking,
                "reasoning_effort": mode.value if thinking else None,
            }
        )
        ids: list[int] = []
        for span, token in tokenizer.split_special(text):
            if token is None:
                ids.extend(tokenizer.encode(guard.remove(span), special=False))
            else:
                ids.append(token)
        return ids

    def _run(self, variables: Mapping[str, object]) -> str:
        with self._lock:
            self._environment.meter = _Meter(self._limits)
            try:
                return self._template.render(variables)
            except _FAILURES as error:
                frames = traceback.extract_tb(error.__traceback__)
                lines = [frame.lineno for frame in frames if frame.filename == self._origin]
                where = f"line {lines[-1]}: " if lines else ""
                text = str(error) or type(error).__name__
                raise InvalidRequest(f"{self._origin}: {where}{text}") from error

    @staticmethod
    def _plain(messages: Sequence[Message]) -> list[dict[str, object]]:
        """Messages in the shape that templates expect."""
        out: list[dict[str, object]] = []
        for message in messages:
            plain: dict[str, object] = {"role": message.role, "content": message.content}
            if message.reasoning is not None:
                plain["reasoning_content"] = message.reasoning
            if message.tool_calls:
                plain["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in message.tool_calls
                ]
            if message.tool_call_id:
                plain["tool_call_id"] = message.tool_call_id
            out.append(plain)
        return out


class _Guard:
    """Keeps special-token strings in outside text from being recognised in a rendered template.

    A guard character goes behind every character that a special token begins with, and is taken out
    again from the spans between special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, outside: object) -> None:
        try:
            text = json.dumps(outside, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"tools cannot be written as JSON: {error}") from error
        free = [g for g in _GUARDS if g not in text and _escaped(g) not in text.lower()]
        if not free:
            raise InvalidRequest("the conversation uses every noncharacter from U+FDD0 to U+FDEF")
        self._guard = free[0]
        self._guarded = str.maketrans(
            {text[0]: text[0] + self._guard for text in tokenizer.special_texts}
        )

    def protect(self, value: object) -> object:
        """`value` with the guard in every string, keys included."""
        match value:
            case str():
                return value.translate(self._guarded)
            case dict():
                return {self.protect(key): self.protect(item) for key, item in value.items()}
            case list() | tuple():
                return [self.protect(item) for item in value]
            case _:
                return value

    def remove(self, text: str) -> str:
        """`text` without guards, also where JSON has escaped them."""
        return text.replace(self._guard, "").replace(_escaped(self._guard), "")


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}"
