"""What a host has kept of one swap, read in one remote command."""

from __future__ import annotations

from collections.abc import Iterable

from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host

from kernelswap import protocol
from kernelswap.facts.agent import CARRIED, AgentFact, ask


class SwapEvidence(AgentFact[protocol.Evidence]):
    """The evidence of the swap whose id begins with `swap`; "": of the newest."""

    word = "evidence"
    answer = protocol.Evidence

    def command(self, instances: Iterable[str], swap: str = "") -> StringCommand:
        return self.asking({"instances": list(instances), "swap": swap})


class CarriedSwapEvidence(SwapEvidence):
    """The same by an agent that comes along."""

    script = CARRIED


def read(host: Host, instances: Iterable[str], swap: str = "", timeout: int | None = None) -> protocol.Evidence | None:
    """None if the host could not be read; pyinfra has printed why."""
    question = {"instances": tuple(instances), "swap": swap}
    return ask(host, SwapEvidence, CarriedSwapEvidence, question, timeout)
