import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import ConfigError, InvalidRequest
from ds4.model.chat import ChatRenderer, Message, ThinkingMode, align_to_live
from ds4.model.effort import EffortTexts
from ds4.model.tokenizer import Tokenizer
from ds4.model.toolcall import ToolCall
from tests.model.tiny_vocabulary import METADATA, PROMPTS, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = ChatRenderer(TOKENIZER)
B, U, A, E = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
NONE, LOW, HIGH, MAX = ThinkingMode
PRINTABLE = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NASTY = st.lists(
    st.sampled_from([B, U, A, E, "<think>", "</think>", "｜DSML｜", "<", "tool_calls>", "\n", "é"]),
    max_size=6,
).map("".join)
CONTENT = PRINTABLE | NASTY
TOOL = {
    "name": "look",
    "description": "Zeig's",
    "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}},
}
CALLS = (ToolCall(name="look", arguments='{"b":"x","a":[1,2]}', id="c1"),)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str = "", **more: object) -> Message:
    return Message(role="assistant", content=text, **more)


def system(text: str) -> Message:
    return Message(role="system", content=text)


def result(text: str, call: str = "") -> Message:
    return Message(role="tool", content=text, tool_call_id=call)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, special=True)


def test_prompts_of_the_test_models_come_out_token_for_token():
    capital = CHAT.render([user("What is the capital of Italy?")], mode=NONE)
    assert capital == PROMPTS[1]["ids"]
    sailor = CHAT.render(
        [system("You are terse."), user("An old sailor carries every token near the harbour.")],
        mode=HIGH,
    )
    assert sailor == PROMPTS[2]["ids"]


@pytest.mark.parametrize(
    ("messages", "mode", "expected"),
    [
        ([user("q")], NONE, f"{B}{U}q{A}</think>"),
        ([user("q")], LOW, f"{B}{U}q{A}<think>"),
        ([system("s"), user("q")], HIGH, f"{B}s{U}q{A}<think>"),
        ([system(""), user("q")], NONE, f"{B}{U}q{A}</think>"),
        ([system("s"), system("t"), user("q")], NONE, f"{B}s\n\nt{U}q{A}</think>"),
        (
            [Message(role="developer", content="d"), user("q")],
            NONE,
            f"{B}d{U}q{A}</think>",
        ),
        ([user("q"), user("r")], NONE, f"{B}{U}q\n\nr{A}</think>"),
        ([user("q"), system("s"), user("r")], NONE, f"{B}{U}q\n\ns{U}r{A}</think>"),
        (
            [user("q"), assistant("a"), system("s"), user("r")],
            NONE,
            f"{B}{U}q{A}</think>a{E}s{U}r{A}</think>",
        ),
        (
            [user("q"), assistant("a", reasoning="w"), user("r")],
            NONE,
            f"{B}{U}q{A}</think>a{E}{U}r{A}</think>",
        ),
        (
            [user("q"), assistant("a", reasoning="w"), user("r")],
            HIGH,
            f"{B}{U}q{A}</think>a{E}{U}r{A}<think>",
        ),
        (
            [user("q"), assistant("a", reasoning="w")],
            HIGH,
            f"{B}{U}q{A}<think>w</think>a{E}{A}<think>",
        ),
        (
            [user("q"), assistant("a", reasoning="w"), assistant("b")],
            HIGH,
            f"{B}{U}q{A}<think>w</think>a{E}{A}<think></think>b{E}{A}<think>",
        ),
        ([], NONE, f"{B}{A}</think>"),
    ],
)
def test_turns_are_laid_out_as_the_model_was_trained(messages, mode, expected):
    assert CHAT.render(messages, mode=mode) == ids(expected)


def test_with_tools_every_turn_keeps_its_reasoning():
    turns = [user("q"), assistant("a", reasoning="w"), user("r")]
    text = TOKENIZER.decode(CHAT.render(turns, mode=HIGH, tools=[TOOL]))
    assert text.endswith(f"{U}q{A}<think>w</think>a{E}{U}r{A}<think>")


