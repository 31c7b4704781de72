"""Put a release on the host. It changes nothing that runs: a release is only read by the swap that makes it current."""

import shlex

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.operations import server

from kernelswap.operations.content import place
from kernelswap.planning import Step
from kernelswap.protocol import CONFIG_ROOT, TRAFFIC_FILE


@deploy("Stage the release")
def stage_release(step: Step) -> None:
    instance = f"{CONFIG_ROOT}/{step.instance}"
    if step.traffic:
        server.shell(name="Create folders", commands=[f"umask 022; mkdir -p {shlex.quote(instance)}"])
        place(
            name="Stage routers, drain and hooks", path=f"{instance}/{TRAFFIC_FILE}", content=step.traffic, mode="600"
        )
    if not step.release or not step.stage:
        return
    folder = f"{instance}/releases/{step.release.name}"
    folders = shlex.join([instance, f"{instance}/releases", folder])
    server.shell(name="Create folders", commands=[f"umask 022; mkdir -p {folders}"])
    for name in host.loop(step.stage):
        # Whole or not at all: a half-written plan of the release that serves would leave no way back to it.
        if name in step.release.files:
            place(name=f"Stage {name}", path=f"{folder}/{name}", content=step.release.files[name].encode(), mode="644")
        elif step.release.secrets:
            place(name="Stage the secrets", path=f"{folder}/{name}", content=step.release.secrets, mode="600")
