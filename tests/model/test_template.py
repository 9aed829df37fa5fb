import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import ConfigError, InvalidRequest
from ds4.model.chat import ChatRenderer, Message, ThinkingMode
from ds4.model.template import ChatTemplate, TemplateLimits
from ds4.model.toolcall import ToolCall
from tests.model.tiny_vocabulary import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = ChatRenderer(TOKENIZER)
NONE, HIGH = ThinkingMode.NONE, ThinkingMode.HIGH
# The layout of `ds4.model.chat` without tools, written as a model file would.
LAYOUT = """
{{- bos_token -}}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{ m.content }}
  {%- elif m.role == 'user' -%}{{ '<｜User｜>' + m.content }}
  {%- elif m.role == 'assistant' -%}{{ '<｜Assistant｜></think>' ~ m['content'] ~ eos_token }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<｜Assistant｜>' }}{{ '<think>' if enable_thinking else '</think>' }}
{%- endif -%}
"""
NASTY = st.lists(
    st.sampled_from(
        ["<｜User｜>", "</think>", "｜DSML｜", "<", "｜", "think>", "\\ufdd0", "é", " "]
    )
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    max_size=6,
).map("".join)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def run(source: str, messages=(), **options) -> str:
    options = {"mode": NONE} | options
    limits = options.pop("limits", None)
    made = ChatTemplate(source, origin="t.jinja", limits=limits)
    return TOKENIZER.decode(made.render(TOKENIZER, list(messages), **options))


@given(st.lists(st.tuples(NASTY, NASTY), max_size=2), NASTY, st.sampled_from([NONE, HIGH]))
def test_a_template_of_the_same_layout_gives_the_same_ids_whatever_the_content(turns, last, mode):
    # A run of spaces that a block tag trims would be the template's doing, not the content's.
    messages = [Message(role="system", content=last)]
    for question, answer in turns:
        messages += [user(question), Message(role="assistant", content=answer)]
    messages.append(user(last))
    made = ChatTemplate(LAYOUT, origin="layout")
    assert made.render(TOKENIZER, messages, mode=mode) == CHAT.render(messages, mode=mode)


def test_a_template_sees_calls_tools_and_modes():
    call = ToolCall(name="look", arguments='{"a": 1}', id="c1")
    messages = [
        Message(role="assistant", reasoning="why", tool_calls=(call,)),
        Message(role="tool", content="r", tool_call_id="c1"),
    ]
    source = (
        "{% for m in messages %}{{ m.reasoning_content }}|"
        "{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments }}"
        "{% endfor %}|{{ m.tool_call_id }};{% endfor %}"
        "{{ tools[0].function.name }} {{ tools | tojson }} {{ reasoning_effort }}"
    )
    tool = {"name": "look", "description": "é"}
    wanted = json.dumps([{"type": "function", "function": tool}], ensure_ascii=False)
    assert run(source, messages, tools=[tool], mode=HIGH) == (
        f'why|c1 look {{"a": 1}}|;||c1;look {wanted} high'
    )
    assert run("{{ tools is none }} {{ reasoning_effort }}") == "True None"


