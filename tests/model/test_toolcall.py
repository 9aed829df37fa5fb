import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import ConfigError, InvalidRequest
from ds4.model.toolcall import (
    BlockEnd,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Mark,
    OutputParser,
    Reasoning,
    StopMatcher,
    ToolCall,
    ToolPolicy,
    piece_of,
    render_calls,
)
from ds4.model.toolcall.dsml import (
    escape_attribute,
    escape_value,
    pieces_text,
    render_call_opening,
    unescape_attribute,
    unescape_value,
)
from tests.model.tiny_vocabulary import tiny_tokenizer

PARSE, TEXT, DROP = ToolPolicy
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SNIPPETS = st.lists(
    st.sampled_from(
        [
            "<", ">", "/", "｜DSML｜", "DSML｜", "tool_calls>", "invoke", "parameter", ' name="x"',
            ' string="true"', "parameter>", "&lt;", "&amp;", "\n", " ", "a", "é", "🚀", '"', "1",
            "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>",
            '<｜DSML｜parameter name="p" string="true">', "</｜DSML｜parameter>",
            '<parameter name="q">', "</parameter>", "<tool_calls>", '<invoke name="g">',
            "</invoke>", "</tool_calls>", "</｜DSML｜tool_calls>", "</think>", "<think>",
        ]
    ),
    max_size=14,
).map("".join)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | UNICODE | SNIPPETS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(UNICODE, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
ARGUMENTS = st.dictionaries(UNICODE | SNIPPETS, JSON, max_size=4)
CALLS = st.lists(
    st.builds(
        lambda name, arguments: ToolCall(
            name=name, arguments=json.dumps(arguments, ensure_ascii=False)
        ),
        (UNICODE | SNIPPETS).filter(bool),
        ARGUMENTS,
    ),
    min_size=1,
    max_size=3,
)


def block(calls) -> str:
    return pieces_text(render_calls(calls))


def merged(events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Content | Reasoning) and type(last) is type(event):
            out[-1] = type(event)(last.text + event.text)
        else:
            out.append(event)
    return out


def parse(pieces, *, thinking=False, policy=PARSE, **limits) -> list[Event]:
    parser = OutputParser(thinking=thinking, policy=policy, **limits)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged(events + parser.finish())


def whole(text: str, **options) -> list[Event]:
    return parse([text.encode()], **options)


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def shown(events: list[Event], kind: type) -> str:
    return "".join(event.text for event in events if type(event) is kind)


def one_call(arguments: str = "{}", name: str = "f") -> str:
    return block([ToolCall(name=name, arguments=arguments)])


# --- dsml -----------------------------------------------------------------------------------------


@given(UNICODE | SNIPPETS)
def test_escaped_values_come_back_and_cannot_close_their_parameter(text):
    escaped = escape_value(text)
    assert unescape_value(escaped) == text
    assert "</｜DSML｜parameter>" not in escaped
    assert "</DSML｜parameter>" not in escaped


@given(UNICODE | SNIPPETS)
def test_escaped_attributes_come_back_and_cannot_leave_their_quotes(text):
    escaped = escape_attribute(text)
    assert unescape_attribute(escaped) == text
    assert '"' not in escaped
    assert ">" not in escaped


def test_only_the_closing_tag_is_escaped_in_a_value():
    assert escape_value("a < b && c &lt; </parameter>") == "a < b && c &lt; </parameter>"
    assert escape_value("x</｜DSML｜parameter>") == "x&lt;/｜DSML｜parameter>"
    assert escape_value("x&lt;/｜DSML｜parameter>") == "x&amp;lt;/｜DSML｜parameter>"


def test_a_closing_tag_inside_json_is_written_with_a_unicode_escape():
    text = one_call(json.dumps({"a": ["</｜DSML｜parameter>"]}, ensure_ascii=False))
    assert '["\\u003c/｜DSML｜parameter>"]' in text


@pytest.mark.parametrize("arguments", ["", "  ", "{}"])
def test_no_arguments_make_an_empty_parameter_list(arguments):
    assert one_call(arguments).count("parameter") == 0


@pytest.mark.parametrize("arguments", ["[1]", "oops", '"s"', "[" * 100_000])
def test_arguments_that_are_no_object_are_shown_as_they_were(arguments):
    (call,) = [e for e in whole(one_call(arguments)) if isinstance(e, CallEnd)]
    assert json.loads(call.arguments) == {"arguments": arguments}


def test_a_number_that_json_cannot_write_is_refused():
    with pytest.raises(InvalidRequest, match="argument 'x' holds a number"):
        one_call('{"x": 1e999}')


# --- parser: what it finds ------------------------------------------------------------------------


@given(CALLS, UNICODE, st.booleans())
def test_rendered_calls_are_parsed_back(calls, text, thinking):
    lead = text.rstrip("\n")
    raw = block(calls)
    source = (f"{lead}</think>" if thinking else "") + lead + raw
    events = whole(source, thinking=thinking)
    ends = [event for event in events if isinstance(event, CallEnd)]
    assert [end.name for end in ends] == [call.name for call in calls]
    for end, call in zip(ends, calls, strict=True):
        # The same members in the same order.
        assert json.dumps(json.loads(end.arguments)) == json.dumps(json.loads(call.arguments))
    assert events[-1] == BlockEnd(raw.encode(), len(calls))
    assert shown(events, Content) == lead
    assert shown(events, Reasoning) == (lead if thinking else "")


def test_events_of_a_block_come_in_order_and_keep_the_sampled_text():
    invoke = (
        '<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="b" string="true">x"y</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="a" string="false"> [1,  2] </｜DSML｜parameter>\n'
        "</｜DSML｜invoke>"
    )
    empty = '<｜DSML｜invoke name="g"></｜DSML｜invoke>'
    raw = f"\n\n<｜DSML｜tool_calls>\n{invoke}\n{empty}\n</｜DSML｜tool_calls>"
    assert whole("Look:" + raw) == [
        Content("Look:"),
        CallStart(0, "f"),
        CallArguments(0, '{"b": "x\\"y"'),
        CallArguments(0, ', "a": [1,  2]'),
        CallArguments(0, "}"),
        CallEnd(0, "f", '{"b": "x\\"y", "a": [1,  2]}', invoke.encode()),
        CallStart(1, "g"),
        CallArguments(1, "{}"),
        CallEnd(1, "g", "{}", empty.encode()),
        BlockEnd(raw.encode(), 2),
    ]


@pytest.mark.parametrize("marker", ["｜DSML｜", "DSML｜", ""])
def test_the_other_dialects_mean_the_same(marker):
    text = one_call('{"p": "v", "n": 3}').replace("｜DSML｜", marker)
    (end,) = [event for event in whole(text) if isinstance(event, CallEnd)]
    assert (end.name, end.arguments) == ("f", '{"p": "v", "n": 3}')


def test_a_plain_tag_is_payload_inside_a_parameter_with_markers():
    text = one_call(json.dumps({"p": "<a></parameter></invoke></tool_calls>"}))
    (end,) = [event for event in whole(text) if isinstance(event, CallEnd)]
    assert json.loads(end.arguments) == {"p": "<a></parameter></invoke></tool_calls>"}


def test_a_parameter_without_the_string_attribute_is_json_if_it_can_be():
    text = (
        '<tool_calls><invoke name="f"><parameter name="a">12</parameter>'
        '<parameter name="b">twelve</parameter></invoke></tool_calls>'
    )
    (end,) = [event for event in whole(text) if isinstance(event, CallEnd)]
    assert end.arguments == '{"a": 12, "b": "twelve"}'


def test_a_call_inside_unclosed_reasoning_is_delivered_once_and_ends_it():
    events = whole("let me see" + one_call(), thinking=True)
    assert events[0] == Reasoning("let me see")
    assert [type(e) for e in events[1:]] == [CallStart, CallArguments, CallEnd, BlockEnd]


def test_text_after_a_block_is_not_shown():
    parser = OutputParser(thinking=False, policy=PARSE)
    events = parser.feed((one_call() + " and more").encode())
    assert isinstance(events[-1], BlockEnd)
    assert parser.finished
    assert parser.n_calls == 1
    assert parser.feed(b"more") == parser.finish() == []


def test_reasoning_and_answer_are_told_apart():
    assert whole("why\n</think>\n\nso", thinking=True) == [Reasoning("why\n"), Content("\n\nso")]
    assert whole("a</think>b") == [Content("a</think>b")]


def test_reasoning_that_is_never_closed_can_be_told():
    parser = OutputParser(thinking=True, policy=PARSE)
    parser.feed(b"why")
    parser.finish()
    assert parser.in_reasoning
    parser = OutputParser(thinking=True, policy=PARSE)
    parser.feed(b"why</think>")
    parser.finish()
    assert not parser.in_reasoning


def test_think_markers_are_tokens_in_an_answer():
    assert parse([b"a", Mark.END_THINK, b"b"]) == [Content("ab")]
    assert parse([b"a", Mark.THINK, b"b", Mark.END_THINK, b"c"]) == [
        Content("a"),
        Reasoning("b"),
        Content("c"),
    ]
    assert whole("a<think>b") == [Content("a<think>b")]


def test_a_marker_token_is_the_same_as_its_spelling():
    text = "hm" + one_call('{"p": "</think>"}')
    pieces: list[bytes | Mark] = []
    for index, part in enumerate(text.split("｜DSML｜")):
        pieces += [Mark.DSML] if index else []
        pieces += [part.encode()]
    assert parse(pieces) == whole(text)
    with_mark = [*pieces]
    at = next(i for i, p in enumerate(pieces) if isinstance(p, bytes) and b"</think>" in p)
    before, after = pieces[at].split(b"</think>")
    with_mark[at : at + 1] = [before, Mark.END_THINK, after]
    assert parse(with_mark) == whole(text)


# --- parser: what it leaves alone -----------------------------------------------------------------


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "\n",
        "oops",
        "<b>",
        "<｜DSML｜invoke>x",
        '<｜DSML｜invoke name="">',
        '<｜DSML｜invoke name="f" id="1">',
        '<｜DSML｜invoke name="f" name="g"></｜DSML｜invoke>',
        '<｜DSML｜invoke name="f"></｜DSML｜tool_calls>',
        '<｜DSML｜invoke name="f">text</｜DSML｜invoke>',
        '<｜DSML｜invoke name="f"><｜DSML｜parameter string="true">x</｜DSML｜parameter>'
        "</｜DSML｜invoke>",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="maybe">1</｜DSML｜parameter>'
        "</｜DSML｜invoke>",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">no</｜DSML｜parameter>'
        "</｜DSML｜invoke>",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">NaN'
        "</｜DSML｜parameter></｜DSML｜invoke>",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="a" string="true">2</｜DSML｜parameter></｜DSML｜invoke>',
        '<｜DSML｜invoke name="f"></｜DSML｜invoke>and<｜DSML｜invoke name="g"></｜DSML｜invoke>',
        '<｜DSML｜invoke name="' + "f" * 5000 + '"></｜DSML｜invoke>',
    ],
)
@pytest.mark.parametrize("thinking", [False, True])
def test_a_malformed_block_comes_out_as_the_text_it_is(inner, thinking):
    text = f"a\n\n<｜DSML｜tool_calls>{inner}</｜DSML｜tool_calls> b"
    kind = Reasoning if thinking else Content
    assert whole(text, thinking=thinking) == [kind(text)]
    assert parse(bytewise(text.encode()), thinking=thinking) == [kind(text)]


