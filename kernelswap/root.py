"""Root by sudo with a password that shows nowhere.

pyinfra's own way puts an askpass script on the host and the password into a command line, where for a moment every
user of the host can read it. These documented arguments of pyinfra do the same through standard input, and cost no
remote command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyinfra.api.arguments import pop_global_arguments
from pyinfra.api.host import Host

SUDO = "sudo -S -k -p '' -H sh"


class Unshown(str):
    """Shown as stars wherever a value is formatted as part of another."""

    def __repr__(self) -> str:
        return "'***'"


def arguments(host: Host) -> dict[str, Any]:
    """pyinfra's global arguments for what runs as root; none where its own way shows nothing."""
    given, _ = pop_global_arguments(host.state, host, {})
    password = given["_sudo_password"] or host.connector_data.get("prompted_sudo_password")
    if not password or not _plain_sudo(given):
        return {}
    return {"_sudo": False, "_shell_executable": SUDO, "_stdin": [Unshown(f"{password}\n")]}


def _plain_sudo(given: Mapping[str, Any]) -> bool:
    others = ("_sudo_user", "_use_sudo_login", "_preserve_sudo_env", "_su_user", "_doas", "_dzdo")
    return bool(given["_sudo"]) and not any(given[name] for name in others)
