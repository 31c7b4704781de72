"""What an instance's history says: which releases were committed, which are barred, where rollbacks go, what may go.

Pure functions over reports, oldest first. Shared by the controller and the agent (Python 3.9, standard library).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import AbstractSet, Dict, List, Optional, Sequence, Set, Tuple

from kernelswap.protocol import Report, Retention

DEPTH = 100  # commits that rollbacks can lead back through, one after the other


def commits(history: Sequence[Report]) -> List[str]:
    """The committed releases as a stack: a converge pushes, a rollback pops down to its target."""
    return [report.request.release for report in _stack(history)[0]]


def _stack(history: Sequence[Report]) -> Tuple[List[Report], List[Report]]:
    """The same, each by the report that pushed it; and which was on top after each report, once there was one."""
    stack: List[Report] = []
    tops: List[Report] = []
    for report in history:
        release = report.request.release
        if report.outcome == "committed":
            if report.request.action == "rollback" and any(below.request.release == release for below in stack):
                while stack[-1].request.release != release:
                    stack.pop()
            elif not stack or stack[-1].request.release != release:
                stack.append(report)
        tops += stack[-1:]
    return stack, tops


def barred(history: Sequence[Report]) -> Set[str]:
    """Releases that failed by their own fault and were not committed since."""
    return set(_bars(history))


def _bars(history: Sequence[Report]) -> Dict[str, Report]:
    """Each of them with the report that bars it."""
    bars: Dict[str, Report] = {}
    for report in history:
        if report.outcome == "committed":
            bars.pop(report.request.release, None)
        elif report.bars:
            bars[report.request.release] = report
    return bars


@dataclass(frozen=True)
class Tally:
    """How many swaps have ended, by outcome, until the one with the id `through`, which sorts by time.

    unclean: those in which the host could not be proved clean before a start.
    """

    through: str = ""
    outcomes: Dict[str, int] = field(default_factory=dict)
    unclean: int = 0


def tally(before: Tally, history: Sequence[Report]) -> Tally:
    """With the reports that came after it. What is pruned from the history stays counted."""
    new = [report for report in history if report.request.swap > before.through]
    unclean = [any(step.name.endswith("clean") and not step.ok for step in report.steps) for report in new]
    return Tally(
        max([before.through, *(report.request.swap for report in new)]),
        dict(Counter(before.outcomes) + Counter(report.outcome for report in new)),
        before.unclean + sum(unclean),
    )


def rollback_target(history: Sequence[Report], staged: AbstractSet[str]) -> Optional[str]:
    """The newest commit below the current one that is another release, staged still and not barred."""
    stack = commits(history)
    bad = barred(history)
    current = stack[-1] if stack else None
    for release in reversed(stack[:-1]):
        if release != current and release in staged and release not in bad:
            return release
    return None


def kept_releases(history: Sequence[Report], staged: AbstractSet[str], good: str, policy: Retention) -> Set[str]:
    """The staged releases that stay: the known-good, those that rollbacks reach in their order, then the others, the
    last asked for first; as many as the policy has."""
    bad = barred(history)
    way_back = [release for release in reversed(commits(history)) if release not in bad]
    others = [report.request.release for report in reversed(history)]
    ranked = [release for release in dict.fromkeys([good, *way_back, *others]) if release in staged]
    return set(ranked[: policy.releases])


def kept_reports(
    history: Sequence[Report], releases: AbstractSet[str], policy: Retention, depth: int = DEPTH
) -> Tuple[List[Report], Set[str]]:
    """The reports that stay, and the swaps whose evidence does. releases: those that stay.

    The newest; and of the older what `commits` and `barred` follow from: the newest `depth` commits of the stack, the
    last of each release that stays, with its evidence, and whatever bars a release.
    """
    newest = history[-policy.swaps :]
    stack, tops = _stack(history)
    last = {report.request.release: report for report in stack if report.request.release in releases}
    # A rollback among the newest pops down to what was on top after it.
    needed = [*newest, *tops[-policy.swaps - 1 :], *stack[-depth:], *last.values(), *_bars(history).values()]
    stay = {id(report) for report in needed}
    evidence = {report.request.swap for report in (*newest, *last.values())}
    return [report for report in history if id(report) in stay], evidence