@pytest.mark.parametrize("cut", range(1, len(one_call('{"p": "v"}').encode()), 3))
def test_an_unterminated_block_comes_out_as_the_text_it_is(cut):
    data = b"a" + one_call('{"p": "v"}').encode()[:cut]
    parser = OutputParser(thinking=False, policy=PARSE)
    events = merged(parser.feed(data) + parser.finish())
    assert events == [Content(data.decode(errors="replace"))] or b"\xef" in data[-3:]
    assert "".join(e.text for e in events).startswith("a")
    assert parser.n_calls == 0


def test_reasoning_that_quotes_the_opening_marker_still_ends_at_its_marker():
    text = "I write <｜DSML｜tool_calls> to call.</think>Hello"
    assert whole(text, thinking=True) == [
        Reasoning("I write <｜DSML｜tool_calls> to call."),
        Content("Hello"),
    ]


def test_a_quoted_marker_does_not_hide_a_real_call():
    events = whole("I write <tool_calls> to call." + one_call())
    assert events[0] == Content("I write <tool_calls> to call.")
    assert isinstance(events[-1], BlockEnd)


@pytest.mark.parametrize("n_failed", [7, 8])
def test_after_eight_failed_blocks_markers_are_text(n_failed):
    events = whole("<tool_calls>x" * n_failed + one_call())
    assert isinstance(events[-1], BlockEnd) is (n_failed < 8)


