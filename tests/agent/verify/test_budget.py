from __future__ import annotations

import dataclasses

import pytest

from kernelswap.agent.verify import budget, gates
from kernelswap.measured import Run, ThroughputResult
from kernelswap.protocol import Report, Request, StepResult, Throughput

WANTED = Throughput(8, 32, 16, 64, floor=64.0, lower=(1,))
STEPS = ["smoke", "throughput", "soak"]
RATES = {1: 64.0, 8: 256.0}
KNOWN = ThroughputResult(
    "a-1",
    "key",
    tuple(gates.point(at, [Run(at, 8, 0, 1.0, 8, 8, rate, rate, {}, {}, {})]) for at, rate in RATES.items()),
)


@pytest.mark.parametrize(
    ("before", "known", "floor", "text"),
    [
        # 8 to import and 2 to warm up; 3 x (2 + 64 x 16 / 256) and 3 x (2 + 8 x 16 / 64).
        ({"smoke": 8.2, "soak": 10}, KNOWN, 64, "about 58 s: smoke 8, throughput 2 x 3 runs 40, soak 10"),
        (
            {"smoke": 8.2, "throughput": 90.0, "soak": 10},
            KNOWN,
            64,
            "about 58 s: smoke 8, throughput 2 x 3 runs 40, soak 10",
        ),
        (
            {"smoke": 8.2, "throughput": 90.0, "soak": 10},
            None,
            64,
            "about 108 s: smoke 8, throughput 2 x 3 runs 90, soak 10",
        ),
        # By the floor alone: 3 x (2 + 16) and 3 x (2 + 16), as one request is served no slower than each of eight.
        ({"smoke": 8.2, "soak": 10}, None, 64, "up to 136 s: smoke 8, throughput 2 x 3 runs 118, soak 10"),
        ({"smoke": 8.2}, None, None, "about 8 s and what is not known yet: smoke 8, throughput 2 x 3 runs ?, soak ?"),
        ({}, None, None, "how long is not known yet: smoke, throughput 2 x 3 runs, soak"),
    ],
)
def test_what_is_told(before: dict[str, float], known: ThroughputResult | None, floor: float | None, text: str) -> None:
    told = budget.text(STEPS, dataclasses.replace(WANTED, floor=floor), known, before)
    assert told.partition("verification")[2].lstrip(":, ") == text


def test_a_baseline_that_never_was_takes_as_long_as_the_throughput() -> None:
    told = budget.text(["baseline", "throughput"], WANTED, None, {"throughput": 30.0})
    assert told == "verification: about 60 s: baseline 2 x 3 runs 30, throughput 2 x 3 runs 30"


def test_the_last_steps_that_went_well_and_were_asked_for_alike() -> None:
    def report(verify: str, *steps: StepResult) -> Report:
        return Report(Request("s", "main", "converge", "a-1", "ann", verify=verify), "committed", 1, 2, steps=steps)

    history = [
        report("", StepResult("smoke", 9, True), StepResult("ready", 50, True), StepResult("soak", 10, True)),
        report("", StepResult("smoke", 7, True), StepResult("throughput", 3, False)),
        report("quick", StepResult("smoke", 1, True)),
    ]
    assert budget.last(history, "") == {"smoke": 7, "soak": 10}
    assert budget.last(history, "quick") == {"smoke": 1}
    assert budget.last(history, "full") == {}
