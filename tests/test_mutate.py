"""The table of mutations follows the code: every old text is in its file exactly once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import attrs
import pytest

from ds4.protocol.identity import Geometry

ROOT = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("ds4_mutate", ROOT / "tools" / "mutate.py")
mutate = importlib.util.module_from_spec(_SPEC)
sys.modules["ds4_mutate"] = mutate  # attrs resolves annotations through it
_SPEC.loader.exec_module(mutate)


@pytest.mark.parametrize("mutation", mutate.MUTATIONS, ids=lambda m: m.id)
def test_every_old_text_is_in_its_file_exactly_once_and_every_test_exists(mutation):
    assert mutation.tests
    for edit in mutation.edits:
        assert (ROOT / edit.file).read_text(encoding="utf-8").count(edit.old) == 1
        assert edit.new != edit.old
    for test in mutation.tests:
        path, name = test.split("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name.split('[')[0]}(" in text


def test_every_letter_of_the_table_has_a_mutation_and_ids_are_unique():
    ids = [m.id for m in mutate.MUTATIONS]
    assert len(set(ids)) == len(ids)
    assert {i.split(".")[0] for i in ids} == set("ABCDEFGHIJKLMNOPQRST")


def test_every_geometry_field_that_must_be_equal_is_left_out_in_turn():
    must = {a.name for a in attrs.fields(Geometry) if not a.metadata.get("warn_only")}
    assert set(mutate.FIELDS) == must


def test_applying_and_restoring_leaves_the_tree_as_it_was(tmp_path):
    for mutation in mutate.MUTATIONS:
        files = {edit.file for edit in mutation.edits}
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes((ROOT / name).read_bytes())
        originals = mutate.apply(mutation, tmp_path)
        for name in files:
            changed = (tmp_path / name).read_text(encoding="utf-8")
            assert changed != (ROOT / name).read_text(encoding="utf-8")
            compile(changed, name, "exec")
        mutate.restore(originals)
        for name in files:
            assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()


def test_a_text_that_is_gone_is_an_error_and_changes_nothing(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    edits = (mutate.Edit("a.py", "x = 1", "x = 2"), mutate.Edit("a.py", "y = 1", "y = 2"))
    with pytest.raises(mutate.TableError, match=r"Z: 0 places in a\.py"):
        mutate.apply(mutate.Mutation("Z", "none", edits, ("t",)), tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1\n"


def test_an_unknown_name_is_an_error():
    assert [m.id for m in mutate.select("K")] == ["K", "K.arity"]
    assert [m.id for m in mutate.select("A,G.check")] == ["A", "G.check"]
    with pytest.raises(mutate.TableError, match="no mutation 'Z'"):
        mutate.select("A,Z")