@given(SNIPPETS)
def test_without_tools_every_byte_of_an_answer_is_text(text):
    assert whole(text, policy=TEXT) == ([Content(text)] if text else [])


@given(UNICODE, SNIPPETS, st.booleans())
def test_where_calls_are_forbidden_no_markup_is_ever_shown(text, broken, thinking):
    lead = text.rstrip("\n")
    for source in (lead + one_call() + "\nrest", f"{lead}<｜DSML｜tool_calls>{broken}"):
        events = whole(source, policy=DROP, thinking=thinking)
        joined = "".join(event.text for event in events)
        assert "tool_calls" not in joined
        assert joined.startswith(lead)


def test_where_calls_are_forbidden_a_block_ends_the_turn_without_calls():
    parser = OutputParser(thinking=False, policy=DROP)
    assert parser.feed(("a" + one_call() + "b").encode()) == [Content("a")]
    assert parser.finished
    assert parser.n_calls == 0
    # Without the marker it is far likelier to be prose.
    assert whole("write <tool_calls> so", policy=DROP) == [Content("write <tool_calls> so")]


@given(st.binary(max_size=60))
def test_bytes_that_are_not_utf8_are_shown_replaced_one_by_one(data):
    events = parse([data], policy=TEXT)
    expected = data.decode("utf-8", errors="surrogateescape")
    expected = "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in expected)
    assert shown(events, Content) == expected


