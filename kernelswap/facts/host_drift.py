"""In what a host is not as it was committed, read in one remote command."""

from __future__ import annotations

from collections.abc import Iterable

from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host

from kernelswap import protocol
from kernelswap.facts.agent import CARRIED, AgentFact, ask


class HostDrift(AgentFact[protocol.HostDrift]):
    """The host as its own agent sees it, and what it finds amiss."""

    word = "drift"
    answer = protocol.HostDrift

    def command(self, instances: Iterable[str], users: Iterable[str]) -> StringCommand:
        return self.asking({"instances": list(instances), "users": list(users)})


class CarriedHostDrift(HostDrift):
    """The same by an agent that comes along."""

    script = CARRIED


def read(
    host: Host, instances: Iterable[str], users: Iterable[str], timeout: int | None = None
) -> protocol.HostDrift | None:
    """None if the host could not be read; pyinfra has printed why."""
    question = {"instances": tuple(instances), "users": tuple(users)}
    return ask(host, HostDrift, CarriedHostDrift, question, timeout)
