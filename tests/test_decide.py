from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernelswap import decide
from kernelswap.decide import Attach, Refused, Swap, Unchanged, unpinned
from kernelswap.errors import ConfigError
from kernelswap.goal import Goal, goal_of
from kernelswap.protocol import (
    Cause,
    Gpu,
    HostState,
    InstanceState,
    Plan,
    Report,
    Request,
    Running,
    Server,
)
from kernelswap.render import Hidden, Release
from kernelswap.servers import ServerSpec

PLAN = Plan(
    instance="main",
    release="b-2",
    profile="b",
    model="tiny",
    python="/opt/engine/bin/python",
    argv=("-m", "sglang.launch_server"),
    environment={"A": "1"},
    user="sglang",
    model_path="/models/tiny",
    served_name="tiny",
    address="127.0.0.1",
    port=30000,
)
RELEASE = Release("b-2", PLAN, {"plan.json": "plan", "sglang-main.service": "unit"}, Hidden("api-key: x"))
STAGED = {
    "plan.json": decide.digest("plan"),
    "sglang-main.service": decide.digest("unit"),
    "secrets.yaml": "",
}
GOOD = InstanceState(
    "main", "b-2", unit_state="active", unit_since=1764469800.0, unit_intact=True, releases={"b-2": STAGED, "a-1": {}}
)
STRAY = Server(77, 1764469800.0, "mallory", ("/usr/bin/python3", "-m", "sglang.launch_server"), port=30000)


def request(release: str = "b-2", action: str = "converge") -> Request:
    return Request("20261130T023000Z-ab12", "main", action, release, "ada@desk")


def report(outcome: str, release: str = "b-2", blame: str = "release") -> Report:
    cause = Cause("CUDA error: no kernel image", "server.log", "use another backend", "no-kernel", blame)
    return Report(request(release), outcome, 1764469800.0, 1764469890.0, cause=cause)


def running(release: str = "b-2", action: str = "converge", active: bool = True) -> Running:
    return Running(request(release, action), 1764469800.0, "ready", active)


BARRED = replace(GOOD, known_good="a-1", barred=("b-2",), history=(report("rolled-back"),))

# name, what was seen, the goal, servers outside our units, the decision, words of its reason
CONVERGE = [
    ("first contact", InstanceState("main"), Goal(), (), Swap, "nothing committed yet -> b-2"),
    ("the same again", GOOD, Goal(), (), Unchanged, "b-2 serves since 2025-11-30 02:30 UTC"),
    ("a commit", replace(GOOD, history=(report("committed"),)), Goal(), (), Unchanged, "by swap 20261130T0230"),
    ("another release", replace(GOOD, known_good="a-1"), Goal(), (), Swap, "a-1 -> b-2"),
    ("its unit failed", replace(GOOD, unit_state="failed"), Goal(), (), Swap, "its unit is failed"),
    ("its unit was edited", replace(GOOD, unit_intact=False), Goal(), (), Swap, "not as it was committed"),
    ("the same goal runs", replace(GOOD, known_good="a-1", running=running()), Goal(), (), Attach, "ada@desk"),
    ("another goal runs", replace(GOOD, running=running("c-3")), Goal(), (), Refused, "converge to c-3 by ada@desk"),
    ("a rollback runs", replace(GOOD, running=running("b-2", "rollback")), Goal(), (), Refused, "rollback to b-2"),
    ("a swap died", replace(GOOD, running=running("c-3", active=False)), Goal(), (), Swap, "was cut short at ready"),
    ("a swap died, barred", replace(BARRED, running=running(active=False)), Goal(), (), Swap, "closed first"),
    ("barred", BARRED, Goal(), (), Refused, "no kernel image"),
    ("barred long ago", replace(BARRED, history=()), Goal(), (), Refused, "barred"),
    ("barred, forced", BARRED, Goal(force=True), (), Swap, "a-1 -> b-2"),
    ("forced, unchanged", GOOD, Goal(force=True), (), Unchanged, "serves"),
    ("a stray", replace(GOOD, known_good="a-1"), Goal(), (STRAY,), Refused, "pid 77 of mallory since 2025-11-30"),
    ("a stray, adopted", replace(GOOD, known_good="a-1"), Goal(adopt=True), (STRAY,), Swap, "a-1 -> b-2"),
    ("a stray beside", GOOD, Goal(), (STRAY,), Unchanged, "serves"),
    ("a hand-written unit", InstanceState("main"), Goal(), (replace(STRAY, unit="old.service"),), Swap, "nothing"),
]


