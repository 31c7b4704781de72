from __future__ import annotations

import dataclasses
import socket

import pytest

from kernelswap.agent import client, processes, server, units
from kernelswap.agent.processes import Process
from kernelswap.protocol import Plan

PLAN = Plan("main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "m", "0.0.0.0", 30000)
TOKEN = client.Token(-0.1, 5)


@pytest.mark.parametrize(("result", "blame"), [("oom-kill", "host"), ("timeout", "host"), ("exit-code", "release")])
def test_who_is_to_blame_for_an_end_without_a_word(result: str, blame: str) -> None:
    status = units.UnitStatus("failed", "failed", 0, "", False, "", result, None)
    assert server.unit_failure(PLAN, status, "it ended").cause.blame == blame


@pytest.mark.parametrize(
    ("expose", "ready", "waiting_for"),
    [("verified", False, "/ready"), ("smoke", False, "/ready"), ("ready", False, ""), ("verified", True, "")],
)
def test_what_a_starting_server_lacks(
    expose: str, ready: bool, waiting_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token is what counts; SGLang's own word is waited for where users are not let in at once."""
    words = ("sglang::scheduler",)
    table = {7: Process(7, 1, 10**6, "S", 0, words, "/system.slice/sglang-main.service")}
    monkeypatch.setattr(processes, "table", lambda: table)
    monkeypatch.setattr(processes, "listeners", lambda _port: [7])
    monkeypatch.setattr(client.Client, "ready", lambda _self: ready)
    monkeypatch.setattr(client.Client, "generate", lambda *_others, **_more: client.Generated("a", (TOKEN,), 1, 0.1))
    plan = dataclasses.replace(PLAN, expose=expose)
    assert server._not_ready(plan, client.Client("http://x", "m"), started=1.0, patience=5) == waiting_for
    monkeypatch.setattr(client.Client, "generate", lambda *_others, **_more: client.Generated("", (), 0, 0.1))
    assert server._not_ready(plan, client.Client("http://x", "m"), started=1.0, patience=5) != ""


def test_whether_anybody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert client.listens(dataclasses.replace(PLAN, port=port))
    assert not client.listens(dataclasses.replace(PLAN, port=port))