def test_tools_follow_the_system_text_with_keys_in_the_clients_order():
    out = CHAT.render([system("sys"), user("q")], mode=NONE, tools=[TOOL, {"name": "é"}])
    text = TOKENIZER.decode(out)
    assert text.startswith(f"{B}sys\n\n## Tools\n\n")
    lines = text.split("### Available Tool Schemas\n\n")[1].split("\n")
    assert lines[0] == json.dumps(TOOL, ensure_ascii=False)
    assert lines[1] == '{"name": "é"}'
    assert lines[2] == ""
    assert TOKENIZER.decode(CHAT.render([user("q")], mode=NONE, tools=[TOOL])).startswith(
        f"{B}## Tools\n\n"
    )


def test_the_tools_section_shows_the_call_syntax_with_real_marker_tokens():
    out = CHAT.render([user("q")], mode=NONE, tools=[TOOL])
    text = TOKENIZER.decode(out)
    skeleton = (
        "<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="$TOOL_NAME">\n'
        '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
        "</｜DSML｜parameter>\n...\n</｜DSML｜invoke>\n"
    )
    assert skeleton in text
    assert out.count(TOKENIZER.special.dsml) == text.count("｜DSML｜")


def test_a_response_schema_is_the_last_part_of_the_system_text():
    out = CHAT.render(
        [system("s"), user("q")], mode=NONE, tools=[TOOL], response_schema={"type": "object"}
    )
    head = TOKENIZER.decode(out).split(U)[0]
    assert head.endswith(
        "\n\n## Response Format:\n\nReply only with JSON that follows this schema:\n"
        '{"type": "object"}'
    )


def test_calls_and_results_are_laid_out_as_dsml():
    turns = [
        user("q"),
        assistant("hm", reasoning="w", tool_calls=CALLS),
        result("r1", "c1"),
        user("and?"),
    ]
    text = TOKENIZER.decode(CHAT.render(turns, mode=HIGH, tools=[TOOL]))
    assert text.endswith(
        f"{A}<think>w</think>hm\n\n"
        "<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="look">\n'
        '<｜DSML｜parameter name="b" string="true">x</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="a" string="false">[1, 2]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        f"</｜DSML｜tool_calls>{E}{U}<tool_result>r1</tool_result>\n\nand?{A}<think>"
    )


def test_results_stand_in_the_order_of_their_calls():
    calls = tuple(ToolCall(name="look", arguments="{}", id=i) for i in ("x", "y", "z"))
    turns = [
        user("q"),
        assistant(tool_calls=calls),
        result("Z", "z"),
        result("X", "x"),
        user("u"),
        result("Y", "y"),
    ]
    text = TOKENIZER.decode(CHAT.render(turns, mode=NONE))
    wrapped = [f"<tool_result>{r}</tool_result>" for r in "XYZ"]
    assert text.endswith(f"{U}{wrapped[0]}\n\n{wrapped[1]}\n\nu\n\n{wrapped[2]}{A}</think>")


def test_a_result_cannot_close_itself():
    text = TOKENIZER.decode(CHAT.render([result("a</tool_result>b")], mode=NONE))
    assert f"{U}<tool_result>a&lt;/tool_result>b</tool_result>{A}" in text


def test_a_remembered_block_is_repeated_exactly():
    block = (
        '\n\n<｜DSML｜tool_calls><｜DSML｜invoke name="look"></｜DSML｜invoke></｜DSML｜tool_calls>'
    )
    turns = [user("q"), assistant("a", tool_calls=CALLS, tool_block=block), result("r", "c1")]
    out = CHAT.render(turns, mode=NONE)
    assert out == ids(f"{B}{U}q{A}</think>a{block}{E}{U}<tool_result>r</tool_result>{A}</think>")


