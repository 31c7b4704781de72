"""Histories as words.

`+a` committed a, `<a` rolled back to a by request, `-a` failed by a's own fault, `!a` by the host's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelswap import ledger
from kernelswap.protocol import Cause, Report, Request


def history(words: str) -> list[Report]:
    reports = []
    for word in words.split():
        kind, release = word[0], word[1:]
        request = Request("id", "main", "rollback" if kind == "<" else "converge", release, "ann@desk")
        outcome = "committed" if kind in "+<" else "rolled-back"
        cause = {"-": Cause("x", "y", "z", blame="release"), "!": Cause("x", "y", "z")}.get(kind)
        reports.append(Report(request, outcome, 1.0, 2.0, cause=cause))
    return reports


@pytest.mark.parametrize(
    ("words", "stack", "bad", "target"),
    [
        ("", [], set(), None),
        ("+a", ["a"], set(), None),
        ("+a +a", ["a"], set(), None),
        ("+a +b", ["a", "b"], set(), "a"),
        ("+a +b <a", ["a"], set(), None),
        ("+a +b +c <b <a", ["a"], set(), None),
        ("+a +b +c <b", ["a", "b"], set(), "a"),
        ("+a -b", ["a"], {"b"}, None),
        ("+a !b", ["a"], set(), None),
        ("+a -b +b", ["a", "b"], set(), "a"),
        ("+a +b +a", ["a", "b", "a"], set(), "b"),
        ("+a +b -a", ["a", "b"], {"a"}, None),
        ("+a +b +c -b", ["a", "b", "c"], {"b"}, "a"),
        ("+a +b +gone +c", ["a", "b", "gone", "c"], set(), "b"),
    ],
)
def test_history(words: str, stack: list[str], bad: set[str], target: str | None) -> None:
    reports = history(words)
    assert ledger.commits(reports) == stack
    assert ledger.barred(reports) == bad
    assert ledger.rollback_target(reports, {"a", "b", "c"}) == target


def test_what_is_pruned_stays_counted() -> None:
    numbered = enumerate(history("+a !b +c -d"))
    reports = [replace(each, request=replace(each.request, swap=f"2026-{n:02}")) for n, each in numbered]
    whole = ledger.tally(ledger.Tally(), reports)
    assert sum(whole.outcomes.values()) == len(reports)
    for pruned in range(len(reports) + 1):
        before = ledger.tally(ledger.Tally(), reports[:pruned])
        assert ledger.tally(before, reports) == whole  # as after a prune that was cut short
        assert ledger.tally(before, reports[pruned:]) == whole
