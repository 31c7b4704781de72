"""All that a decision about a host needs, read in one remote command."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host

from kernelswap import protocol
from kernelswap.facts.agent import CARRIED, AgentFact, ask


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
        question = {"instances": list(instances), "users": list(users), "health": health, "gpus": gpus}
        return self.asking({**question, **({"router": router} if router else {})})


class CarriedHostState(HostState):
    """The same by an agent that comes along, which is then none that the host has."""

    script = CARRIED

    def process(self, output: Iterable[str]) -> protocol.HostState | None:
        state = super().process(output)
        return None if state is None else replace(state, agent="")


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
    return ask(host, HostState, CarriedHostState, question, timeout)
