"""Answers the controller's one question: everything that a decision about this host needs.

glance.py reads most of it, and where there is no more to it the controller judges that alone. What is asked more rarely
(a swap that runs, servers of others, health, GPUs) is imported where it is needed: loading code takes the time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from kernelswap import ledger
from kernelswap.agent import glance, host, units
from kernelswap.agent.host import Folders
from kernelswap.agent.running import running
from kernelswap.protocol import Gpu, HostState, InstanceState, Plan, Report, RouterState, Server, decode, unit_name

GPU_LIMIT = 45.0  # seconds; with a server's health it stays below what the controller waits
HISTORY_SHOWN = 50  # the newest reports; older ones stay in the host's file


def inspect(
    instances: Sequence[str], users: Sequence[str], health: bool, with_gpus: bool, router: str = ""
) -> HostState:
    """router: the URL at which this host itself reaches the router that it has; "": it has none."""
    found, error = read_gpus() if with_gpus else ((), "")
    seen = glance.look(instances, users)
    state = state_of(seen, units.statuses(glance.unit_names(instances)))
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


def glanced(seen: Mapping[str, Any]) -> HostState:
    """The state of a host, from what `glance` printed there."""
    shown = {name: units.status_of(units.values(text), *seen["clock"]) for name, text in seen["units"].items()}
    return state_of(seen, {**dict.fromkeys(glance.unit_names(seen["instances"]), units.ABSENT), **shown})


def state_of(seen: Mapping[str, Any], statuses: Mapping[str, units.UnitStatus]) -> HostState:
    return HostState(
        agent=seen["agent"],
        key=(seen["key"] or "").strip(),
        users=tuple(seen["users"]),
        recover_unit=seen["recover_unit"],
        recover_enabled=tuple(seen["recover_enabled"]),
        instances=tuple(_instance(name, each, statuses) for name, each in seen["instances"].items()),
        metrics=seen["metrics"],
        drift_units=seen["drift_units"],
        member_unit=seen["member_unit"],
    )


def _instance(name: str, seen: Mapping[str, Any], statuses: Mapping[str, units.UnitStatus]) -> InstanceState:
    status, _, keeper = (statuses[unit] for unit in glance.unit_names([name]))
    known_good = seen["known_good"]
    history = _reports(seen["history"])
    return InstanceState(
        instance=name,
        known_good=known_good,
        unit_state=status.active if status.fragment or status.running else "absent",
        unit_since=status.since,
        main_pid=status.main_pid or None,
        unit_intact=known_good is not None and status.enabled and seen["intact"],
        releases={release: dict(files) for release, files in seen["releases"].items()},
        plan=_plan(seen["plan"]),
        history=tuple(history[-HISTORY_SHOWN:]),
        barred=tuple(sorted(ledger.barred(history))),
        rollback_target=ledger.rollback_target(history, set(seen["releases"])),
        traffic=seen["traffic"],
        member=keeper.active if keeper.enabled else "disabled",
    )


def _reports(lines: Sequence[str]) -> List[Report]:
    """A line torn by a power cut is skipped."""
    reports = []
    for line in lines:
        try:
            reports.append(decode(Report, line))
        except ValueError:
            continue
    return reports


def _plan(text: Optional[str]) -> Optional[Plan]:
    try:
        return decode(Plan, text) if text else None
    except ValueError:
        return None


def read_plan(folders: Folders, release: Optional[str]) -> Optional[Plan]:
    """A staged release's plan; None if there is none that can be read."""
    try:
        return host.read_plan(folders, release) if release else None
    except (OSError, ValueError):
        return None


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