def test_bytes_that_are_not_utf8_stay_in_the_sampled_text():
    raw = one_call('{"p": "XX"}').encode().replace(b"XX", b"\xff\xe2\x82")
    events = parse(bytewise(raw))
    assert events[-1] == BlockEnd(raw, 1)
    assert events[-2].arguments == '{"p": "\ufffd\ufffd\ufffd"}'


# --- parser: laws ---------------------------------------------------------------------------------

OUTPUT = st.lists(
    UNICODE | SNIPPETS | CALLS.map(block) | st.just("</think>"), min_size=1, max_size=4
).map("".join)


@given(OUTPUT, st.booleans(), st.sampled_from(ToolPolicy), st.data())
def test_any_cut_gives_the_same_events(text, thinking, policy, data):
    raw = text.encode()
    expected = parse([raw], thinking=thinking, policy=policy)
    assert parse(bytewise(raw), thinking=thinking, policy=policy) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert parse(pieces, thinking=thinking, policy=policy) == expected


@given(OUTPUT, st.booleans(), st.integers(1, 200))
def test_any_cut_gives_the_same_events_under_a_block_limit(text, thinking, limit):
    raw = text.encode()
    expected = parse([raw], thinking=thinking, max_block_chars=limit)
    assert parse(bytewise(raw), thinking=thinking, max_block_chars=limit) == expected


