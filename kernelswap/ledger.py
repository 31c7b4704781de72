"""What an instance's history says: which releases were committed, which are barred, where a rollback goes.

Pure functions over reports, oldest first. Shared by the controller and the agent (Python 3.9, standard library).
"""

from __future__ import annotations

from typing import AbstractSet, List, Optional, Sequence, Set

from kernelswap.protocol import Report


def commits(history: Sequence[Report]) -> List[str]:
    """The committed releases as a stack: a converge pushes, a rollback pops down to its target."""
    stack: List[str] = []
    for report in history:
        if report.outcome != "committed":
            continue
        release = report.request.release
        if report.request.action == "rollback" and release in stack:
            while stack[-1] != release:
                stack.pop()
        elif not stack or stack[-1] != release:
            stack.append(release)
    return stack


def barred(history: Sequence[Report]) -> Set[str]:
    """Releases that failed by their own fault and were not committed since."""
    names: Set[str] = set()
    for report in history:
        if report.outcome == "committed":
            names.discard(report.request.release)
        elif report.bars:
            names.add(report.request.release)
    return names


def rollback_target(history: Sequence[Report], staged: AbstractSet[str]) -> Optional[str]:
    """The newest commit below the current one that is another release, staged still and not barred."""
    stack = commits(history)
    bad = barred(history)
    current = stack[-1] if stack else None
    for release in reversed(stack[:-1]):
        if release != current and release in staged and release not in bad:
            return release
    return None
