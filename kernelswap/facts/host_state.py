"""All that a decision about a host needs, read in one remote command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pyinfra import logger
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host

from kernelswap import bundle, protocol, root
from kernelswap.protocol import AGENT_PATH

PYTHON = "/usr/bin/python3"
NEEDS_PYTHON = f"[ -x {PYTHON} ] || {{ echo 'kernelswap needs {PYTHON} on the host' >&2; exit 1; }}"
# An agent that fails here is replaced by ours, so what it has to say is not worth an alarm.
INSTALLED = f"{NEEDS_PYTHON}; [ ! -f {AGENT_PATH} ] || {PYTHON} {AGENT_PATH} {{}} 2>/dev/null || :"
CARRIED = (
    f'{NEEDS_PYTHON}; t=$(mktemp -d) && trap \'rm -rf "$t"\' EXIT && base64 -d >"$t/agent.pyz" '
    f'&& {PYTHON} "$t/agent.pyz" {{}}'
)

T = TypeVar("T", protocol.HostState, protocol.HostReleases)


class _Answer(FactBase[T | None]):
    """What the host's own agent answers; None if the host has none, or one that does not answer as ours does."""

    script = INSTALLED
    kind: type[T]

    def ask(self, word: str, question: Mapping[str, Any]) -> StringCommand:
        before, after = self.script.split("{}")
        return StringCommand(before, f"{word} ", QuoteString(json.dumps(question)), after, _separator="")

    def process(self, output: Iterable[str]) -> T | None:
        lines = [line for line in output if line.startswith("{")]
        try:
            return protocol.decode(self.kind, lines[-1]) if lines else None
        except ValueError:
            return None


class HostState(_Answer[protocol.HostState]):
    """The host as its own agent sees it."""

    kind = protocol.HostState

    def command(
        self,
        instances: Iterable[str],
        users: Iterable[str],
        health: bool = False,
        gpus: bool = False,
    ) -> StringCommand:
        question = {"instances": list(instances), "users": list(users), "health": health, "gpus": gpus}
        return self.ask("inspect", question)


class CarriedHostState(HostState):
    """The same by an agent that comes along on standard input as base64 and leaves nothing behind: first contact."""

    script = CARRIED


class HostReleases(_Answer[protocol.HostReleases]):
    """What is staged on a host, and what runs there: for comparisons only."""

    kind = protocol.HostReleases

    def command(self, instances: Iterable[str], running: bool, gpus: bool) -> StringCommand:
        return self.ask("releases", {"instances": list(instances), "running": running, "gpus": gpus})


class CarriedHostReleases(HostReleases):
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
    question = {"instances": tuple(instances), "users": tuple(users), "health": health, "gpus": gpus}
    state, carried = _ask(host, HostState, CarriedHostState, question, timeout)
    return replace(state, agent="") if state is not None and carried else state


def read_releases(
    host: Host, instances: Iterable[str], running: bool, gpus: bool, timeout: int
) -> protocol.HostReleases | None:
    """What a comparison needs of a host; None as of `read`."""
    question = {"instances": tuple(instances), "running": running, "gpus": gpus}
    return _ask(host, HostReleases, CarriedHostReleases, question, timeout)[0]


def give_up(host: Host) -> None:
    """Fail this host at once, as pyinfra does for a fact that fails: it counts for --fail-percent and the exit code."""
    try:
        host.state.fail_hosts({host})  # type: ignore[no-untyped-call]
    except EOFError:
        # Without -y pyinfra asks whether to go on with the other hosts. With nobody there to answer, a --dry run
        # still has its plan to show.
        return


def _ask(
    host: Host, fact: type[_Answer[T]], carried: type[_Answer[T]], question: dict[str, Any], timeout: int | None
) -> tuple[T | None, bool]:
    """The answer, and whether an agent had to be carried there for it."""
    try:
        by: dict[str, Any] = root.arguments(host)
        if timeout:
            question["_timeout"] = timeout
        answer: T | None = host.get_fact(fact, **question, **by)
        if answer is not None or host in host.state.failed_hosts:
            return answer, False
        by["_stdin"] = [*by.get("_stdin", ()), root.Unshown(bundle.build().base64)]
        return host.get_fact(carried, **question, **by), True
    except EOFError:  # pyinfra asks for a password that sudo wants, and nobody is there to type it
        host.log_styled("sudo asks for a password: set _sudo_password", fg="red", log_func=logger.error)
        give_up(host)
        return None, False
