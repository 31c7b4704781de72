"""What a host needs before it can swap: the agent, the host's key, the recover unit, the service's user.

Nothing here touches a running server, and only what the fact reported missing is done.
"""

import shlex

from pyinfra.api import deploy
from pyinfra.operations import server

from kernelswap.facts.agent import ALONE
from kernelswap.host_setup import MEMBER_UNIT, RECOVER_UNIT, Setup
from kernelswap.operations.content import File, place
from kernelswap.protocol import AGENT_PATH, KEY_PATH

NEW_USER = ["useradd", "--system", "--create-home", "--shell", "/usr/sbin/nologin"]


@deploy("Prepare the host")
def prepare_host(setup: Setup) -> None:
    files = []
    if setup.key:
        files.append(File(KEY_PATH, setup.key, mode=0o600, create=True))
    if setup.agent:
        files.append(File(AGENT_PATH, setup.agent, mode=0o755))
    if setup.recover_unit:
        files.append(File(f"/etc/systemd/system/{RECOVER_UNIT}", setup.recover_unit))
    if setup.member_unit:
        files.append(File(f"/etc/systemd/system/{MEMBER_UNIT}", setup.member_unit))
    if files:
        place(name="Install the agent", files=files)

    # Each command of server.shell is a remote command, so they are joined.
    commands = [shlex.join([*NEW_USER, "--home-dir", f"/var/lib/{user}", user]) for user in setup.users]
    if setup.recover_unit or setup.member_unit or setup.recover:
        commands.append("systemctl daemon-reload")
    if setup.recover:
        names = [RECOVER_UNIT.replace("@", f"@{instance}") for instance in setup.recover]
        commands.append(shlex.join(["systemctl", "enable", "--quiet", "--", *names]))
    if setup.agent:
        commands.append(f"{ALONE} {AGENT_PATH} compile")
    if commands:
        server.shell(name="Set up users, units and the agent", commands=[" && ".join(commands)])


@deploy("Keep the servers in their routers")
def join_routers(setup: Setup) -> None:
    """After what it reads is staged."""
    names = [MEMBER_UNIT.replace("@", f"@{instance}") for instance in setup.members]
    command = shlex.join(["systemctl", "enable", "--quiet", "--now", "--", *names])
    server.shell(name="Start the member unit", commands=[command])