@pytest.mark.parametrize(
    ("seen", "goal", "servers", "kind", "why"), [case[1:] for case in CONVERGE], ids=[case[0] for case in CONVERGE]
)
def test_converge(seen: InstanceState, goal: Goal, servers: tuple[Server, ...], kind: type, why: str) -> None:
    decision = decide.converge(goal, RELEASE, HostState("sha", "key", instances=(seen,), servers=servers))
    assert isinstance(decision, kind)
    assert why in decision.why
    assert decision.instance == "main"


def test_a_refusal_says_who_failed_when_why_and_what_to_type() -> None:
    decision = decide.converge(Goal(), RELEASE, HostState("sha", "key", instances=(BARRED,)))
    assert isinstance(decision, Refused)
    for words in ("20261130T023000Z-ab12", "ada@desk", "2025-11-30 02:31 UTC", "rolled-back", "no kernel image"):
        assert words in decision.why
    assert decision.todo == "use another backend; or try it again all the same: --force"


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (GOOD, ""),
        (replace(GOOD, history=(report("rolled-back"), report("committed"))), ""),
        (replace(GOOD, history=(report("rolled-back"), report("unchanged"))), ""),
        (replace(GOOD, history=(report("rolled-back"),), running=running()), ""),
        (
            replace(GOOD, history=(report("committed"), report("refused", "c-3"))),
            "last time, to c-3: swap 20261130T023000Z-ab12 by ada@desk ended 2025-11-30 02:31 UTC as refused: "
            "CUDA error: no kernel image",
        ),
    ],
)
def test_the_end_of_a_swap_is_told_to_whoever_comes_next(seen: InstanceState, says: str) -> None:
    assert decide.last_failure(seen) == says


@pytest.mark.parametrize("gpus", [(), ("0",)])
def test_a_stray_on_another_port_is_left_to_the_agent(gpus: tuple[str, ...]) -> None:
    release = replace(RELEASE, plan=replace(PLAN, gpus=gpus))
    state = HostState("sha", "key", instances=(InstanceState("main"),), servers=(replace(STRAY, port=30001),))
    assert isinstance(decide.converge(Goal(), release, state), Swap)


def test_an_unknown_instance_is_new() -> None:
    assert isinstance(decide.converge(Goal(), RELEASE, HostState("", "")), Swap)


# name, what was seen, the decision, its target or words of its reason
ROLL_BACK = [
    ("to the commit before", replace(GOOD, rollback_target="a-1"), Swap, "a-1"),
    ("only one commit", replace(GOOD, history=(report("committed"),)), Refused, "b-2 is the only commit"),
    ("all barred", replace(GOOD, history=(report("committed", "a-1"), report("committed"))), Refused, "a-1 is barred"),
    ("the same runs", replace(GOOD, rollback_target="a-1", running=running("a-1", "rollback")), Attach, "a-1"),
    ("another runs", replace(GOOD, rollback_target="a-1", running=running("c-3")), Refused, "converge to c-3"),
    # What serves now was never replaced, so it is what the person means.
    ("a swap died", replace(GOOD, rollback_target="a-1", running=running("c-3", active=False)), Swap, "b-2"),
    ("never committed", InstanceState("main"), Refused, "nothing to go back to"),
]


@pytest.mark.parametrize(
    ("seen", "kind", "says"), [case[1:] for case in ROLL_BACK], ids=[case[0] for case in ROLL_BACK]
)
def test_roll_back(seen: InstanceState, kind: type, says: str) -> None:
    decision = decide.roll_back(seen)
    assert isinstance(decision, kind)
    if isinstance(decision, Refused):
        assert says in decision.why
    else:
        assert (decision.release, decision.action) == (says, "rollback")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (STAGED, ()),
        ({}, ("plan.json", "secrets.yaml", "sglang-main.service")),
        ({**STAGED, "plan.json": "other"}, ("plan.json",)),
        ({key: value for key, value in STAGED.items() if key != "secrets.yaml"}, ("secrets.yaml",)),
    ],
)
def test_only_what_the_host_lacks_is_staged(there: dict[str, str], missing: tuple[str, ...]) -> None:
    seen = replace(GOOD, releases={"b-2": there})
    decision = decide.converge(Goal(), RELEASE, HostState("sha", "key", instances=(seen,)))
    assert isinstance(decision, Unchanged)
    assert decision.stage == missing


