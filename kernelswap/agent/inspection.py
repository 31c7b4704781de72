"""Answers the controller's one question: everything that a decision about this host needs."""

from __future__ import annotations

import contextlib
import hashlib
import pwd
from pathlib import Path
from typing import Dict, Optional, Sequence, Tuple

from kernelswap import ledger
from kernelswap.agent import client, files, gpus, host, member, occupants, processes, router_host, service, units
from kernelswap.agent.client import Client
from kernelswap.agent.host import Folders
from kernelswap.protocol import (
    AGENT_PATH,
    DRIFT_UNITS,
    KEY_PATH,
    METRICS_LINK,
    Gpu,
    HostState,
    InstanceState,
    Plan,
    Server,
    keyed_digest,
    unit_name,
)

RECOVER_UNIT = Path("/etc/systemd/system/kernelswap-recover@.service")
MEMBER_UNIT = Path("/etc/systemd/system/kernelswap-member@.service")
GPU_LIMIT = 45.0  # seconds; with a server's health it stays below what the controller waits
HISTORY_SHOWN = 50  # the newest reports; older ones stay in the host's file


def inspect(
    instances: Sequence[str], users: Sequence[str], health: bool, with_gpus: bool, router: str = ""
) -> HostState:
    """router: the URL at which this host itself reaches the router that it has; "": it has none."""
    found, error = read_gpus() if with_gpus else ((), "")
    key = (files.read(Path(KEY_PATH)) or "").strip()
    wanted = Path("/etc/systemd/system/multi-user.target.wants")
    return HostState(
        agent=host.digest(Path(AGENT_PATH)),
        key=key,
        users=tuple(user for user in users if _exists(user)),
        recover_unit=host.digest(RECOVER_UNIT),
        recover_enabled=tuple(i for i in instances if (wanted / f"kernelswap-recover@{i}.service").exists()),
        instances=tuple(_instance(Folders(instance), health, key) for instance in instances),
        servers=_servers(instances),
        gpus=found,
        gpu_error=error,
        metrics=_metrics(),
        drift_units=_drift_units(),
        member_unit=host.digest(MEMBER_UNIT),
        router=router_host.look(router, key) if router else None,
    )


def _metrics() -> str:
    """Where metrics go; one `readlink`, as every deploy asks it."""
    try:
        return str(Path(METRICS_LINK).readlink())
    except OSError:
        return ""


def _drift_units() -> str:
    if not Path(f"/etc/systemd/system/timers.target.wants/{DRIFT_UNITS[1]}").exists():
        return ""
    texts = [_read(Path("/etc/systemd/system") / name) for name in DRIFT_UNITS]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _read(path: Path) -> str:
    try:
        return files.read(path) or ""
    except OSError:
        return ""


def _instance(folders: Folders, health: bool, key: str) -> InstanceState:
    known_good = host.known_good(folders)
    keeper = member.unit_name(folders.instance)
    states = units.statuses([folders.unit, keeper])
    status = states[folders.unit]
    traffic = files.read(folders.traffic)
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
        running=service.running(folders),
        history=tuple(history[-HISTORY_SHOWN:]),
        barred=tuple(sorted(ledger.barred(history))),
        rollback_target=ledger.rollback_target(history, set(staged)),
        traffic=keyed_digest(key, traffic) if traffic else "",
        member=states[keeper].active if states[keeper].enabled else "disabled",
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
    key = host.secrets(folders, plan.release).get("api-key", "")
    status = Client(client.base_url(plan), plan.served_name, key).status("/health", timeout=30)
    return "ok" if status == 200 else f"unhealthy: /health answers {status}" if status else "unhealthy: nobody listens"


def _servers(instances: Sequence[str]) -> Tuple[Server, ...]:
    ours = {unit_name(instance) for instance in instances}
    table = processes.table()
    mains = occupants.main_pids(table)
    heads = [head for head in processes.servers(table) if head.unit not in ours]
    return tuple(processes.as_server(head, occupants.owning_unit(table, head, mains)) for head in heads)


def read_gpus() -> Tuple[Tuple[Gpu, ...], str]:
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