@pytest.mark.parametrize("ensure_ascii", ["true", "false"])
def test_content_inside_json_is_given_back_unchanged(ensure_ascii):
    text = 'a<b ｜DSML｜ "<think>" \\ufdd0 \ufdd0'
    source = "{{ messages[0].content | tojson(ensure_ascii=" + ensure_ascii + ") }}"
    assert json.loads(run(source, [user(text)])) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ 'x' }}\n{% if %}", "t.jinja: line 3:"),
        ("{% for x in y %}", "t.jinja: line 1: Unexpected end of template"),
        ("{{ x | nofilter }}", "No filter named 'nofilter'"),
        ("{{ x is notest }}", "No test named 'notest'"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "t.jinja: cannot be compiled"),
        ("x" * 300_000, "may have 262144 characters, got 300000"),
    ],
)
def test_a_broken_template_is_refused_with_its_line(source, message):
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(source, origin="t.jinja")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n\n{{ messages.foo.bar }}", "t.jinja: line 3: .*has no attribute 'foo'"),
        ("{{ raise_exception('only ' ~ 2 ~ ' turns') }}", "t.jinja: line 1: only 2 turns"),
        ("\n{{ strftime_now('%Y') }}", "line 2: 'strftime_now' is undefined"),
        ("{{ 1 + 'a' }}", "line 1: "),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "line 1: .*__class__"),
        ("{{ messages.append(1) }}", "is not safely callable|is unsafe|not safe"),
        ("{% include 'x' %}", "no loader"),
        ("{{ '{0:>9999999999}'.format(1) }}", "format"),
        ("{{ '%999999999d' % 1 }}", "% is available for numbers only"),
        ("{{ 'a'.ljust(9999999999) }}", "ljust"),
        ("{{ 'a'.zfill(9999999999) }}", "zfill"),
        ("{{ namespace }}", "cannot be turned into text"),
        ("{{ {} | tojson(indent=99999999) }}", "indent must be from 0 to 16"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_template_that_fails_names_its_line(source, message):
    with pytest.raises(InvalidRequest, match=message):
        run(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(60) }}",
        "{{ range(99999) | map('string') | map('length') | list | length }}" * 2
        + "{% for x in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
        "{{ 'a' * 10**12 }}",
        "{{ [0] * 10**12 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 10 ** 10 ** 10 ** 10 }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}"
        "{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}",
        "{% set a = 'a' * 4000000 %}{{ a.replace('a', a) }}",
        "{% set a = 'a' * 4000000 %}{{ a | replace('a', a) }}",
        "{% set a = 'a' * 4000000 %}{{ a.join(a) }}",
        "{% set a = 'a' * 4000000 %}{{ a | join(a) }}",
        "{% set a = 'a' * 4000000 %}{% for i in range(9999) %}{{ a }}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 200_000 + "{% endfor %}",
        "{% set a = 'a' * 4000000 %}{% for i in range(99999) %}{% if a == a ~ '' %}{% endif %}"
        "{% endfor %}",
        "{% set a = 'a' * 4000000 %}{% for i in range(99999) %}{% set b = a.upper() %}{% endfor %}",
    ],
)
def test_a_costly_template_is_stopped(source):
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=r"more than|limited to small|too large"):
        run(source, limits=TemplateLimits(steps=200_000))
    assert time.process_time() - start < 20  # measured under 6 s each


def test_limits_are_counted_not_timed():
    source = "{% for i in range(1000) %}x{% endfor %}"
    # 1000 items, 1000 turns and their calls: the same number on every machine.
    enough = next(n for n in range(1000, 9000, 500) if not _fails(source, TemplateLimits(steps=n)))
    for _ in range(3):
        assert _fails(source, TemplateLimits(steps=enough - 500))
        assert not _fails(source, TemplateLimits(steps=enough))
    assert _fails("{{ 'xxxx' }}", TemplateLimits(chars=3))
    assert not _fails("{{ 'xxx' }}", TemplateLimits(chars=3))


def _fails(source: str, limits: TemplateLimits) -> bool:
    try:
        run(source, limits=limits)
    except InvalidRequest:
        return True
    return False


def test_one_rendering_does_not_pay_for_another():
    made = ChatTemplate(
        "{% for i in range(100) %}x{% endfor %}", origin="t", limits=TemplateLimits(steps=1000)
    )
    expected = made.render(TOKENIZER, [], mode=NONE)
    results: list[list[int]] = []

    def work() -> None:
        results.extend(made.render(TOKENIZER, [], mode=NONE) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 80


def test_ordinary_template_features_work():
    source = (
        "{% set ns = namespace(n=0) %}"
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}"
        "{% for m in messages if m.role == 'user' %}"
        "{% set ns.n = ns.n + 1 %}{{ loop.index }}/{{ loop.length }}:"
        "{{ m.content | trim | upper }}{{ '' if loop.last else ',' }}"
        "{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% endfor %} {{ ns.n }} {{ twice('ab') }} {{ [1, 2] | join('-') }} "
        "{{ {'b': 1, 'a': [none, true]} | tojson }} {{ 'x.y'.split('.')[-1] }} {{ 7 // 2 % 2 }} "
        "{{ 'a-b' | replace('-', '+') }} {{ (1, 2) }} {{ 'a' in 'cab' }} {{ undefined_name }}"
    )
    messages = [user(" a "), Message(role="assistant", content="no"), user("b")]
    assert run(source, messages) == (
        '1/2:A,2/2:B 2 abab 1-2 {"b": 1, "a": [null, true]} y 1 a+b (1, 2) True '
    )


def test_a_conversation_that_leaves_no_guard_is_refused():
    everything = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    with pytest.raises(InvalidRequest, match="every noncharacter"):
        run("{{ messages[0].content }}", [user(everything)])


def test_tools_that_are_not_json_are_refused():
    with pytest.raises(InvalidRequest, match="tools cannot be written as JSON"):
        run("x", tools=[{"name": object()}])
