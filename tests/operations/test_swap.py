from __future__ import annotations

import re
import shlex
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pyinfra.api.exceptions import ConnectError
from pyinfra.context import ctx_host

from kernelswap import protocol
from kernelswap.operations import swap as module
from kernelswap.operations import turns as turns_module
from kernelswap.operations.swap import Turn, swap
from kernelswap.operations.turns import Turns
from kernelswap.rollout import Rollout

REQUEST = protocol.Request("", "main", "converge", "b-2", "o'hara@desk", reason="$(reboot)")
OTHER = replace(REQUEST, instance="other")
BACK = replace(REQUEST, action="rollback", release="a-1")


class FakeHost:
    """A host whose commands end as it is told to; it keeps what it was asked last, and all requests."""

    name = "gpu1"
    executing_op_hash = "x"

    def __init__(self, answer: bool | Exception, connected: bool = True, said: str = "") -> None:
        self.answer = answer
        self.output = said.splitlines()
        self.asked: dict[str, Any] = {}
        self.requests: list[protocol.Request] = []
        self.said: list[str] = []
        self.current_op_global_arguments = {"_sudo": True, "_sudo_password": "ops", "_env": {"A": "1"}, "name": "Swap"}
        self.up, self.up_afterwards = True, connected
        transport = SimpleNamespace(is_active=lambda: self.up, set_keepalive=lambda seconds: None, sock=None)
        client = SimpleNamespace(get_transport=lambda: transport)
        self.connector = SimpleNamespace(client=client, connect=self.connect)

    def connect(self) -> None:
        self.up = True

    def run_shell_command(self, command: Any, **asked: Any) -> tuple[bool, Any]:
        self.asked = {"command": command.get_raw_value(), **asked}
        self.requests.append(protocol.decode(protocol.Request, shlex.split(self.asked["command"])[3]))
        self.up = self.up_afterwards
        answer = self.answer if self.requests[-1].instance == "main" else False
        if isinstance(answer, Exception):
            raise answer
        return answer, SimpleNamespace(stdout_lines=self.output)

    def log(self, text: str) -> None:
        self.said.append(text)

    def log_styled(self, text: str, **_: Any) -> None:
        self.said.append(text)


def turns(host: Any, **rollout: Any) -> Turns:
    """A rollout over this one host."""
    config = SimpleNamespace(FAIL_PERCENT=None, PARALLEL=2)
    state: Any = SimpleNamespace(config=config, failed_hosts=set(), results={host: SimpleNamespace(error_ops=0)})
    return Turns(state, Rollout(**rollout), [host], [[host.name]])


def execute(host: Any, turn: Turn | None = None) -> bool:
    with ctx_host.use(host):
        (command,) = swap._inner(turn or Turn(turns(host), (REQUEST,)))  # type: ignore[attr-defined]
    state = SimpleNamespace(print_input=False)
    return bool(command.execute(state, host, {}))


def test_the_connector_arguments_reach_the_command() -> None:
    host = FakeHost(True)
    assert execute(host) is True
    assert host.asked["_sudo"] is True
    assert host.asked["_sudo_password"] == "ops"
    assert host.asked["_env"] == {"A": "1"}
    assert "name" not in host.asked
    assert host.asked["print_output"] is True


