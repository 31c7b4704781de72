"""What is staged on a host, and what runs there: for comparisons only; read in one remote command."""

from __future__ import annotations

from collections.abc import Iterable

from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host

from kernelswap import protocol
from kernelswap.facts.agent import CARRIED, AgentFact, ask


class HostReleases(AgentFact[protocol.HostReleases]):
    """The staged releases; where asked for, also the servers that run and the GPUs."""

    word = "releases"
    answer = protocol.HostReleases

    def command(self, instances: Iterable[str], running: bool, gpus: bool) -> StringCommand:
        return self.asking({"instances": list(instances), "running": running, "gpus": gpus})


class CarriedHostReleases(HostReleases):
    """The same by an agent that comes along."""

    script = CARRIED


def read(
    host: Host, instances: Iterable[str], running: bool, gpus: bool, timeout: int | None = None
) -> protocol.HostReleases | None:
    """None if the host could not be read; pyinfra has printed why."""
    question = {"instances": tuple(instances), "running": running, "gpus": gpus}
    return ask(host, HostReleases, CarriedHostReleases, question, timeout)