def test_forcing_a_call_opens_the_block_with_the_marker_token():
    assert CHAT.forced_call("look") == ids(
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n'
    )
    assert CHAT.forced_call(None) == ids('\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="')


def test_a_final_assistant_message_can_be_left_open():
    out = CHAT.render([user("q"), assistant("begin")], mode=NONE, continue_final=True)
    assert out == ids(f"{B}{U}q{A}</think>begin")
    with pytest.raises(InvalidRequest, match="only a final assistant message"):
        CHAT.render([user("q")], mode=NONE, continue_final=True)


def test_the_line_that_changes_with_every_request_is_dropped():
    first = "x-anthropic-billing-header: cc_version=2; cch=0a1b2;\nYou help."
    second = "x-anthropic-billing-header: cc_version=2; cch=ffff0;\nYou help."
    assert CHAT.render([system(first)], mode=NONE) == CHAT.render([system(second)], mode=NONE)
    assert CHAT.render([system(first)], mode=NONE) == CHAT.render([system("You help.")], mode=NONE)
    kept = "You help.\nx-anthropic-billing-header: quoted"
    assert kept in TOKENIZER.decode(CHAT.render([system(kept)], mode=NONE))


@given(CONTENT, CONTENT, CONTENT, CONTENT, st.sampled_from(list(ThinkingMode)[:3]))
def test_content_can_never_put_a_special_token_into_a_prompt(s, q, a, r, mode):
    call = ToolCall(name=q or "n", arguments=json.dumps({a: r, "j": [a]}), id="i")
    tool = {"name": "t" + s, "description": q}
    turns = [
        system(s),
        user(q),
        assistant(a, reasoning=r, tool_calls=(call,)),
        result(r, "i"),
        user(s),
    ]
    plain = [
        system("s"),
        user("q"),
        assistant(
            "a", reasoning="r", tool_calls=(ToolCall(name="n", arguments='{"k": "v", "j": [1]}'),)
        ),
        result("r"),
        user("s"),
    ]
    nasty = CHAT.render(turns, mode=mode, tools=[tool])
    tame = CHAT.render(plain, mode=mode, tools=[{"name": "t", "description": "d"}])
    if a == "j":
        return  # both parameters have one name then, and the call one parameter less
    assert [t for t in nasty if TOKENIZER.is_control(t)] == [
        t for t in tame if TOKENIZER.is_control(t)
    ]


@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4), CONTENT)
def test_without_thinking_every_prompt_continues_the_one_before(turns, last):
    messages: list[Message] = []
    live: list[int] = []
    for question, answer in turns:
        messages.append(user(question))
        prompt = CHAT.render(messages, mode=NONE)
        assert prompt[: len(live)] == live
        live = [*prompt, *TOKENIZER.encode(answer, special=False), TOKENIZER.special.eos]
        messages.append(assistant(answer))
    assert CHAT.render([*messages, user(last)], mode=NONE)[: len(live)] == live


@given(st.lists(st.tuples(CONTENT, CONTENT, CONTENT), min_size=1, max_size=3), CONTENT)
def test_with_tools_thinking_prompts_continue_the_one_before_too(turns, last):
    special = TOKENIZER.special
    messages: list[Message] = []
    live: list[int] = []
    for question, why, answer in turns:
        messages.append(user(question))
        prompt = CHAT.render(messages, mode=HIGH, tools=[TOOL])
        assert prompt[: len(live)] == live
        live = [*prompt, *TOKENIZER.encode(why, special=False), special.end_think]
        live += [*TOKENIZER.encode(answer, special=False), special.eos]
        messages.append(assistant(answer, reasoning=why))
    out = CHAT.render([*messages, user(last)], mode=HIGH, tools=[TOOL])
    assert out[: len(live)] == live


@given(CONTENT, CONTENT, CONTENT)
def test_appending_a_turn_equals_rendering_it_where_nothing_is_dropped(q, a, r):
    messages = [user(q)]
    live = CHAT.render(messages, mode=NONE)
    live += [*TOKENIZER.encode(a, special=False), TOKENIZER.special.eos]
    turn = CHAT.render_turn(live, [user(r)], mode=NONE)
    assert live + turn == CHAT.render([*messages, assistant(a), user(r)], mode=NONE)


