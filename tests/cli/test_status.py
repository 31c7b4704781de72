from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from kernelswap.cli import history, status
from kernelswap.errors import ConfigError, Fault
from kernelswap.fleet import Seen
from kernelswap.protocol import Gpu, HostState, InstanceState, Report, Request, Running

REQUEST = Request("20261130T023000Z-ab12", "main", "converge", "b-2", "ada@desk")
GOOD = InstanceState(
    "main", "b-2", unit_state="active", unit_since=1764469800.0, unit_intact=True, health="ok", main_pid=7
)
GPU = Gpu(0, "GPU-1", "B200", "10.0", memory_total=2048, memory_used=1024)
FAILED = Report(REQUEST, "rolled-back", 1764469800.0, 1764469890.0)


def seen(*instances: InstanceState, **changes: Any) -> Seen[HostState]:
    state = HostState("sha", "the-host's-key", instances=instances, gpus=(GPU,))
    return replace(Seen("gpu1", {"instances": {i.instance: {} for i in instances}}, state), **changes)


# name, the host, whether it is ok, words of its row
CASES = [
    ("serves", seen(GOOD), True, "b-2 2025-11-30 02:30 UTC ok 1.0/2 GiB"),
    ("unreachable", seen(state=None, problem="Could not connect (timed out)"), False, "unreachable: Could not connect"),
    ("silent", seen(state=None), False, "unreachable: no answer"),
    ("never swapped", seen(InstanceState("main")), False, "none nothing committed"),
    ("failed", seen(replace(GOOD, unit_state="failed")), False, "unit is failed"),
    ("unhealthy", seen(replace(GOOD, health="unhealthy: nobody listens")), False, "unhealthy: nobody listens"),
    ("edited", seen(replace(GOOD, unit_intact=False)), False, "not as it was committed"),
    ("swapping", seen(replace(GOOD, health="unhealthy", running=Running(REQUEST, 0, "ready", True))), True, "at ready"),
    ("cut short", seen(replace(GOOD, running=Running(REQUEST, 0, "ready", False))), False, "cut short at ready"),
    (
        "gpus",
        replace(
            seen(GOOD),
            state=HostState("sha", "key", instances=(GOOD,), gpus=(GPU, Gpu(1, error="GPU is lost"), Gpu(2, "GPU-3"))),
        ),
        True,
        "1.0/2 GiB; GPU 1: GPU is lost",
    ),
    ("last failed", seen(replace(GOOD, history=(FAILED,))), True, "last: b-2 rolled-back 2025-11-30 02:31 UTC"),
]


@pytest.mark.parametrize(("host", "ok", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_row_says_what_is_wrong_and_so_does_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, host: Seen[HostState], ok: bool, words: str
) -> None:
    monkeypatch.setattr(status, "look", lambda *_, **__: (host,))
    result = CliRunner().invoke(status.command, ["hosts.py"])
    assert words in " ".join(result.output.split())
    assert result.exit_code == (0 if ok else 1)


def test_every_host_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = replace(GOOD, instance="left"), replace(GOOD, instance="right", health="unhealthy: 503")
    hosts = (seen(left, right), replace(seen(), host="gpu2", state=None, problem="no route"))
    monkeypatch.setattr(status, "look", lambda *_, **__: hosts)
    result = CliRunner().invoke(status.command, ["hosts.py"])
    assert [line.split()[:2] for line in result.output.splitlines()[1:]] == [
        ["gpu1", "left"],
        ["gpu1", "right"],
        ["gpu2", "unreachable:"],
    ]
    assert result.exit_code == 1


def test_json_holds_everything_but_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "look", lambda *_, **__: (seen(GOOD), seen(state=None, problem="no route")))
    result = CliRunner().invoke(status.command, ["hosts.py", "--json"])
    first, second = json.loads(result.output)
    assert first["ok"] is True
    assert first["state"]["instances"][0]["main_pid"] == 7
    assert (second["ok"], second["problem"], second["state"]) == (False, "unreachable: no route", None)
    assert "the-host's-key" not in result.output


@pytest.mark.parametrize("words", [["hosts.py", "--limit", "a", "--limit", "b"]])
def test_what_is_asked_of_the_hosts(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(status, "look", lambda *args, **kwargs: asked.append((args, kwargs)) or ())
    CliRunner().invoke(status.command, words)
    assert asked == [(("hosts.py", ("a", "b")), {"health": True, "gpus": True})]


@pytest.mark.parametrize("command", [status.command, history.command])
def test_a_fault_of_the_inventory_is_one_line(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConfigError([Fault("hosts.py", "is not an inventory file", "name one")])

    monkeypatch.setattr(status, "look", fail)
    monkeypatch.setattr(history, "look", fail)
    result = CliRunner().invoke(command, ["hosts.py"])
    assert (result.exit_code, result.output) == (1, "Error: hosts.py: is not an inventory file; name one\n")
