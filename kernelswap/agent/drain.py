"""A server's users: sent away before it stops, given time for what it is answering, and brought back.

When that is done, and that the journal knows of it before a router does, is for the transaction to say.
"""

from __future__ import annotations

import time
from typing import Callable, Iterator, List, Optional, Sequence

from kernelswap.agent import host, routers
from kernelswap.agent.client import Client
from kernelswap.agent.host import Folders
from kernelswap.agent.routers import Member, RouterError, Unreachable
from kernelswap.agent.server import Failed
from kernelswap.protocol import Cause, Drain, HostFault, Traffic

SETTLED = 1.0  # seconds without a request: what a router had sent when the server left its list has arrived by then


def faults(folders: Folders, traffic: Traffic, blocking: bool) -> Iterator[HostFault]:
    """What would keep users from being sent away, seen before anybody is. blocking: whether a router may do so."""
    try:
        host.traffic(folders)
    except (OSError, ValueError) as error:
        yield HostFault(f"{folders.traffic} cannot be read ({error})", "run the deploy again")
    for router in traffic.routers if blocking else ():
        try:
            routers.workers(router)
        except Unreachable as error:
            if traffic.drain.unreachable == "fail":
                yield error.fault
        except RouterError as error:
            yield error.fault


def leave(
    members: Sequence[Member], drain: Drain, expected: bool, leaving: Callable[[str], None], note: Callable[[str], None]
) -> List[HostFault]:
    """Take the server out of its routers; returns what went wrong and may not.

    A router that cannot be reached sends nobody either, or so `drain: {unreachable: proceed}` has it.
    expected: whether all routers should list the server. leaving: called with a router's URL before it is told; what it
    raises ends all.
    """
    wrong = []
    for member in members:
        url = member.router.url
        try:
            if member.listed():
                leaving(url)
                member.leave()
            elif expected:
                note(f"router {url} does not list {member.url}")
        except Unreachable as error:
            if drain.unreachable == "fail":
                wrong.append(error.fault)
            else:
                note(str(error))
        except RouterError as error:
            wrong.append(error.fault)
    return wrong


def left_running(server: Client, deadline: float, settled: float = 0) -> Optional[int]:
    """How many requests a server has left after its time to drain; None if it does not say.

    deadline: seconds that it has; settled: for how many of them it must have had none.
    """
    start, idle = time.monotonic(), None
    while True:
        count, now = server.running_requests(), time.monotonic()
        idle = (now if idle is None else idle) if count == 0 else None
        if count is None or (idle is not None and now - idle >= settled):
            return count
        if now - start >= deadline:
            return count
        time.sleep(0.25)


def wait(server: Client, drain: Drain, left: int, may_fail: bool) -> str:
    """Give the server's requests time to end; returns what was seen. left: how many routers it was taken out of.

    Raises Failed where requests must not be cut off, and may be; but only if it may_fail.
    """
    count = left_running(server, drain.deadline, SETTLED if left else 0)
    if count is None and not server.ready():
        running, why = "nothing answers", ""  # whom a stop would cut off
    elif count is None:
        running, why = "running requests unknown", ": the server has neither /v1/loads nor --enable-metrics"
    else:
        running, why = f"{count} request(s) running", f" after {drain.deadline:g} s" if count else ""
    if why and drain.then == "fail" and may_fail:
        todo = "raise `drain: {deadline: ...}`, or let the stop end them: `drain: {then: proceed}`"
        raise Failed(Cause(running + why, server.base, todo, "drain"))
    return f"out of {left} router(s), {running}" if left else running


def let_in(members: Sequence[Member], key: str, back: bool, note: Callable[[str], None]) -> str:
    """Put the server into its routers; returns what was seen. key: the server's own.

    Raises Failed; but on the way back that is a note, as the known-good serves all the same, and what keeps it in its
    routers goes on trying.
    """
    entered = 0
    for member in members:
        try:
            member.join(key)
            entered += 1
        except Unreachable as error:
            note(f"{error}: the server is put in when it does")
        except RouterError as error:
            if not back:
                raise Failed(Cause(str(error), member.router.url, "see the router's log", "router")) from None
            note(f"{error}: it is tried again")
    return f", in {entered} router(s)" if members else ""
