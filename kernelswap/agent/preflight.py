"""What can be checked before anything is touched. Every check returns its faults; all are reported at once."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import List

from kernelswap.agent import engine, gpus, host, kernel_log, network, occupants, processes, units
from kernelswap.agent.host import Folders
from kernelswap.agent.occupants import Occupants
from kernelswap.protocol import CONFIG_ROOT, STATE_ROOT, Plan, Request

SYSTEMD_MIN = 247  # the first with reliable --timestamp=unix and credentials


def faults(folders: Folders, request: Request, plan: Plan, found: Occupants) -> List[str]:
    """Everything that stands against this swap, one fault with its way out a line."""
    return [
        *system(),
        *masked(folders),
        *user(plan),
        *disk(plan),
        *port(plan, found),
        *gpu(plan, found),
        *strays(request, found),
        *way_back(folders, request),
    ] or engine_faults(plan)


def system() -> List[str]:
    found = []
    if sys.version_info < (3, 9):
        found.append(f"Python {sys.version.split()[0]} is too old: install Python 3.9 or newer")
    if units.version() < SYSTEMD_MIN:
        found.append(f"systemd {units.version()} is too old: {SYSTEMD_MIN} or newer is needed")
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        found.append("no cgroup v2 on this host: boot with systemd.unified_cgroup_hierarchy=1")
    elif not network.can_quarantine():
        found.append("systemd cannot shut a unit off from the network here (IPAddressDeny=): enable BPF in the kernel")
    return found


def masked(folders: Folders) -> List[str]:
    """Whether somebody has forbidden the unit to start; a commit would silently allow it again."""
    places = [folders.committed_unit, folders.root / "run/systemd/system" / folders.unit]
    return [
        f"{path} is masked: somebody wants {folders.unit} not to start: ask who, then remove that link"
        for path in places
        if path.is_symlink() and str(path.readlink()) == "/dev/null"
    ]


def way_back(folders: Folders, request: Request) -> List[str]:
    """Whether the known-good could be brought back; with --force that is the user's risk."""
    release = host.known_good(folders)
    if release is None or request.force:
        return []
    todo = "deploy it again, or go on without a way back by --force"
    try:
        plan = host.read_plan(folders, release)
    except (OSError, ValueError) as error:
        return [f"the known-good {release} cannot be brought back, its plan cannot be read ({error}): {todo}"]
    names = [plan.unit, *(["secrets.yaml"] if plan.secret_flags else [])]
    missing = [name for name in names if not (folders.release(release) / name).is_file()]
    return [f"the known-good {release} cannot be brought back, its {name} is gone: {todo}" for name in missing]


def user(plan: Plan) -> List[str]:
    try:
        host.user_ids(plan.user)
    except KeyError:
        return [f"no user {plan.user!r} on this host: create it, or set `user:` in model {plan.model}"]
    return []


def disk(plan: Plan) -> List[str]:
    """Room for what we write, and for the caches that the engine fills at its first start."""
    found = []
    for path, need in ((CONFIG_ROOT, 16), (STATE_ROOT, 64), ("/var/cache", plan.disk_free), ("/run", 4)):
        folder = Path(path)
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free // (1024 * 1024)
        if free < need:
            found.append(f"{path} has {free} MiB free, {need} MiB are needed: free disk space")
    return found


def port(plan: Plan, found: Occupants) -> List[str]:
    table = processes.table()
    ours = processes.descendants(table, [process.pid for process in found.all])
    foreign = [pid for pid in processes.listeners(plan.port).values() if pid not in ours]
    return [
        f"port {plan.port} is taken by {processes.describe(table[pid]) if pid in table else 'an unknown process'}: "
        f"stop it, or set another `port:`"
        for pid in foreign
    ]


def gpu(plan: Plan, found: Occupants) -> List[str]:
    try:
        present = occupants.host_gpus(plan)
    except gpus.GpuError as error:
        return [f"{error}: repair the driver, or reboot the host"]
    usable = gpus.assigned(present, plan.gpus)
    errors = kernel_log.xids() if any(gpu.error for gpu in present) else []
    lines = gpus.faults(present, plan.gpus, errors) if gpus.needs(plan) else []
    if not lines and len(usable) < plan.gpu_count:
        lines.append(
            f"{plan.gpu_count} GPUs are needed, {len(usable)} are there: lower the parallelism, or repair the host"
        )
    holders = occupants.foreign_holders(processes.table(), found, usable)
    return lines + [f"{line}: end it, or give the instance other GPUs" for line in holders]


def strays(request: Request, found: Occupants) -> List[str]:
    """Servers that no unit owns: taken over only when asked, and never out of a container."""
    lines = []
    for process in found.strays:
        shown = processes.describe(process)
        if processes.is_contained(process.pid):
            lines.append(f"SGLang runs in a container: {shown}: stop that container")
        elif processes.changed_user(process.pid):
            lines.append(f"SGLang runs with the rights of another user than started it: {shown}: stop it by hand")
        elif not request.adopt:
            lines.append(f"SGLang runs outside any unit: {shown}: stop it, or take it over with --adopt")
    return lines


def engine_faults(plan: Plan) -> List[str]:
    """Asked last and only of a sound host, since it costs seconds: what SGLang itself says of the command line."""
    unreadable = engine.readable_faults(plan)
    if unreadable:
        return [f"{line}: correct the path or its permissions" for line in unreadable]
    refused = engine.parser_says(plan, plan.timeouts.preflight)
    return [f"SGLang refuses the flags of {plan.release}: {refused}: correct the profile"] if refused else []
