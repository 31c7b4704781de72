from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from pyinfra.context import ctx_host

from kernelswap import protocol
from kernelswap.operations import swap as module
from kernelswap.operations.swap import swap

REQUEST = protocol.Request("id", "main", "converge", "b-2", "o'hara@desk", reason="$(reboot)")


class FakeHost:
    """A host whose command ends as it is told to; it keeps what it was asked."""

    def __init__(self, answer: bool | Exception, connected: bool = True) -> None:
        self.answer = answer
        self.asked: dict[str, Any] = {}
        self.said: list[str] = []
        self.current_op_global_arguments = {"_sudo": True, "_sudo_password": "ops", "_env": {"A": "1"}, "name": "Swap"}
        transport = SimpleNamespace(is_active=lambda: connected, set_keepalive=lambda seconds: None, sock=None)
        self.connector = SimpleNamespace(client=SimpleNamespace(get_transport=lambda: transport))

    def run_shell_command(self, command: Any, **asked: Any) -> tuple[bool, None]:
        self.asked = {"command": command.get_raw_value(), **asked}
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer, None

    def log_styled(self, text: str, **_: Any) -> None:
        self.said.append(text)


def execute(host: Any) -> bool:
    with ctx_host.use(host):
        (command,) = swap._inner(REQUEST)  # type: ignore[attr-defined]
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
    assert protocol.decode(protocol.Request, words[3]) == REQUEST


def test_a_failed_swap_fails_quietly() -> None:
    host = FakeHost(False)
    assert execute(host) is False
    assert host.said == []


@pytest.mark.parametrize("answer", [False, OSError("reset"), EOFError()])
def test_a_dropped_connection_says_how_to_go_on(answer: bool | Exception) -> None:
    host = FakeHost(answer, connected=False)
    assert execute(host) is False
    assert host.said == [module.DROPPED]