def test_the_request_is_quoted() -> None:
    host = FakeHost(True)
    execute(host)
    words = shlex.split(host.asked["command"])
    assert words[:3] == ["/usr/bin/python3", protocol.AGENT_PATH, "swap"]
    request = protocol.decode(protocol.Request, words[3])
    assert replace(request, swap="") == REQUEST
    assert re.fullmatch(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{4}", request.swap), "it gets its id when it begins"


def test_a_failed_swap_fails_quietly() -> None:
    host = FakeHost(False)
    assert execute(host) is False
    assert host.said == []


@pytest.mark.parametrize("answer", [False, OSError("reset"), EOFError()])
def test_a_dropped_connection_says_how_to_go_on(answer: bool | Exception) -> None:
    host = FakeHost(answer, connected=False)
    assert execute(host) is False
    assert host.said == [module.DROPPED]


def test_a_connection_that_was_lost_while_others_swapped_is_made_again() -> None:
    host = FakeHost(True)
    host.up = False
    assert execute(host) is True
    dead = FakeHost(True)
    dead.up = False

    def refuse() -> None:
        raise ConnectError("no route to host")

    dead.connector.connect = refuse
    turn = Turn(turns(dead), (REQUEST,))
    assert execute(dead, turn) is False
    assert (turn.turns.ends["gpu1"].why, dead.requests) == ("no route to host", [])


END = "note: x\nROLLED BACK from b-2 in 9.0 s; a-1 serves again, verified\n  cause: no kernel\n  try: y"
FAULTS = (
    "REFUSED b-2, nothing was touched\n  cause: 2 faults:\n    no disk: free some\n    no user: create it\n  see: x"
)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (END, "ROLLED BACK from b-2 in 9.0 s; a-1 serves again, verified; cause: no kernel"),
        (FAULTS, "REFUSED b-2, nothing was touched; cause: 2 faults: no disk: free some; no user: create it"),
        ("kernelswap: the lock is held", "kernelswap: the lock is held"),
        ("", "the agent said nothing"),
    ],
)
def test_why_it_failed_is_kept_for_the_end(said: str, why: str) -> None:
    host = FakeHost(False, said=said)
    turn = Turn(turns(host), (REQUEST,))
    assert execute(host, turn) is False
    assert turn.turns.ends["gpu1"].why == why


def test_the_second_server_fails_and_the_first_goes_back() -> None:
    host = FakeHost(True)
    turn = Turn(turns(host, on_stop="revert"), (REQUEST, OTHER, REQUEST), (replace(OTHER, release="a-1"), BACK))
    assert execute(host, turn) is False
    assert [(r.instance, r.action, r.release) for r in host.requests] == [
        ("main", "converge", "b-2"),
        ("other", "converge", "b-2"),
        ("main", "rollback", "a-1"),
    ]
    assert host.requests[-1].reason.startswith("the rollout has stopped: 1 host failed")
    end = turn.turns.ends["gpu1"]
    assert (end.how, end.why) == ("failed", "the agent said nothing; what it had committed went back")


def test_a_pause_is_kept_between_waves_and_not_within_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(turns_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(turns_module.gevent, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    first, second, third = (FakeHost(True) for _ in range(3))
    for number, host in enumerate((first, second, third)):
        host.name = f"gpu{number}"
    course = turns(first, pause=30)
    course = Turns(course.state, course.rollout, [first, second, third], [["gpu0"], ["gpu1", "gpu2"]])  # type: ignore[list-item]
    course.state.results.update({host: SimpleNamespace(error_ops=0) for host in (second, third)})  # type: ignore[misc,dict-item]
    begun = []
    for host in (first, second, third):
        assert course.wait(host) == ""  # type: ignore[arg-type]
        begun.append(clock[0])
        clock[0] += 1
        course.end(host, turns_module.End("committed"))  # type: ignore[arg-type]
    assert begun == [100.0, 131.0, 132.0]


def test_a_host_whose_turn_cannot_come_is_not_waited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "PATIENCE", 0.3)
    early, late = FakeHost(True), FakeHost(True)
    early.name, early.executing_op_hash = "gpu0", ""
    course = turns(early)
    course = Turns(course.state, course.rollout, [early, late], [["gpu0"], ["gpu1"]])  # type: ignore[list-item]
    course.state.results[late] = SimpleNamespace(error_ops=0)  # type: ignore[index,assignment]
    assert course.wait(late) == "gpu0 of an earlier wave had no turn yet"  # type: ignore[arg-type]
    assert course.ends["gpu1"].how == "not attempted"
