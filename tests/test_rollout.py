"""Order, waves, the stop rule and what is told of them. The cases are in rollout.json."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelswap import rollout, rollout_file
from kernelswap.errors import ConfigError
from kernelswap.rollout import Move, Rollout

CASES = json.loads((Path(__file__).parent / "rollout.json").read_text())
SIZES = st.one_of(st.integers(1, 40), st.integers(1, 100).map(lambda share: f"{share}%"))


def gpus(text: str) -> tuple[str, ...]:
    """gpu2, gpu3, gpu4 of `2-4`; of `4,2` these two."""
    first, _, last = text.partition("-")
    return tuple(f"gpu{number}" for number in (range(int(first), int(last) + 1) if last else text.split(",")))


@pytest.mark.parametrize("case", CASES["waves"], ids=[case["name"] for case in CASES["waves"]])
def test_waves(case: dict[str, Any]) -> None:
    chosen = rollout_file.read({"--data": case["rollout"]}, case["rollout"].get("canary", []))
    hosts = [f"gpu{number}" for number in range(case["hosts"], 0, -1)]
    assert chosen.cut(hosts) == tuple(gpus(wave) for wave in case["waves"])


@given(st.sets(st.from_regex(r"gpu[0-9]{1,3}", fullmatch=True), max_size=60), st.lists(SIZES, max_size=4))
def test_each_host_has_one_wave_and_no_wave_is_empty(hosts: set[str], sizes: list[int | str]) -> None:
    waves = Rollout(waves=tuple(sizes)).cut(hosts)
    assert sorted(name for wave in waves for name in wave) == sorted(hosts)
    assert all(waves)
    assert waves == Rollout(waves=tuple(sizes)).cut(sorted(hosts, reverse=True))


def test_order_is_by_number() -> None:
    given, ordered = CASES["order"]
    assert list(Rollout().order(given)) == ordered


@pytest.mark.parametrize("case", CASES["faults"], ids=[case["name"] for case in CASES["faults"]])
def test_faults(case: dict[str, Any]) -> None:
    try:
        rollout_file.read(case["said"], ["gpu1", "gpu2"])
        lines = []
    except ConfigError as error:
        lines = str(error).splitlines()
    assert sorted(lines) == sorted(case["lines"])


def test_python_data_may_have_tuples() -> None:
    said = {"host a": {"waves": (1, "20%"), "canary": ("gpu1",), "max_failed": 2, "pause": 60, "on_stop": "revert"}}
    assert rollout_file.read(said, ["gpu1"]) == Rollout(
        canary=("gpu1",), waves=(1, "20%"), max_failed=2, pause=60, on_stop="revert"
    )


@pytest.mark.parametrize(
    ("most", "failed", "why"),
    [
        (0, [], ""),
        (0, ["gpu2"], "1 host failed (gpu2), and max_failed is 0"),
        (1, ["gpu2"], ""),
        (1, ["gpu10", "gpu2"], "2 hosts failed (gpu2, gpu10), and max_failed is 1"),
    ],
)
def test_one_more_than_may_fail_stops_it(most: int, failed: list[str], why: str) -> None:
    assert Rollout(max_failed=most).stop(failed) == why


@pytest.mark.parametrize(
    ("waves", "routers", "moving", "told"),
    [
        ("a bc", {"r": "a1 b1 c1"}, "a1 b1 c1", []),
        ("abc", {"r": "a1 b1 c1"}, "a1 b1 c1", ["wave 1 takes all that serve r out of it at once: a, b, c"]),
        ("a bc", {"r": "b1 c1", "s": "a1 b1"}, "a1 b1 c1", ["wave 2 takes all that serve r out of it at once: b, c"]),
        ("ab", {"r": "a1 b1"}, "a2 b2", []),  # others of these hosts swap
        ("ab", {"r": "a1 b1"}, "a1 b2", []),
        ("a", {"r": "a1 a2"}, "a1 a2", []),  # one after the other
        ("a", {"r": "a1"}, "a1", []),  # where there is one server only, any swap is an outage
        ("ab", {"r": "a1 b1 c1"}, "a1 b1", []),  # c serves on
        ("ab", {}, "a1 b1", []),  # nothing serves yet
        ("", {"r": "a1 b1"}, "", []),
    ],
)
def test_a_router_that_a_wave_leaves_without_a_server_is_told(
    waves: str, routers: dict[str, str], moving: str, told: list[str]
) -> None:
    def servers(text: str) -> set[tuple[str, str]]:
        return {(word[0], word[1]) for word in text.split()}

    serving = {url: servers(text) for url, text in routers.items()}
    lines = rollout.outages(waves.split(), serving, servers(moving))
    assert [line.partition(";")[0] for line in lines] == told


@pytest.mark.parametrize(("typed", "again"), CASES["again"])
def test_the_command_that_goes_on(typed: str, again: str) -> None:
    assert rollout.again(shlex.split(typed), ["a", "b"]) == again


@pytest.mark.parametrize(("seconds", "text"), CASES["about"])
def test_durations(seconds: float | None, text: str) -> None:
    assert rollout.about(seconds) == text


def test_the_plan_says_what_moves_when_and_what_changes() -> None:
    details = ("main:   moe-runner-backend: auto -> triton",)
    moves = {f"gpu{n}": Move(("main: swap: a-1 -> b-2",), details, 60.0 * n) for n in (2, 3, 10)}
    moves["gpu1"] = Move(("left: swap: a-1 -> b-2", "right: swap: c-3 -> b-2"))
    moves["gpu7"] = Move(("main: follow: already running",), follows=True, seconds=30)
    chosen = Rollout(canary=("gpu3", "gone"), waves=(1, 9), max_failed=1, pause=30, on_stop="revert")
    waves = rollout.waves_of(chosen, moves)
    assert waves == (("gpu7",), ("gpu3",), ("gpu1", "gpu2", "gpu10"))
    assert rollout.plan_text(chosen, waves, moves, dict.fromkeys(moves, "")) == [
        "--> Rollout: 5 hosts in 3 waves, 30 s between them, about 14 min; it stops when more than 1 failed, "
        "and what was committed then goes back",
        "canary gone: it is not in this run (--limit, --exclude); gpu7 goes first",
        "wave 1 of 3: 1 host, about 30 s",
        "  gpu7: main: follow: already running",
        "wave 2 of 3: 1 host, about 3 min",
        "  gpu3: main: swap: a-1 -> b-2",
        "wave 3 of 3: 3 hosts, about 10 min",
        "  gpu1:",
        "    left: swap: a-1 -> b-2",
        "    right: swap: c-3 -> b-2",
        "  gpu2, gpu10: main: swap: a-1 -> b-2",
        "what changes by main: swap: a-1 -> b-2",
        "  main:   moe-runner-backend: auto -> triton",
    ]
    assert rollout.plan_text(chosen, (), {}, {"gpu1": ""}) == []


def test_hosts_on_which_nothing_swaps_are_counted_and_named_where_files_are_renewed() -> None:
    same = Move(("main: unchanged: a-1",))
    renewed = Move(("main: unchanged: a-1",), ("main:   timeouts.ready: 60.0 -> 61.0",))
    assert rollout.still_text({"gpu1": same, "gpu10": renewed, "gpu2": same, "gpu3": renewed}) == [
        "2 hosts: main: unchanged: a-1",
        "gpu3, gpu10: main: unchanged: a-1",
        "  main:   timeouts.ready: 60.0 -> 61.0",
    ]
