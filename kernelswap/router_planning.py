"""From a pyinfra host that declares a router to what must be done there: read the fact, show it; nothing is changed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory

from kernelswap import bundle, root
from kernelswap.decide import digest
from kernelswap.errors import ConfigError, Fault, KernelswapError
from kernelswap.facts import host_state
from kernelswap.fleet import data_of
from kernelswap.goal import ROLLBACK
from kernelswap.planning import goal_of_host
from kernelswap.protocol import HostState, RouterState, keyed_digest
from kernelswap.render import Hidden, read_secrets

if TYPE_CHECKING:
    from kernelswap.router import RouterSpec


@dataclass(frozen=True)
class RouterPlan:
    """What a host's router lacks; for roles/router.py. host_key, agent: see host_setup.Setup. user: to be created.
    unit, key: to be put there; the router is then started anew. url: at which its own host asks it. root: see root.py.
    """

    url: str
    user: str = ""
    host_key: Hidden | None = None
    agent: bytes | None = None
    unit: str = ""
    key: Hidden | None = None
    root: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Declared:
    """A router with its key; "" if it has none."""

    spec: RouterSpec
    key: Hidden


def plan_router(host: Host, templates: Path) -> RouterPlan | None:
    """What is to be done for the router of a host; None where it has none, or one that is as it should be.

    Raises DeployError, which ends the whole run, for faults in what people wrote.
    """
    try:
        declared = None if goal_of_host(host).action == ROLLBACK else _declared(host.state.inventory).get(host.name)
        text = _unit(declared.spec, templates) if declared else ""
    except KernelswapError as error:
        raise DeployError(f"\n{error}") from None
    if declared is None:
        return None
    spec = declared.spec
    state = host_state.read(host, [], [spec.user], router=spec.url)
    if state is None or state.router is None:
        return None
    lacks = _lacks(declared, text, state, state.router)
    host.log(f"router: {f'start it anew: {lacks}' if lacks else _serves(state.router)}")
    if not lacks:
        return None
    host_key = Hidden(state.key or secrets.token_hex(32))
    agent = bundle.build()
    return RouterPlan(
        url=spec.url,
        user="" if spec.user in state.users else spec.user,
        host_key=None if state.key else host_key,
        agent=None if state.agent == agent.digest else agent.content,
        unit=text,
        key=declared.key if spec.key or state.router.key else None,
        root=root.arguments(host),
    )


@cache
def _declared(inventory: Inventory) -> dict[str, Declared]:
    """The routers of all hosts. Raises ConfigError with the faults of all of them, so that people see them at once."""
    routers: dict[str, Declared] = {}
    faults: list[Fault] = []
    for host in inventory:
        if not inventory.state.is_host_in_limit(host):
            continue
        where, data = f"host {host.name}", data_of(host)
        if "router" not in data:
            continue
        from kernelswap.router import router_spec  # which most fleets have no use for, and which takes a while to load

        try:
            if spec := router_spec(data, where):
                named = {"router/key": ("key", spec.key)} if spec.key else {}
                key = read_secrets(named, os.environ, f"{where}: ").get("key", "")
                routers[host.name] = Declared(spec, Hidden(key))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return routers


def _unit(spec: RouterSpec, templates: Path) -> str:
    from kernelswap.router import unit

    return unit(spec, templates)


def _lacks(declared: Declared, text: str, state: HostState, there: RouterState) -> str:
    """Why the router must be started anew; "" if it need not be."""
    key = declared.key.reveal()
    if there.unit != digest(text):
        return "its unit differs" if there.unit else "it is not there yet"
    if there.key != (keyed_digest(state.key, key) if key else ""):
        return "its key differs"
    return there.problem or ("" if there.state == "active" else f"it is {there.state}")


def _serves(there: RouterState) -> str:
    return f"unchanged: {len(there.workers or ())} server(s): {', '.join(there.workers or ()) or 'none yet'}"
