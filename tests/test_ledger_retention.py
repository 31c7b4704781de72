"""What is deleted changes nothing that a deploy decides: where rollbacks go, and what is barred."""

from __future__ import annotations

from collections.abc import Sequence, Set

from hypothesis import given, settings
from hypothesis import strategies as st
from test_ledger import history

from kernelswap import ledger
from kernelswap.protocol import Report, Retention

NAMES = "abcdef"
HISTORIES = st.lists(st.tuples(st.sampled_from("+++<-!"), st.sampled_from(NAMES)).map("".join), max_size=40)
POLICIES = st.builds(Retention, releases=st.integers(2, 5), swaps=st.integers(1, 12))


def way_back(reports: Sequence[Report], staged: Set[str]) -> list[str]:
    """Where `--rollback` goes, again and again."""
    reports, targets = list(reports), []
    while (target := ledger.rollback_target(reports, staged)) is not None:
        targets.append(target)
        reports += history(f"<{target}")
    return targets


def pruned(
    reports: list[Report], staged: Set[str], policy: Retention, depth: int = ledger.DEPTH
) -> tuple[list[Report], set[str]]:
    """The history and the releases that stay."""
    good = (ledger.commits(reports) or ["none"])[-1]
    releases = ledger.kept_releases(reports, staged, good, policy)
    return ledger.kept_reports(reports, releases, policy, depth)[0], releases


@given(HISTORIES, POLICIES)
@settings(max_examples=500)
def test_rollbacks_lead_where_they_led(words: list[str], policy: Retention) -> None:
    reports = history(" ".join(words))
    kept, releases = pruned(reports, set(NAMES), policy)
    assert len(releases) <= policy.releases
    assert ledger.barred(kept) == ledger.barred(reports)
    assert ledger.commits(kept) == ledger.commits(reports)
    before = way_back(reports, set(NAMES))
    serving = ledger.commits(reports)[-1:]
    reached = list(dict.fromkeys([*serving, *before]))
    assert set(reached[: policy.releases]) <= releases, "the policy counts these first"
    end = next((number for number, target in enumerate(before) if target not in releases), len(before))
    assert way_back(kept, releases)[:end] == before[:end]
    if end == len(before):
        assert way_back(kept, releases) == before


@given(HISTORIES, HISTORIES, POLICIES)
@settings(max_examples=500)
def test_pruned_again_and_again_it_says_the_same(first: list[str], then: list[str], policy: Retention) -> None:
    whole = kept = history(" ".join(first))
    staged = set(NAMES)
    for report in history(" ".join(["+a", *then])):
        if report.request.action == "rollback" and report.request.release not in way_back(kept, staged):
            continue
        whole, kept, staged = [*whole, report], [*kept, report], {*staged, report.request.release}
        kept, staged = pruned(kept, staged, policy)
        assert ledger.barred(kept) == ledger.barred(whole)
        assert way_back(kept, staged) == way_back(whole, staged)


@given(HISTORIES, POLICIES, st.integers(1, 12))
@settings(max_examples=500)
def test_of_a_long_history_the_newest_commits_count(words: list[str], policy: Retention, depth: int) -> None:
    reports = history(" ".join(words))
    kept, releases = pruned(reports, set(NAMES), policy, depth)
    assert ledger.barred(kept) == ledger.barred(reports)
    assert ledger.commits(kept)[-depth:] == ledger.commits(reports)[-depth:]
    assert set(ledger.commits(reports)) & releases <= set(ledger.commits(kept)), "all that stay can be reached"
    assert len(kept) <= 2 * policy.swaps + 1 + depth + policy.releases + len(NAMES)
    assert len(pruned(kept, releases, policy, depth)[0]) == len(kept)


def test_what_stays() -> None:
    reports = history("+a -x +b +c <b !y +d -z +e -z -z")
    staged = set("abcdexyz")
    assert ledger.kept_releases(reports, staged, "e", Retention(3)) == set("edb")
    assert ledger.kept_releases(reports, staged, "e", Retention(6)) == set("edbazy")
    kept, _ = ledger.kept_reports(reports, set("edb"), Retention(3, 2), depth=1)
    assert [report.request.release for report in kept] == ["x", "b", "d", "e", "z", "z"]
