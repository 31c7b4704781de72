"""The router that runs on this host: what is known of it, and whether it does its work."""

from __future__ import annotations

import time
from pathlib import Path

from kernelswap.agent import files, host, routers, units
from kernelswap.agent.routers import RouterError
from kernelswap.protocol import ROUTER_KEY, ROUTER_UNIT, Router, RouterState, keyed_digest

UNIT_FILE = Path("/etc/systemd/system") / ROUTER_UNIT
START = 60.0  # seconds within which it must answer


def look(url: str, key: str) -> RouterState:
    """What a deploy must know of it. key: the host's, see protocol.KEY_PATH."""
    status = units.status(ROUTER_UNIT)
    own, workers, problem = _own_key(), None, ""
    if status.active == "active":
        try:
            workers = tuple(worker.url for worker in routers.workers(Router(url, own)))
        except RouterError as error:
            problem = str(error)
    state = status.active if status.enabled else "disabled" if status.fragment else "absent"
    return RouterState(host.digest(UNIT_FILE), keyed_digest(key, own) if own else "", state, workers, problem)


def wait(url: str) -> int:
    """Until it lists its workers, whoever they are: its /health is well before that, and without its key. The exit
    code is 0 if it does."""
    until = time.monotonic() + START
    router = Router(url, _own_key())
    while True:
        try:
            listed = routers.workers(router)
            print(f"router {url}: {len(listed)} worker(s), {sum(w.healthy for w in listed)} healthy")
            return 0
        except RouterError as error:
            problem = str(error)
        if units.status(ROUTER_UNIT).active == "failed" or time.monotonic() > until:
            print(f"{problem}: see journalctl -u {ROUTER_UNIT}")
            return 1
        time.sleep(0.2)


def _own_key() -> str:
    return (files.read(Path(ROUTER_KEY)) or "").strip()
