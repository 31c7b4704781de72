"""The one operation that changes what a host serves: start the agent there and follow it to its verdict."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from paramiko import SSHException
from pyinfra import logger
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.api.command import FunctionCommand, QuoteString, StringCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host as current_host

from kernelswap import protocol
from kernelswap.operations.turns import COMMITTED, FAILED, LOST, End, Turns

DROPPED = "the connection is lost, but the swap goes on on the host; run the same command again to follow it"
QUIET_SECONDS = 90  # the agent's follower says something more often than this


@dataclass(frozen=True)
class Turn:
    """A host's part in a rollout. requests: one after another, and no further after one that failed; back: what takes
    them back. Each gets its id when it begins."""

    turns: Turns
    requests: Sequence[protocol.Request]
    back: Sequence[protocol.Request] = ()


@operation(is_idempotent=False)
def swap(turn: Turn) -> Generator[FunctionCommand, None, None]:
    """
    Make staged releases the current ones, or follow the swaps that are doing so, as soon as it is the host's turn.

    + turn: what is asked for, and in which rollout
    """
    # A function's command gets none of the operation's arguments by itself, so `_sudo` and the like go along.
    asked: Mapping[str, Any] = current_host.current_op_global_arguments or {}
    arguments = {key: asked[key] for key in CONNECTOR_ARGUMENT_KEYS if key in asked}
    yield FunctionCommand(_take_turn, [turn, arguments], {})


def _take_turn(state: State, host: Host, turn: Turn, arguments: Mapping[str, Any]) -> bool:
    """False fails the host without a traceback: pyinfra's exit code is 1 and what is wrong has been said."""
    _notice_a_dead_network(host)
    if why := turn.turns.wait(host):
        host.log(f"not attempted: {why}")
        return False
    end = _swap_all(state, host, turn, arguments)
    turn.turns.end(host, end)
    return end.how == COMMITTED


def _swap_all(state: State, host: Host, turn: Turn, arguments: Mapping[str, Any]) -> End:
    if not _connected(host) and (why := _reconnect(host)):  # while others had their turn
        return End(FAILED, why)
    done: set[str] = set()
    end = End(COMMITTED)
    for request in turn.requests:
        end = _follow(state, host, request, arguments)
        if end.how != COMMITTED:
            break
        done.add(request.instance)
    undo = [request for request in turn.back if request.instance in done]

    def back(reason: str) -> bool:
        host.log(f"goes back: {reason}")
        asked = [replace(request, reason=reason) for request in undo]
        return all(_follow(state, host, request, arguments).how == COMMITTED for request in asked)

    return replace(end, back=back if undo else None)


def _follow(state: State, host: Host, request: protocol.Request, arguments: Mapping[str, Any]) -> End:
    request = replace(request, swap=new_swap_id())
    command = StringCommand(protocol.PYTHON, protocol.AGENT_PATH, "swap", QuoteString(protocol.encode(request)))
    said: Sequence[str] = ()
    try:
        ended_well, output = host.run_shell_command(
            command, print_output=True, print_input=state.print_input, **arguments
        )
        said = output.stdout_lines
    except (OSError, SSHException, EOFError):
        ended_well = False
    if ended_well:
        return End(COMMITTED)
    if not _connected(host):
        host.log_styled(DROPPED, fg="yellow", log_func=logger.warning)
        return End(LOST, DROPPED)
    return End(FAILED, _verdict(said))


def new_swap_id() -> str:
    """Sorts by time, and is unique: 20261130T023000Z-ab12."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def _verdict(said: Sequence[str]) -> str:
    """The agent's last words, see verdict.py, in one line."""
    ends = [number for number, line in enumerate(said) if line.startswith(("ROLLED BACK", "DOWN", "REFUSED"))]
    if not ends:
        return said[-1].strip() if said else "the agent said nothing"
    lines = said[ends[-1] :]
    begin = next((number for number, line in enumerate(lines) if line.startswith("  cause: ")), None)
    if begin is None:
        return lines[0]
    faults = [line.strip() for line in takewhile(lambda line: line.startswith("    "), lines[begin + 1 :])]
    return f"{lines[0]}; {lines[begin].strip()} {'; '.join(faults)}".rstrip()


def _transport(host: Host) -> Any:
    client = getattr(host.connector, "client", None)
    return client.get_transport() if client is not None else None


def _connected(host: Host) -> bool:
    transport = _transport(host)
    return transport is None or bool(transport.is_active())


def _reconnect(host: Host) -> str:
    """Why it failed; "" if it did not."""
    try:
        host.connector.connect()
    except ConnectError as error:
        return str(error)
    _notice_a_dead_network(host)
    return ""


def _notice_a_dead_network(host: Host) -> None:
    """Without this a cut cable leaves us waiting for as long as TCP retries, a quarter of an hour."""
    transport = _transport(host)
    if transport is None:
        return
    transport.set_keepalive(QUIET_SECONDS // 6)
    if isinstance(transport.sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, QUIET_SECONDS * 1000)
