"""What a host needs before it can swap: the service user, the agent, the host's key, the recover unit.

Nothing here touches a running server, and only what the fact reported missing is done.
"""

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.operations import server, systemd

from kernelswap.operations.content import place
from kernelswap.planning import MEMBER_UNIT, RECOVER_UNIT, Setup
from kernelswap.protocol import AGENT_PATH, CONFIG_ROOT, KEY_PATH


@deploy("Prepare the host")
def prepare_host(setup: Setup) -> None:
    for user in host.loop(setup.users):
        server.user(  # noqa: S604 - the user's login shell, no shell is started
            name="Create the service user",
            user=user,
            system=True,
            home=f"/var/lib/{user}",
            ensure_home=True,
            shell="/usr/sbin/nologin",
        )
    if setup.key or setup.agent:
        folders = [CONFIG_ROOT, AGENT_PATH.rpartition("/")[0]]
        server.shell(name="Create folders", commands=[f"install -d -m 755 {' '.join(folders)}"])
    if setup.key:
        place(name="Create the host's key", path=KEY_PATH, content=setup.key, mode="600", create=True)
    if setup.agent:
        place(name="Install the agent", path=AGENT_PATH, content=setup.agent, mode="755")
    if setup.recover_unit:
        path = f"/etc/systemd/system/{RECOVER_UNIT}"
        place(name="Install the recover unit", path=path, content=setup.recover_unit.encode(), mode="644")
    if setup.member_unit:
        path = f"/etc/systemd/system/{MEMBER_UNIT}"
        place(name="Install the member unit", path=path, content=setup.member_unit.encode(), mode="644")
    for instance in host.loop(setup.recover):
        systemd.service(
            name="Enable the recover unit",
            service=RECOVER_UNIT.replace("@", f"@{instance}"),
            enabled=True,
            running=None,
            daemon_reload=True,
        )


@deploy("Keep the servers in their routers")
def join_routers(setup: Setup) -> None:
    """After what it reads is staged."""
    for instance in host.loop(setup.members):
        systemd.service(
            name="Start the member unit",
            service=MEMBER_UNIT.replace("@", f"@{instance}"),
            running=True,
            enabled=True,
            daemon_reload=True,
        )
