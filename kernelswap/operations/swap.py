"""The one operation that changes what a host serves: start the agent there and follow it to its verdict."""

from __future__ import annotations

import socket
from collections.abc import Generator, Mapping
from typing import Any

from paramiko import SSHException
from pyinfra import logger
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.api.command import FunctionCommand, QuoteString, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host as current_host

from kernelswap import protocol
from kernelswap.facts.agent import PYTHON

DROPPED = "the connection is lost, but the swap goes on on the host; run the same command again to follow it"
QUIET_SECONDS = 90  # the agent's follower says something more often than this


@operation(is_idempotent=False)
def swap(request: protocol.Request) -> Generator[FunctionCommand, None, None]:
    """
    Make a staged release the current one, or follow the swap that is doing so.

    + request: what is asked for
    """
    # A function's command gets none of the operation's arguments by itself, so `_sudo` and the like go along.
    asked: Mapping[str, Any] = current_host.current_op_global_arguments or {}
    arguments = {key: asked[key] for key in CONNECTOR_ARGUMENT_KEYS if key in asked}
    yield FunctionCommand(_follow, [request, arguments], {})


def _follow(state: State, host: Host, request: protocol.Request, arguments: Mapping[str, Any]) -> bool:
    """False fails the host without a traceback: pyinfra's exit code is 1 and the agent has said why."""
    command = StringCommand(PYTHON, protocol.AGENT_PATH, "swap", QuoteString(protocol.encode(request)))
    _notice_a_dead_network(host)
    try:
        ended_well, _ = host.run_shell_command(command, print_output=True, print_input=state.print_input, **arguments)
    except (OSError, SSHException, EOFError):
        ended_well = False
    if not ended_well and not _connected(host):
        host.log_styled(DROPPED, fg="yellow", log_func=logger.warning)
    return bool(ended_well)


def _transport(host: Host) -> Any:
    client = getattr(host.connector, "client", None)
    return client.get_transport() if client is not None else None


def _connected(host: Host) -> bool:
    transport = _transport(host)
    return transport is None or bool(transport.is_active())


def _notice_a_dead_network(host: Host) -> None:
    """Without this a cut cable leaves us waiting for as long as TCP retries, a quarter of an hour."""
    transport = _transport(host)
    if transport is None:
        return
    transport.set_keepalive(QUIET_SECONDS // 6)
    if isinstance(transport.sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, QUIET_SECONDS * 1000)
