from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelswap.agent.verify import gates
from kernelswap.measured import Run, ThroughputResult
from kernelswap.protocol import Throughput

CASES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("gates.json").read_text())


def run(concurrency: int, rate: float) -> Run:
    return Run(concurrency, 8, 0, 1.0, 8, 8, rate, rate, {}, {}, {})


def result(release: str, rates: dict[int, list[float]]) -> ThroughputResult:
    points = [gates.point(at, [run(at, rate) for rate in found]) for at, found in rates.items()]
    return ThroughputResult(release, "key", tuple(points))


@pytest.mark.parametrize("name", CASES)
def test_verdict(name: str) -> None:
    case = CASES[name]
    candidate = {int(at): rates for at, rates in case["candidate"].items()}
    known = {int(at): rates for at, rates in case["known"].items()} if case["known"] else None
    wanted = Throughput(
        max(candidate),
        32,
        16,
        8,
        case.get("floor"),
        floors=case.get("floors", {}),
        regression=case.get("regression", 0.05),
    )
    verdict = gates.judge(
        wanted, result("new-2", candidate), result("good-1", known) if known else None, case.get("look", gates.LOOKS)
    )
    assert verdict.verdict == case["verdict"], verdict.why
    assert case.get("says", "") in verdict.why


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (0.02, 0.06, "fail"),
        (0.40, 0.44, "fail"),  # as busy as ever
        (0.02, 0.50, "inconclusive"),
        (0.02, 0.08, "fail"),  # which is no reason to lose a fifth
        (None, 0.50, "fail"),
        (0.02, None, "fail"),
    ],
)
def test_slower_on_a_busier_host_proves_nothing(before: float | None, now: float | None, verdict: str) -> None:
    def busy(rates: list[float], share: float | None) -> ThroughputResult:
        runs = [replace(run(8, rate), elsewhere=share) for rate in rates]
        return ThroughputResult("good-1", "key", (gates.point(8, runs),))

    known, candidate = busy([100, 101, 99], before), busy([80, 81, 79], now)
    found = gates.judge(Throughput(8, 32, 16, 8), candidate, known)
    assert found.verdict == verdict
    assert ("other work had 50% of the host's CPU, and 2% when good-1 was" in found.why) == (verdict == "inconclusive")


def swap(dice: random.Random, faster: float, noise: float, odd: float = 0.0, points: int = 1) -> str:
    """The verdict on a server that is so much faster than the known-good. odd: share of runs that something slowed."""

    def rates(count: int, mean: float) -> list[float]:
        return [mean * dice.gauss(1, noise) * (0.8 if dice.random() < odd else 1) for _ in range(count)]

    ladder = [2**rung for rung in range(points)]
    wanted = Throughput(ladder[-1], 32, 16, 8)
    known = result("good-1", {at: rates(wanted.repetitions, 100) for at in ladder})
    mine: dict[int, list[float]] = {at: [] for at in ladder}
    for look in range(1, gates.LOOKS + 1):
        for found in mine.values():
            found += rates(wanted.repetitions, 100 * (1 + faster))
        verdict = gates.judge(wanted, result("new-2", mine), known, look).verdict
        if verdict != "inconclusive":
            break
    return verdict


@pytest.mark.parametrize(
    ("faster", "noise", "odd", "points", "verdict", "least", "most"),
    [
        (0.0, 0.05, 0.0, 1, "fail", 0.0, 0.01),
        (0.0, 0.05, 0.0, 3, "fail", 0.0, 0.01),
        (0.0, 0.02, 0.1, 1, "fail", 0.0, 0.01),
        (0.0, 0.20, 0.0, 2, "fail", 0.0, 0.02),
        (-0.15, 0.05, 0.0, 1, "fail", 0.95, 1.0),
        (-0.15, 0.02, 0.1, 1, "fail", 0.90, 1.0),
        (-0.15, 0.05, 0.0, 3, "fail", 0.95, 1.0),
        (-0.15, 0.05, 0.0, 1, "pass", 0.0, 0.005),
        (0.0, 0.02, 0.0, 1, "pass", 0.95, 1.0),
    ],
)
def test_how_often(
    faster: float, noise: float, odd: float, points: int, verdict: str, least: float, most: float
) -> None:
    dice = random.Random(7)  # noqa: S311
    swaps = 1500
    share = sum(swap(dice, faster, noise, odd, points) == verdict for _ in range(swaps)) / swaps
    assert least <= share <= most


@pytest.mark.parametrize(
    ("p", "freedom", "value"),
    [(0.90, 4, 1.533), (0.95, 4, 2.132), (0.98, 4, 2.999), (0.99, 4, 3.747), (0.95, 7, 1.895), (0.90, 10, 1.372)],
)
def test_quantile_of_students_t(p: float, freedom: int, value: float) -> None:
    assert gates.quantile(p, freedom) == pytest.approx(value, rel=0.02)
