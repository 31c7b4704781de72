"""The router of a host: its user, key and unit. It is started anew, and must then list its servers."""

import shlex

from pyinfra.api import deploy
from pyinfra.operations import server, systemd

from kernelswap.host_setup import Setup
from kernelswap.operations.content import File, place
from kernelswap.protocol import AGENT_PATH, PYTHON, ROUTER_KEY, ROUTER_UNIT
from kernelswap.router_planning import RouterPlan
from roles.host import prepare_host


@deploy("Run the router")
def run_router(router: RouterPlan) -> None:
    prepare_host(Setup(key=router.host_key, agent=router.agent))
    if router.user:
        server.user(  # noqa: S604 - the user's login shell, no shell is started
            name="Create the router's user", user=router.user, system=True, shell="/usr/sbin/nologin"
        )
    files = [File(f"/etc/systemd/system/{ROUTER_UNIT}", router.unit)]
    if router.key:
        files.append(File(ROUTER_KEY, router.key, mode=0o600))
    place(name="Install the router's unit", files=files)
    systemd.service(
        name="Start the router",
        service=ROUTER_UNIT,
        running=True,
        restarted=True,
        enabled=True,
        daemon_reload=True,
    )
    ask = shlex.join([PYTHON, AGENT_PATH, "router", router.url])
    server.shell(name="Wait until the router lists its servers", commands=[ask])
