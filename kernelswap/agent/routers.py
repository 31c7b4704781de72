"""sglang-router's HTTP interface, as far as a swap asks it: who its workers are, one in, one out.

Measured with sglang-router 0.3.2: `DELETE /workers/ID` takes a worker off the list at once, and what it is answering
goes on to its end; `POST /workers` is only queued, so it is the list that tells. The list is that of `GET /workers`.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Set, Tuple
from urllib.parse import urlsplit

from kernelswap.agent import client, network
from kernelswap.agent.client import Unanswered
from kernelswap.protocol import HostFault, Router, Traffic

LIMIT = 10.0  # seconds for one question, and until a worker that was taken out is off the list
JOIN = 60.0  # seconds until a worker that was put in is listed as healthy
AGAIN = 5.0  # seconds after which it is put in again
CORRECT = "correct `routers`, or upgrade it"


class RouterError(Exception):
    """The router answered, and not as it was asked. fault: how, and what to do."""

    def __init__(self, what: str, todo: str) -> None:
        self.fault = HostFault(what, todo)
        super().__init__(str(self.fault))


class Unreachable(RouterError):
    """It does not answer; its text leaves open what to do, as that may be nothing."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "start it, or set `drain: {unreachable: proceed}`")

    def __str__(self) -> str:
        return self.fault.what


@dataclass(frozen=True)
class Worker:
    id: str
    url: str
    healthy: bool


@dataclass(frozen=True)
class Member:
    """One server as one of its routers knows it. address, port: the server's, as the router reaches it."""

    router: Router
    address: str
    port: int

    @property
    def url(self) -> str:
        return client.url(self.address, self.port)

    def listed(self) -> List[Worker]:
        """The router's entries for this server, under whatever name of this host. Raises RouterError."""
        return [worker for worker in workers(self.router) if self._is_ours(worker.url)]

    def leave(self) -> bool:
        """Take the server out; whether it was in. Raises RouterError where the router keeps it."""
        found = there = self.listed()
        until = time.monotonic() + LIMIT
        while there:
            for worker in there:
                _ask(self.router, f"/workers/{worker.id}", "DELETE")
            there = self.listed()
            if there and time.monotonic() > until:
                raise RouterError(f"router {self.router.url} still lists {self.url}", "take it out by hand")
            time.sleep(0.1 if there else 0)
        return bool(found)

    def join(self, key: str = "", limit: Optional[float] = None) -> None:
        """Put the server in, and wait until the router takes it for healthy. Raises RouterError.

        key: the server's own. Only a router that asks its own users for a key gets it: it would let in everybody else.
        """
        limit = JOIN if limit is None else limit
        until, asked = time.monotonic() + limit, 0.0
        entry = {"url": self.url, **({"api_key": key} if key and self.router.key else {})}
        while True:
            there, now = self.listed(), time.monotonic()
            if any(worker.healthy for worker in there):
                return
            if now > until:
                how = "takes it for unhealthy" if there else "does not list it"
                what = f"router {self.router.url} {how} after {limit:g} s"
                raise RouterError(what, f"see that it reaches {self.url}/health")
            if not there and (not asked or now - asked > AGAIN):
                _ask(self.router, "/workers", "POST", entry)
                asked = now
            time.sleep(0.2)

    def _is_ours(self, url: str) -> bool:
        """With --dp-aware a worker has an entry for each of its ranks: http://gpu1:30000@0."""
        host, port = _place(url)
        if port != self.port:
            return False
        if host == self.address:
            return True
        here = set(network.own_addresses())
        names = _addresses(host)
        if any(ipaddress.ip_address(name).is_loopback for name in names):  # which is the router's own host
            return bool(_addresses(_place(self.router.url)[0]) & {*here, "127.0.0.1", "::1"})
        return bool(names & here)


def members(traffic: Traffic, port: int) -> List[Member]:
    """The instance's server as each of its routers knows it."""
    return [Member(router, traffic.address, port) for router in traffic.routers]


def workers(router: Router) -> List[Worker]:
    """All that a router lists. Raises RouterError."""
    answer = _ask(router, "/workers", "GET")
    try:
        return [Worker(str(row["id"]), str(row["url"]), row["is_healthy"] is True) for row in answer["workers"]]
    except (KeyError, TypeError):
        raise RouterError(_no_router(router), CORRECT) from None


def _ask(router: Router, path: str, method: str, body: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """The JSON object that the router answers; an empty one about a worker that is gone already."""
    headers = {"Content-Type": "application/json"}
    if router.key:
        headers["Authorization"] = f"Bearer {router.key}"
    try:
        status, text = client.send(router.url + path, LIMIT, body, headers, method)
    except Unanswered as error:
        raise Unreachable(f"router {router.url} does not answer: {error}") from None
    if status == 404 and method == "DELETE":
        return {}
    if status in (401, 403):
        raise RouterError(f"router {router.url} refuses our key", "see `key` of `routers`")
    if status in (502, 503, 504):  # of what stands before it
        raise Unreachable(f"router {router.url} does not answer: HTTP {status}")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if status >= 400 or not isinstance(answer, dict):
        raise RouterError(f"{_no_router(router)} ({method} {path}: HTTP {status}: {text[:200]!r})", CORRECT)
    return answer


def _no_router(router: Router) -> str:
    return f"{router.url} does not answer as an sglang-router of 0.3 or later does"


def _place(url: str) -> Tuple[str, int]:
    scheme, _, rest = url.partition("://")
    parts = urlsplit(f"{scheme}://{rest.partition('@')[0]}")
    try:
        return parts.hostname or "", parts.port or (443 if scheme == "https" else 80)
    except ValueError:
        return "", 0


def _addresses(name: str) -> Set[str]:
    try:
        return {
            str(ipaddress.ip_address(str(found[4][0]).partition("%")[0])) for found in socket.getaddrinfo(name, None)
        }
    except (OSError, UnicodeError):
        return set()
