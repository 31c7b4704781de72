"""Answers the controller's one question: everything that a decision about this host needs.

It is asked of every host in every run, and most of its time goes into loading code: what only some answers need (a
server's health, GPUs, servers of others) is imported where it is.
"""

from __future__ import annotations

import contextlib
import pwd
from pathlib import Path
from typing import Dict, Optional, Sequence, Tuple

from kernelswap import ledger
from kernelswap.agent import files, host, processes, units
from kernelswap.agent.host import Folders
from kernelswap.agent.running import running, service_name
from kernelswap.protocol import AGENT_PATH, KEY_PATH, Gpu, HostState, InstanceState, Plan, Server, unit_name

RECOVER_UNIT = Path("/etc/systemd/system/kernelswap-recover@.service")
GPU_LIMIT = 45.0  # seconds; with a server's health it stays below what the controller waits
HISTORY_SHOWN = 50  # the newest reports; older ones stay in the host's file


def inspect(instances: Sequence[str], users: Sequence[str], health: bool, with_gpus: bool) -> HostState:
    found, error = read_gpus() if with_gpus else ((), "")
    wanted = Path("/etc/systemd/system/multi-user.target.wants")
    places = [Folders(instance) for instance in instances]
    states = units.statuses(name for place in places for name in (place.unit, service_name(place.instance)))
    return HostState(
        agent=host.digest(Path(AGENT_PATH)),
        key=(files.read(Path(KEY_PATH)) or "").strip(),
        users=tuple(user for user in users if _exists(user)),
        recover_unit=host.digest(RECOVER_UNIT),
        recover_enabled=tuple(i for i in instances if (wanted / f"kernelswap-recover@{i}.service").exists()),
        instances=tuple(_instance(place, states, health) for place in places),
        servers=_servers(instances),
        gpus=found,
        gpu_error=error,
    )


def _instance(folders: Folders, states: Dict[str, units.UnitStatus], health: bool) -> InstanceState:
    known_good = host.known_good(folders)
    status = states[folders.unit]
    plan = read_plan(folders, known_good)
    history = host.history(folders)
    staged = host.staged(folders)
    return InstanceState(
        instance=folders.instance,
        known_good=known_good,
        unit_state=status.active if status.fragment or status.running else "absent",
        unit_since=status.since,
        main_pid=status.main_pid or None,
        unit_intact=known_good is not None and status.enabled and host.is_intact(folders, known_good),
        health=_health(folders, plan) if health and plan else "",
        releases={name: _files(folders.release(name)) for name in staged},
        plan=plan,
        running=running(folders, states[service_name(folders.instance)]),
        history=tuple(history[-HISTORY_SHOWN:]),
        barred=tuple(sorted(ledger.barred(history))),
        rollback_target=ledger.rollback_target(history, set(staged)),
    )


def _files(folder: Path) -> Dict[str, str]:
    """File name -> SHA-256; a secret's hash is not for telling. None of a release that was deleted meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return {
            path.name: "" if path.name == "secrets.yaml" else host.digest(path)
            for path in folder.iterdir()
            if path.is_file()
        }
    return {}


def read_plan(folders: Folders, release: Optional[str]) -> Optional[Plan]:
    """A staged release's plan; None if there is none that can be read."""
    try:
        return host.read_plan(folders, release) if release else None
    except (OSError, ValueError):
        return None


def _health(folders: Folders, plan: Plan) -> str:
    from kernelswap.agent import client

    key = host.secrets(folders, plan.release).get("api-key", "")
    status = client.Client(client.base_url(plan), plan.served_name, key).status("/health", timeout=30)
    return "ok" if status == 200 else f"unhealthy: /health answers {status}" if status else "unhealthy: nobody listens"


def _servers(instances: Sequence[str]) -> Tuple[Server, ...]:
    ours = {unit_name(instance) for instance in instances}
    table = processes.table()
    heads = [head for head in processes.servers(table) if head.unit not in ours]
    if not heads:
        return ()
    from kernelswap.agent import occupants

    mains = occupants.main_pids(table)
    return tuple(processes.as_server(head, occupants.owning_unit(table, head, mains)) for head in heads)


def read_gpus() -> Tuple[Tuple[Gpu, ...], str]:
    from kernelswap.agent import gpus

    try:
        return gpus.read(GPU_LIMIT), ""
    except gpus.GpuError as error:
        return (), str(error)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
