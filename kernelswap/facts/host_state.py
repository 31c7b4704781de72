"""All that a decision about a host needs, read in one remote command."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pyinfra import logger
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host

from kernelswap import bundle, protocol, root
from kernelswap.protocol import AGENT_PATH

PYTHON = "/usr/bin/python3"
NEEDS_PYTHON = f"[ -x {PYTHON} ] || {{ echo 'kernelswap needs {PYTHON} on the host' >&2; exit 1; }}"
# An agent that fails here is replaced by ours, so what it has to say is not worth an alarm.
INSTALLED = f"{NEEDS_PYTHON}; [ ! -f {AGENT_PATH} ] || {PYTHON} {AGENT_PATH} inspect {{}} 2>/dev/null || :"
CARRIED = (
    f'{NEEDS_PYTHON}; t=$(mktemp -d) && trap \'rm -rf "$t"\' EXIT && base64 -d >"$t/agent.pyz" '
    f'&& {PYTHON} "$t/agent.pyz" inspect {{}}'
)


class HostState(FactBase[protocol.HostState | None]):
    """The host as its own agent sees it; None if it has none, or one that does not answer as ours does."""

    script = INSTALLED

    def command(
        self,
        instances: Iterable[str],
        users: Iterable[str],
        health: bool = False,
        gpus: bool = False,
    ) -> StringCommand:
        question = json.dumps({"instances": list(instances), "users": list(users), "health": health, "gpus": gpus})
        before, after = self.script.split("{}")
        return StringCommand(before, QuoteString(question), after, _separator="")

    def process(self, output: Iterable[str]) -> protocol.HostState | None:
        lines = [line for line in output if line.startswith("{")]
        try:
            return protocol.decode(protocol.HostState, lines[-1]) if lines else None
        except ValueError:
            return None


class CarriedHostState(HostState):
    """The same by an agent that comes along on standard input as base64 and leaves nothing behind: first contact."""

    script = CARRIED


def read(
    host: Host,
    instances: Iterable[str],
    users: Iterable[str],
    health: bool = False,
    gpus: bool = False,
    timeout: int | None = None,
) -> protocol.HostState | None:
    """The host's state; its `agent` is "" if none of ours is installed. None if the host could not be read.

    A host that could not be read is marked as failed, and pyinfra has printed why.
    """
    try:
        return _read(host, instances, users, health, gpus, timeout)
    except EOFError:  # pyinfra asks for a password that sudo wants, and nobody is there to type it
        host.log_styled("sudo asks for a password: set _sudo_password", fg="red", log_func=logger.error)
        give_up(host)
        return None


def give_up(host: Host) -> None:
    """Fail this host at once, as pyinfra does for a fact that fails: it counts for --fail-percent and the exit code."""
    try:
        host.state.fail_hosts({host})  # type: ignore[no-untyped-call]
    except EOFError:
        # Without -y pyinfra asks whether to go on with the other hosts. With nobody there to answer, a --dry run
        # still has its plan to show.
        return


def _read(
    host: Host, instances: Iterable[str], users: Iterable[str], health: bool, gpus: bool, timeout: int | None
) -> protocol.HostState | None:
    by = root.arguments(host)
    question: dict[str, Any] = {"instances": tuple(instances), "users": tuple(users), "health": health, "gpus": gpus}
    if timeout:
        question["_timeout"] = timeout
    state: protocol.HostState | None = host.get_fact(HostState, **question, **by)
    if state is not None or host in host.state.failed_hosts:
        return state
    by["_stdin"] = [*by.get("_stdin", ()), root.Unshown(bundle.build().base64)]
    carried: protocol.HostState | None = host.get_fact(CarriedHostState, **question, **by)
    return None if carried is None else replace(carried, agent="")
