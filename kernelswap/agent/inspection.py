"""Answers the controller's one question: everything that a decision about this host needs.

glance.py reads most of it and state.py judges that, on the controller where there is no more to it. What is asked more
rarely (servers of others, health, GPUs) is imported where it is needed: loading code takes the time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence, Tuple

from kernelswap.agent import glance, host, units
from kernelswap.agent.host import Folders
from kernelswap.agent.running import running
from kernelswap.agent.state import Unit, state_of
from kernelswap.protocol import Gpu, HostState, InstanceState, RouterState, Server, unit_name

GPU_LIMIT = 45.0  # seconds; with a server's health it stays below what the controller waits


def inspect(
    instances: Sequence[str], users: Sequence[str], health: bool, with_gpus: bool, router: str = ""
) -> HostState:
    """router: the URL at which this host itself reaches the router that it has; "": it has none."""
    found, error = read_gpus() if with_gpus else ((), "")
    seen = glance.look(instances, users)
    statuses = units.statuses(glance.unit_names(instances))
    state = state_of(seen, {name: _seen(status) for name, status in statuses.items()})
    at_work = {place.instance: running(place) for place in map(Folders, instances)}
    return replace(
        state,
        instances=tuple(
            replace(each, running=at_work[each.instance], health=_health(each) if health else "")
            for each in state.instances
        ),
        servers=_servers(instances),
        gpus=found,
        gpu_error=error,
        router=_router(router, state.key) if router else None,
    )


def _seen(status: units.UnitStatus) -> Unit:
    there = status.fragment or status.running
    return Unit(status.active if there else "absent", status.main_pid, status.since, status.enabled)


def _health(state: InstanceState) -> str:
    from kernelswap.agent import client

    if state.plan is None:
        return ""
    key = host.secrets(Folders(state.instance), state.plan.release).get("api-key", "")
    server = client.Client(client.base_url(state.plan), state.plan.served_name, key)
    status = server.status("/health", timeout=30)
    return "ok" if status == 200 else f"unhealthy: /health answers {status}" if status else "unhealthy: nobody listens"


def _router(url: str, key: str) -> RouterState:
    from kernelswap.agent import router_host

    return router_host.look(url, key)


def _servers(instances: Sequence[str]) -> Tuple[Server, ...]:
    from kernelswap.agent import occupants, processes

    ours = {unit_name(instance) for instance in instances}
    table = processes.table()
    mains = occupants.main_pids(table)
    heads = [head for head in processes.servers(table) if head.unit not in ours]
    return tuple(processes.as_server(head, occupants.owning_unit(table, head, mains)) for head in heads)


def read_gpus() -> Tuple[Tuple[Gpu, ...], str]:
    from kernelswap.agent import gpus

    try:
        return gpus.read(GPU_LIMIT), ""
    except gpus.GpuError as error:
        return (), str(error)