@given(OUTPUT, st.booleans())
def test_nothing_is_lost_invented_or_reordered(text, thinking):
    events = whole(text, thinking=thinking)
    texts = [event for event in events if isinstance(event, Content | Reasoning)]
    raw = b"".join(event.raw for event in events if isinstance(event, BlockEnd)).decode()
    # Reasoning comes first and only once; only its closing marker is left out of the text.
    assert [type(event) for event in texts] in ([], [Reasoning], [Content], [Reasoning, Content])
    reasoning, content = shown(events, Reasoning), shown(events, Content)
    assert not reasoning or thinking
    assert not (thinking and content) or "</think>" in text
    closings = ["", "</think>"] if thinking else [""]
    spelled = [reasoning + closing + content + raw for closing in closings]
    assert any(text.startswith(s) if raw else text == s for s in spelled)


@given(OUTPUT)
def test_calls_are_reported_whole_or_not_at_all(text):
    events = whole(text)
    open_call: list[str] | None = None
    for event in events:
        match event:
            case CallStart():
                assert open_call is None
                open_call = []
            case CallArguments(_, fragment):
                open_call.append(fragment)
            case CallEnd(_, _, arguments, _):
                assert "".join(open_call) == arguments
                assert isinstance(json.loads(arguments), dict)
                open_call = None
    assert open_call is None
    assert isinstance(events[-1], BlockEnd) if any(type(e) is CallEnd for e in events) else True


@given(OUTPUT, st.booleans())
def test_what_is_held_back_is_bounded_and_comes_out_when_the_turn_ends(text, thinking):
    parser = OutputParser(thinking=thinking, policy=PARSE)
    shown_count = 0
    for taken, byte in enumerate(bytewise(text.encode()), start=1):
        events = parser.feed(byte)
        shown_count += sum(
            len(e.text.encode()) for e in events if isinstance(e, Content | Reasoning)
        )
        if not parser.in_block and not parser.finished:
            # One unfinished marker of at most 26 bytes, two newlines, three bytes of a character,
            # and the closing think marker, which is never shown.
            assert taken - shown_count <= 26 + 2 + 3 + len("</think>")


