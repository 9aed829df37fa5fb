"""docs/PROTOCOL.md says what the code does: generated parts, reasons, and the example."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ds4.protocol.messages import MESSAGES
from ds4.protocol.state import State
from tools import draw_protocol

ROOT = Path(__file__).resolve().parents[2]
TEXT = draw_protocol.DOCUMENT.read_text()


def test_the_generated_parts_are_up_to_date():
    assert draw_protocol.rewrite(TEXT) == TEXT, "run python tools/draw_protocol.py"


def test_a_part_without_a_place_is_an_error():
    with pytest.raises(ValueError, match="setup diagram"):
        draw_protocol.rewrite(TEXT.replace("<!-- begin setup diagram -->", ""))


def test_the_check_option_notices_a_stale_document(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "PROTOCOL.md"
    stale.write_text(TEXT.replace("W hello", "W goodbye"))
    monkeypatch.setattr(draw_protocol, "DOCUMENT", stale)
    monkeypatch.setattr(sys, "argv", ["draw_protocol.py", "--check"])
    assert draw_protocol.main() == 1
    assert "out of date" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["draw_protocol.py"])
    assert draw_protocol.main() == 0
    assert stale.read_text() == TEXT


def test_every_state_and_message_is_drawn():
    drawn = draw_protocol.setup_diagram() + draw_protocol.ending_diagram()
    for state in State:
        assert state.value in drawn
    for message in MESSAGES:
        assert f"`{message.NAME}`" in TEXT


def reasons():
    """Every reason that the package can give, read off its source."""
    found = set()
    for path in (ROOT / "ds4" / "protocol").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            values = [k.value for k in node.keywords if k.arg == "reason"]
            if getattr(node.func, "id", "") == "Illegal":
                values.append(node.args[0])
            found |= {
                value.value
                for value in values
                if isinstance(value, ast.Constant) and path.name != "handshake.py"
            }
    return found


def test_every_reason_is_documented():
    assert reasons()
    assert {reason for reason in reasons() if f"`{reason}`" not in TEXT} == set()


def test_the_example_holds_a_whole_conversation():
    """`examples/raw_protocol.py` runs as the document's reader would run it."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "raw_protocol.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert "the token is 42" in done.stdout
    assert done.stdout.splitlines()[-1].split()[-1] == "stopped"
    assert not done.stderr