def test_the_request_carries_the_goal() -> None:
    goal = Goal(reason="because", force=True, adopt=True, verify="full")
    swap = Swap("main", "converge", "b-2", "")
    expected = Request(
        "", "main", "converge", "b-2", "me", "because", True, True, "gpu1", "pyinfra x deploy.py", "full"
    )
    assert decide.request_of(swap, goal, "me", "gpu1", "pyinfra x deploy.py") == expected


@pytest.mark.parametrize(
    ("asked", "goal"),
    [
        ({}, Goal()),
        ({"profile": 8}, Goal(profile="8")),
        ({"rollback": True, "reason": "slow"}, Goal(action="rollback", reason="slow")),
        ({"rollback": False, "profile": "x"}, Goal(profile="x")),
        ({"verify": "quick"}, Goal(verify="quick")),
        ({"verify": {"throughput": None}}, Goal()),  # a model's key in the wrong place, which spec.py tells
    ],
)
def test_goal(asked: dict[str, Any], goal: Goal) -> None:
    assert goal_of(asked) == goal


def test_faults_of_a_goal_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        goal_of({"rollback": True, "profile": "x", "force": "perhaps", "verify": "fast"})
    assert len(caught.value.faults) == 3


GPUS = (
    Gpu(0, "GPU-a", error="no answer"),
    Gpu(1, "GPU-b", mig=True),
    Gpu(1, "MIG-1", parent="GPU-b"),
    Gpu(2, error="lost"),
)


@pytest.mark.parametrize(
    ("names", "error", "why"),
    [
        ((), "no driver", ""),
        (("GPU-x",), "no driver", ""),
        (("0",), "", ""),  # it is known; whether it can be used is for the agent to say
        (("0",), "NVML gives no answer", "which GPUs 0 are is unknown: NVML gives no answer"),
        (("0", "1"), "", "GPU 1 GPU-b is divided into MIG devices and offers only these"),
        (("2",), "", "GPU 2: lost"),
        (("3",), "", "no GPU 3 on this host: it has 3"),
    ],
)
def test_gpus_that_cannot_be_pinned_are_refused(names: tuple[str, ...], error: str, why: str) -> None:
    spec = ServerSpec("main", "m", "p", "/m", "m", "::", 30000, "u", "/p", gpus=names)
    refused = unpinned(spec, HostState("sha", "key", gpus=() if error else GPUS, gpu_error=error))
    assert (refused.why if refused else "") == why
    assert refused is None or refused.todo


def test_the_way_back_is_a_rollback_to_what_was_committed_before() -> None:
    asked = Request("", "main", "converge", "b-2", "me", "because", True, True, "gpu1", "pyinfra x deploy.py", "full")
    back = decide.way_back(asked, replace(GOOD, known_good="a-1"))
    assert back == replace(asked, action="rollback", release="a-1", force=False, adopt=False, verify="")
    assert decide.way_back(asked, GOOD) is None
    assert decide.way_back(asked, InstanceState("main")) is None


# the host's history: release, outcome, seconds; the release asked for; what it is expected to take
EXPECTED = [
    ([], "b-2", None),
    ([("b-2", "rolled-back", 50)], "b-2", None),
    ([("a-1", "committed", 30), ("c-3", "committed", 40)], "b-2", 40),
    ([("b-2", "committed", 60), ("b-2", "committed", 70), ("a-1", "committed", 30)], "b-2", 70),
]


@pytest.mark.parametrize(("history", "release", "seconds"), EXPECTED)
def test_a_swap_is_expected_to_take_as_long_as_last_time(
    history: list[tuple[str, str, int]], release: str, seconds: int | None
) -> None:
    reports = tuple(Report(request(name), outcome, 100.0, 100.0 + took) for name, outcome, took in history)
    assert decide.expected(InstanceState("main", history=reports), release) == seconds