def test_a_block_beyond_the_limit_is_text_again():
    text = one_call(json.dumps({"p": "x" * 500}))
    assert whole(text, max_block_chars=400) == [Content(text)]
    with pytest.raises(ConfigError, match="max_block_chars must be at least 1, got 0"):
        OutputParser(thinking=False, policy=PARSE, max_block_chars=0)


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_calls>",
        '<tool_calls><invoke name="a"><parameter name="b">',
        "<tool_calls>\n",
        "<｜DSML｜",
        "\n",
        "<",
        "&amp;",
    ],
)
def test_hostile_output_is_parsed_in_linear_time(unit):
    data = (unit * (200_000 // len(unit))).encode()
    pieces = [data[i : i + 7] for i in range(0, len(data), 7)]
    start = time.process_time()
    events = parse(pieces)
    elapsed_s = time.process_time() - start
    assert shown(events, Content) == data.decode()
    assert elapsed_s < 10  # measured well under 2 s; quadratic work takes minutes


def test_a_long_payload_is_parsed_in_linear_time():
    value = "some text, <b>tags</b> and \n lines " * 30_000
    data = one_call(json.dumps({"p": value})).encode()
    start = time.process_time()
    events = parse(data[i : i + 4] for i in range(0, len(data), 4))
    elapsed_s = time.process_time() - start
    assert json.loads(events[-2].arguments) == {"p": value}
    assert elapsed_s < 20  # measured under 2 s for a megabyte in 4-byte pieces


# --- parser: structure ----------------------------------------------------------------------------


def test_structure_is_told_from_payload_at_every_token():
    parser = OutputParser(thinking=False, policy=PARSE)
    steps = [
        (b"Hello <", False),
        (Mark.DSML, True),
        (b"tool_calls>\n<", True),
        (Mark.DSML, True),
        (b'invoke name="f', True),
        (b'">\n<', True),
        (Mark.DSML, True),
        (b'parameter name="p" string="true', True),
        (b'">', False),
        (b"value <b", False),
        (b" </", False),
        (Mark.DSML, True),
        (b"not the end", False),
        (b"</", False),
        (Mark.DSML, True),
        (b"parameter>", True),
        (b"\n</", True),
        (Mark.DSML, True),
        (b"invoke>", True),
        (b"\n</", True),
        (Mark.DSML, True),
        (b"tool_calls>", False),
    ]
    assert not parser.in_structure
    for index, (piece, structure) in enumerate(steps):
        parser.feed(piece)
        assert parser.in_structure is structure, (index, piece)
    assert parser.finished


def test_markup_is_never_structure_where_it_is_text():
    parser = OutputParser(thinking=False, policy=TEXT)
    parser.feed(b"<")
    parser.feed(Mark.DSML)
    assert not parser.in_structure


@pytest.mark.parametrize("name", [None, "look"])
def test_a_forced_call_continues_the_opening_put_into_the_prompt(name):
    opening = pieces_text(render_call_opening(name))
    rest = one_call('{"a": 1}', "look").removeprefix(opening)
    parser = OutputParser(thinking=False, policy=PARSE)
    assert parser.feed(opening.encode()) == []
    assert parser.in_block
    events = parser.feed(rest.encode())
    assert events[0] == CallStart(0, "look")
    assert events[-1] == BlockEnd((opening + rest).encode(), 1)


def test_sampled_tokens_become_pieces():
    tokenizer = tiny_tokenizer()
    special = tokenizer.special
    assert piece_of(tokenizer, special.think) is Mark.THINK
    assert piece_of(tokenizer, special.end_think) is Mark.END_THINK
    assert piece_of(tokenizer, special.dsml) is Mark.DSML
    assert piece_of(tokenizer, special.eos) is None
    assert piece_of(tokenizer, special.user) is None
    (token,) = tokenizer.encode("in", special=False)
    assert piece_of(tokenizer, token) == b"in"


# --- stop strings ---------------------------------------------------------------------------------


def stop_reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the earliest end wins, then the longest string."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


AB = st.text("ab\n", min_size=1, max_size=5)


@given(st.text("ab\n", max_size=20), st.lists(AB, max_size=4), st.data())
def test_stop_strings_end_the_text_alike_however_it_is_cut(text, stops, data):
    expected = stop_reference(text, stops)
    matcher = StopMatcher(stops)
    out, rest = "", text
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        out += matcher.feed(rest[:n])
        assert expected[0].startswith(out)
        rest = rest[n:]
    out += matcher.flush()
    assert (out, matcher.matched) == expected


@given(st.text("ab\n", max_size=20), st.lists(AB, max_size=4))
def test_no_more_is_withheld_than_could_begin_a_stop_string(text, stops):
    matcher = StopMatcher(stops)
    out = "".join(matcher.feed(c) for c in text)
    if matcher.matched is None:
        held = text[len(out) :]
        assert not held or any(s.startswith(held) for s in stops)
        longer = [text[i:] for i in range(len(out))]
        assert not any(s.startswith(suffix) for s in stops for suffix in longer)


def test_after_a_stop_string_nothing_more_is_shown():
    matcher = StopMatcher(["END"])
    assert matcher.feed("aEN") == "a"
    assert matcher.feed("Db") == ""
    assert matcher.matched == "END"
    assert matcher.feed("c") == matcher.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequest, match="must not be empty"):
        StopMatcher(["a", ""])
