"""All that a decision about a host needs, read in one remote command."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.host import Host

from kernelswap import agent, protocol
from kernelswap.agent.state import glanced
from kernelswap.facts.agent import ALONE, CARRIED, NEEDS_PYTHON, AgentFact, ask
from kernelswap.protocol import AGENT_PATH, glance_bytecode

GLANCE = "glance "


class HostState(AgentFact[protocol.HostState]):
    """The host as its own agent sees it."""

    word = "inspect"
    answer = protocol.HostState

    def command(
        self,
        instances: Iterable[str],
        users: Iterable[str],
        health: bool = False,
        gpus: bool = False,
        router: str = "",
    ) -> StringCommand:
        asked = {"instances": list(instances), "users": list(users), "health": health, "gpus": gpus}
        return self.asking({**asked, "router": router} if router else asked)


class CarriedHostState(HostState):
    """The same by an agent that comes along, which is then none that the host has."""

    script = CARRIED

    def process(self, output: Iterable[str]) -> protocol.HostState | None:
        state = super().process(output)
        return None if state is None else replace(state, agent="")


class GlancedHostState(HostState):
    """The same of a host on which nothing is under way, at a fraction of its cost; the agent's word where more is."""

    def asking(self, question: Mapping[str, Any]) -> StringCommand:
        instances, users = (",".join(question[name]) for name in ("instances", "users"))
        words = [QuoteString(word) for word in (instances, users, json.dumps(question))]
        source, compiled = _glance()
        answer = f'{ALONE} {compiled} "$@" 2>/dev/null || {ALONE} -c'
        return StringCommand(
            f"{NEEDS_PYTHON}; set --", *words, f"; {answer}", QuoteString(source), '"$@" 2>/dev/null || :'
        )

    def process(self, output: Iterable[str]) -> protocol.HostState | None:
        lines = list(output)
        for line in lines:
            if line.startswith(GLANCE):
                return glanced(ast.literal_eval(line[len(GLANCE) :]))
        return super().process(lines)


@cache
def _glance() -> tuple[str, str]:
    """Its source, and where a host with our agent keeps its bytecode."""
    source = Path(agent.__path__[0], "glance.py").read_bytes()
    return source.decode(), str(PurePosixPath(AGENT_PATH).with_name(glance_bytecode(source)))


def read(
    host: Host,
    instances: Iterable[str],
    users: Iterable[str],
    health: bool = False,
    gpus: bool = False,
    timeout: int | None = None,
    router: str = "",
) -> protocol.HostState | None:
    """The host's state; its `agent` is "" if none of ours is installed. None if the host could not be read.

    router: the URL at which the host itself reaches the router that it has. A host that could not be read is marked as
    failed, and pyinfra has printed why.
    """
    question: dict[str, object] = {"instances": tuple(instances), "users": tuple(users), "health": health, "gpus": gpus}
    if router:
        question["router"] = router
    first = HostState if health or gpus or router else GlancedHostState
    return ask(host, first, CarriedHostState, question, timeout)