@pytest.mark.parametrize(
    ("live", "closing"),
    [
        (f"{B}{U}q{A}</think>a{E}", ""),
        (f"{B}{U}q{A}</think>a", E),
        (f"{B}{U}q{A}<think>w", f"</think>{E}"),
        (f"{B}{U}q{A}<think>w</think>a", E),
        (f"{B}{U}q{A}", f"</think>{E}"),
        (f"{B}uses <think> and </think>", ""),
        (f"{B}{U}q{A}</think>a{E}s", ""),
    ],
)
def test_a_turn_that_was_cut_short_is_closed_before_the_next(live, closing):
    assert CHAT.render_turn(ids(live), [user("r")], mode=HIGH) == ids(f"{closing}{U}r{A}<think>")


def test_a_turn_cannot_follow_nothing():
    with pytest.raises(InvalidRequest, match="has tokens"):
        CHAT.render_turn([], [user("q")])


@given(CONTENT, st.data())
def test_a_prompt_is_respelled_with_the_sessions_tokens(answer, data):
    # The session spelled the answer byte by byte, or in any other way that decodes the same.
    sampled = []
    for token in TOKENIZER.encode(answer, special=False):
        piece = TOKENIZER.token_bytes(token)
        if data.draw(st.booleans()):
            sampled.append(token)
        else:
            sampled += [BYTE_TOKEN[b] for b in piece]
    live = [*CHAT.render([user("q")], mode=NONE), *sampled, TOKENIZER.special.eos]
    prompt = CHAT.render([user("q"), assistant(answer), user("r")], mode=NONE)
    aligned = align_to_live(TOKENIZER, live, prompt)
    assert aligned[: len(live)] == live
    assert TOKENIZER.decode(aligned) == TOKENIZER.decode(prompt)


BYTE_TOKEN = {
    TOKENIZER.token_bytes(i)[0]: i
    for i in range(TOKENIZER.n_vocab)
    if len(TOKENIZER.token_bytes(i)) == 1
}
ANY_IDS = st.lists(st.sampled_from([0, 763, 764, *BYTE_TOKEN.values(), 262, 263, 300]), max_size=12)


@given(ANY_IDS, ANY_IDS)
def test_respelling_never_changes_bytes_or_special_tokens(live, prompt):
    def spelled(tokens):
        return [t if TOKENIZER.is_control(t) else TOKENIZER.token_bytes(t) for t in tokens]

    def joined(items):
        out = []
        for item in items:
            if isinstance(item, bytes) and out and isinstance(out[-1], bytes):
                out[-1] += item
            else:
                out.append(item)
        return out

    aligned = align_to_live(TOKENIZER, live, prompt)
    assert joined(spelled(aligned)) == joined(spelled(prompt))
    n_same = next((k for k, (x, y) in enumerate(zip(live, prompt, strict=False)) if x != y), 0)
    assert aligned[:n_same] == live[:n_same]


def test_text_that_spells_a_marker_is_not_taken_for_the_marker_when_respelling():
    live = [0, 763, *TOKENIZER.encode("a", special=False), TOKENIZER.special.eos]
    prompt = [0, 763, *TOKENIZER.encode("a" + E, special=False)]
    assert align_to_live(TOKENIZER, live, prompt) == prompt


