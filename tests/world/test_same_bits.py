"""Worlds of real processes through the command line: the same logits, the scheduled bytes.

A few cases, because each world costs seconds; `tools/check_worlds.py` runs them all.
"""

from __future__ import annotations

import attrs
import pytest

from ds4.api import bundled_model
from tools.check_worlds import Case, Checker, Found, check

ALONE = ("ep", 1, 64)
FEW = {
    "contiguous": [ALONE, ("tp", 2, 16)],
    "explicit": [ALONE, ("ep", 2, 16), ("tp", 4, 64)],
    "balanced": [ALONE, ("tp", 2, 16)],
}


@pytest.fixture(scope="module")
def checker(tmp_path_factory):
    return Checker(str(bundled_model()), tmp_path_factory.mktemp("worlds"))


def verdicts(checker, placement, cases):
    every = [Case(placement=placement, mode=m, world=n, chunk=c) for m, n, c in cases]
    return list(check(checker, every))


@pytest.mark.slow
@pytest.mark.parametrize("placement", list(FEW))
def test_modes_ranks_and_chunks_change_no_bit_of_the_logits(checker, placement):
    found = verdicts(checker, placement, FEW[placement])
    assert [verdict for _, verdict in found] == ["ok"] * len(FEW[placement])
    for one, _ in found:
        assert len(one.sent) == (one.case.world if one.case.world > 1 else 0)
        assert all(one.sent)


@pytest.mark.slow
def test_eight_ranks_give_the_bits_of_one(checker):
    cases = [ALONE, ("ep", 8, 64), ("tp", 8, 16)]
    assert [verdict for _, verdict in verdicts(checker, "balanced", cases)] == ["ok"] * 3


class Canned:
    """Gives prepared results in place of worlds."""

    def __init__(self, *found):
        self.found = iter(found)

    def run(self, case):
        return attrs.evolve(next(self.found), case=case)


TWO = Found(
    case=Case(placement="balanced", mode="ep", world=2, chunk=16),
    logits=b"same",
    sent=(8, 8),
    expected=(8, 8),
)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "ok"),
        ({"logits": b"samf"}, "differ"),
        ({"sent": (8, 7)}, "schedule"),
        ({"sent": (0, 0), "expected": (0, 0)}, "schedule"),
        ({"problem": "3: rank 1 lost"}, "rank 1 lost"),
    ],
)
def test_the_check_finds_what_is_wrong(changes, says):
    checker = Canned(TWO, attrs.evolve(TWO, **changes))
    assert says in verdicts(checker, "balanced", [("ep", 2, 16)] * 2)[1][1]
