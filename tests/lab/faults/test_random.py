"""Swaps with a random fault at a random moment: whatever comes, no host ends in a state that is forbidden.

Everything follows from KERNELSWAP_FAULTS_SEED; what a failing host was given is in the message.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from fleet import Choice, Fleet, Seen
from labhost import Host

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("faults")]

SEED = int(os.environ.get("KERNELSWAP_FAULTS_SEED", "1"))
SWAPS = 200
GOOD = ("triton", "cutlass")
BAD = (
    "crash-at-load",
    "exit-0-at-load",
    "crash-after-ready",
    "crash-during-throughput",
    "garbage",
    "nan",
    "slow-answer",
)
FAULTS = ("none", "agent", "agent twice", "connection", "power")
LONGEST = 9.0  # seconds; about what a swap takes where 30 hosts share two cores


@dataclass(frozen=True)
class Case:
    """What a host is given. at: when the fault comes, in seconds since the swap has begun on the host."""

    profile: str
    fault: str
    at: float


def case(number: int, host: str) -> Case:
    dice = random.Random(f"{SEED}/{number}/{host}")  # noqa: S311
    profile = dice.choice(GOOD) if dice.random() < 0.6 else dice.choice(BAD)
    return Case(profile, dice.choice(FAULTS), dice.uniform(0, LONGEST))


@pytest.fixture(scope="module")
def hosts(fleet: Fleet) -> list[Host]:
    found = fleet.lab.hosts
    assert fleet.deploy({host.name: Choice("triton") for host in found}).code == 0
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(-(-SWAPS // 30)))
def test_no_forbidden_end(
    number: int, fleet: Fleet, hosts: list[Host], record_property: Callable[[str, object], None]
) -> None:
    dice = random.Random(f"{SEED}/{number}")  # noqa: S311
    cases = {host.name: case(number, host.name) for host in hosts}
    before: dict[str, Seen] = fleet.each(hosts, fleet.look)
    choices = {name: Choice(case.profile, {"TRY": f"{SEED}/{number}"}) for name, case in cases.items()}
    process = fleet.start(choices)
    others = [host for host in hosts if cases[host.name].fault not in ("none", "power")]
    clock = [threading.Thread(target=strike, args=(fleet, host, cases[host.name])) for host in others]
    # All at once, as a rack's power is.
    cut = [host for host in hosts if cases[host.name].fault == "power"]
    clock.append(threading.Thread(target=later, args=(fleet, cut[0], dice.uniform(0, LONGEST), fleet.cut_power, cut)))
    if dice.random() < 0.3:
        clock.append(threading.Thread(target=later, args=(fleet, hosts[0], dice.uniform(0, LONGEST), process.kill)))
    for thread in clock:
        thread.start()
    for thread in clock:
        thread.join()
    if process.running:
        process.wait()
    ends = fleet.each(hosts, lambda host: end(fleet, host, before[host.name], cases[host.name]))
    for name, how in ends.items():
        record_property("random", (SEED, cases[name].fault, how))
    wrong = {name: (cases[name], how) for name, how in ends.items() if how.startswith("forbidden")}
    assert not wrong, f"seed {SEED}, round {number}: {wrong}\n{process.output}"


def later(fleet: Fleet, host: Host, seconds: float, work: Any, *arguments: Any) -> None:
    """So long after a swap has begun on the host; nothing if none begins there."""
    if fleet.wait_begun(host):
        time.sleep(seconds)
        work(*arguments)


def strike(fleet: Fleet, host: Host, case: Case) -> None:
    if case.fault == "connection":
        later(fleet, host, case.at, fleet.drop_connection, host)
        return
    later(fleet, host, case.at, fleet.kill_agent, host)
    if case.fault == "agent twice":
        later(fleet, host, 1.5, fleet.kill_agent, host)


def end(fleet: Fleet, host: Host, before: Seen, case: Case) -> str:
    """How the host ended: the outcome of its swap, or why that may not be."""
    after = fleet.look_when_settled(host)
    try:
        serving = after.serving
    except AssertionError as error:
        return f"forbidden: {error}"
    return judge(before.state, after.state, serving, case)


def judge(before: Mapping[str, Any], after: Mapping[str, Any], serving: str | None, case: Case) -> str:
    old, new = before["history"], after["history"]
    if new[: len(old)] != old or len(new) > len(old) + 1:
        return f"forbidden: the history had {len(old)} swaps and has {len(new)}"
    if len(new) == len(old):
        return "no swap began" if serving == before["known_good"] else f"forbidden: {serving} serves without a swap"
    report = new[-1]
    wanted = report["request"]["release"] if report["outcome"] == "committed" else before["known_good"]
    if serving != wanted or report["serving"] != wanted:
        return f"forbidden: {report['outcome']}, {serving} serves, {report['serving']} is said to, {wanted} should"
    if report["outcome"] == "committed" and case.profile in BAD:
        return f"forbidden: a release that is {case.profile} was committed"
    if report["outcome"] not in ("committed", "rolled-back", "refused"):
        return f"forbidden: {report['outcome']}: {report['cause']}"
    return str(report["outcome"])
