import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.model.effort import EffortText, EffortTexts, find_effort_texts

FIRST = "Reasoning Effort: Absolute maximum of a test.\nSecond line.\nThird — line.\n\n"
SECOND = "Reasoning Effort: Beyond maximum — of a test.\nMore.\n\n"


def known(text: str) -> EffortText:
    raw = text.encode()
    return EffortText(start=text[:30], n_bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())


def find(template: str | None) -> EffortTexts:
    return find_effort_texts(template, absolute_maximum=known(FIRST), beyond_maximum=known(SECOND))


@pytest.mark.parametrize(
    "template",
    [
        "{%- set h = " + json.dumps(FIRST) + " %}{{ h }}",
        "{% set h = " + json.dumps(FIRST[:40]) + " + " + json.dumps(FIRST[40:]) + " %}",
        "{% set h = " + json.dumps(FIRST[:40]) + " ~ " + json.dumps(FIRST[40:]) + " %}",
        "{% if e == 'max' %}" + FIRST + "{% endif %}",
        "{{ {'low': '', 'high': " + json.dumps("x" + FIRST + "y") + "}[e] }}",
        "{% broken " + FIRST,
    ],
    ids=["set", "plus", "tilde", "output", "inside a dict", "not a template"],
)
def test_a_text_is_found_wherever_a_template_holds_it(template):
    assert find(template) == EffortTexts(absolute_maximum=FIRST)


def test_both_texts_are_found_in_one_template():
    template = "{{ {'high': " + json.dumps(FIRST) + ", 'max': " + json.dumps(SECOND) + "}[e] }}"
    assert find(template) == EffortTexts(absolute_maximum=FIRST, beyond_maximum=SECOND)


@pytest.mark.parametrize("at", [30, 50, len(FIRST) - 3])
def test_a_changed_text_is_not_taken(at):
    changed = FIRST[:at] + "X" + FIRST[at + 1 :]
    assert find("{{ " + json.dumps(changed) + " }}") == EffortTexts()


def test_the_first_wrong_occurrence_does_not_hide_a_right_one():
    assert find("{{ " + json.dumps(FIRST[:35] + FIRST) + " }}").absolute_maximum == FIRST


def test_a_file_without_a_template_has_no_texts():
    assert find(None) == find("") == find("{{ messages }}") == EffortTexts()


@given(st.text())
def test_any_template_text_is_survived(template):
    assert find_effort_texts(template) == EffortTexts()


@pytest.mark.parametrize(
    "template", ["{{ 9**9**9 }}", "{{ 'a' * 10**12 }}", "{{ " + "'a'+" * 9999 + "'a' }}"]
)
def test_costly_constants_are_not_evaluated(template):
    assert find_effort_texts(template) == EffortTexts()
