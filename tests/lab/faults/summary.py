"""The page docs/faults.md: what the fault matrix did and how it ended. Without times, so that a change shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = {
    "controller": "pyinfra killed",
    "connection": "connection dropped",
    "agent": "agent killed",
    "power": "power cut",
}
HEAD = """# The fault matrix

Written by `make test-faults` from its run: {count} cases on lab hosts with a real systemd and sshd, each looked at from
outside (the processes, the unit, the answers that another machine gets, the files). Every one ended in a state that is
allowed: on one verified release that serves alone, or loudly down where no release can serve. No case left a journal
open, a candidate reachable or a story untold.
"""


@dataclass
class Matrix:
    """What the tests recorded, in their order. kills: (moment, kind) -> end; faults: (what, step, end, who answers)."""

    kills: dict[tuple[str, str], str] = field(default_factory=dict)
    faults: list[tuple[str, str, str, str]] = field(default_factory=list)
    random: list[tuple[int, str, str]] = field(default_factory=list)  # seed, fault, end

    def add(self, kind: str, value: Any) -> None:
        if kind == "kill":
            moment, how, end = value
            self.kills[moment, how] = end
        elif kind == "fault":
            self.faults.append(value)
        elif kind == "random":
            self.random.append(value)

    @property
    def count(self) -> int:
        return len(self.kills) + len(self.faults) + len(self.random)


def page(matrix: Matrix) -> str:
    moments = list(dict.fromkeys(moment for moment, _ in matrix.kills))
    parts = [HEAD.format(count=matrix.count)]
    parts += ["## Something dies, at each moment of a swap\n", "`<` marks a step of the way back.\n"]
    rows = [[moment, *(matrix.kills.get((moment, kind), "") for kind in KINDS)] for moment in moments]
    parts.append(table(["moment", *KINDS.values()], rows))
    parts += ["## Something else goes wrong\n"]
    parts.append(table(["fault", "fails at", "end", "answers afterwards"], [list(row) for row in matrix.faults]))
    seeds = ", ".join(sorted({str(seed) for seed, _, _ in matrix.random}))
    parts += [f"## {len(matrix.random)} swaps, each with a random fault at a random moment (seed {seeds})\n"]
    ends = sorted({end for _, _, end in matrix.random})
    counts = Counter((fault, end) for _, fault, end in matrix.random)
    faults = sorted({fault for _, fault, _ in matrix.random})
    parts.append(table(["fault", *ends], [[fault, *(str(counts[fault, end]) for end in ends)] for fault in faults]))
    return "\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