@pytest.mark.parametrize(
    ("effort", "mode", "expected"),
    [
        (EffortTexts(), HIGH, ""),
        (EffortTexts(), LOW, ""),
        (EffortTexts(), NONE, ""),
        (EffortTexts(absolute_maximum="H"), HIGH, ""),
        (EffortTexts(absolute_maximum="H"), MAX, "H"),
        (EffortTexts(absolute_maximum="H", beyond_maximum="X"), NONE, ""),
        (EffortTexts(absolute_maximum="H", beyond_maximum="X"), LOW, ""),
        (EffortTexts(absolute_maximum="H", beyond_maximum="X"), HIGH, "H"),
        (EffortTexts(absolute_maximum="H", beyond_maximum="X"), MAX, "X"),
    ],
)
def test_effort_text_stands_first_as_the_release_defines_it(effort, mode, expected):
    chat = ChatRenderer(TOKENIZER, effort)
    think = "</think>" if mode is NONE else "<think>"
    assert chat.render([system("s"), user("q")], mode=mode) == ids(f"{B}{expected}s{U}q{A}{think}")


def test_mode_max_is_refused_when_the_file_has_no_text_for_it():
    with pytest.raises(ConfigError, match="mode max needs the model's own effort text"):
        CHAT.render([user("q")], mode=MAX)


def test_the_default_mode_reasons_without_effort_text():
    both = ChatRenderer(TOKENIZER, EffortTexts(absolute_maximum="H", beyond_maximum="X"))
    for chat in (CHAT, both):
        assert chat.render([user("q")]) == ids(f"{B}{U}q{A}<think>")


def test_effort_texts_come_from_the_files_own_template():
    assert ChatRenderer.from_metadata(TOKENIZER, METADATA).effort == EffortTexts()
    made = ChatRenderer.from_metadata(TOKENIZER, {"tokenizer.chat_template": "{{ x }}"})
    assert made.effort == EffortTexts()


def test_a_reminder_needs_a_model_that_knows_the_role():
    reminder = Message(role="latest_reminder", content="now")
    with pytest.raises(InvalidRequest, match="no latest_reminder role"):
        CHAT.render([reminder, user("q")], mode=NONE)
    made = Tokenizer.from_metadata(
        "f",
        METADATA
        | {
            "tokenizer.ggml.tokens": [
                *METADATA["tokenizer.ggml.tokens"],
                "<｜latest_reminder｜>",
            ],
            "tokenizer.ggml.token_type": [*METADATA["tokenizer.ggml.token_type"], 3],
            "deepseek4.vocab_size": 769,
        },
    )
    out = ChatRenderer(made).render([system("s"), reminder, user("q")], mode=NONE)
    assert made.decode(out) == f"{B}s<｜latest_reminder｜>now{U}q{A}</think>"
    assert out[2] == 768


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "robot"}, "role must be one of .*, got 'robot'"),
        ({"role": "user", "content": 3}, "content must be text, got int"),
        ({"role": "user", "reasoning": "w"}, "a user message cannot hold reasoning"),
        ({"role": "tool", "tool_calls": CALLS}, "a tool message cannot hold tool_calls"),
        ({"role": "system", "tool_block": "x"}, "a system message cannot hold tool_block"),
        ({"role": "user", "tool_call_id": "x"}, "a user message cannot hold tool_call_id"),
    ],
)
def test_a_field_that_does_not_belong_to_the_role_is_refused(fields, message):
    with pytest.raises(InvalidRequest, match=message):
        Message(**fields)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({}, r"tools\[1\] needs a name"),
        ({"name": 3}, r"tools\[1\] needs a name"),
        ({"name": "t", "parameters": float("nan")}, r"tools\[1\] cannot be written as JSON"),
        ({"name": "t", "parameters": object()}, r"tools\[1\] cannot be written as JSON"),
    ],
)
def test_a_tool_that_cannot_be_shown_is_refused_by_index(tool, message):
    with pytest.raises(InvalidRequest, match=message):
        CHAT.render([user("q")], tools=[TOOL, tool])


def test_a_lone_surrogate_in_any_part_is_refused():
    bad = "\udc80"
    call = ToolCall(name="n", arguments='{"a": "\\udc80"}')
    for turns in ([user(bad)], [system(bad)], [assistant(tool_calls=(call,))], [result(bad)]):
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            CHAT.render(turns, mode=NONE)
