"""Who is on an instance's GPUs or port, and whether that is nobody: the proof of a clean host."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from kernelswap.agent import files, gpus, kernel_log, processes, units
from kernelswap.agent.host import Folders
from kernelswap.agent.kernel_log import Xid
from kernelswap.agent.processes import Process
from kernelswap.protocol import CONFIG_ROOT, Gpu, Plan, unit_name


@dataclass(frozen=True)
class Occupants:
    """The SGLang servers of an instance: in its own unit, in hand-written units (by unit), and in none."""

    own: Tuple[Process, ...]
    units: Dict[str, Tuple[Process, ...]]
    strays: Tuple[Process, ...]

    @property
    def all(self) -> List[Process]:
        return [*self.own, *(process for found in self.units.values() for process in found), *self.strays]


def other_units(folders: Folders) -> Set[str]:
    """The units of the host's other instances: never ours to touch."""
    config = folders.root / CONFIG_ROOT.lstrip("/")
    names = [entry.name for entry in config.iterdir() if entry.is_dir()] if config.is_dir() else []
    return {unit_name(name) for name in names if name != folders.instance}


# What people put in front of a server in a unit of its own.
WRAPPERS = {"sh", "bash", "dash", "zsh", "env", "numactl", "taskset", "nice", "ionice", "chrt", "time", "timeout"}


def sort(
    table: Dict[int, Process],
    plan: Plan,
    others: Set[str],
    on_port: Set[int],
    on_gpus: Set[int],
    main_pids: Dict[str, int],
) -> Occupants:
    """Decide whose each SGLang server of the process table is.

    on_port, on_gpus: ids that listen on the instance's port, or hold its GPUs. A server is this instance's if it, or a
    process below it, is one of those, or asks for its port; and, where the instance uses every GPU, in any case.
    main_pids: the main process of each unit.
    """
    own: List[Process] = []
    strays: List[Process] = []
    by_unit: Dict[str, List[Process]] = {}
    for head in processes.servers(table):
        if head.unit in others:
            continue
        if head.unit == plan.unit:
            own.append(head)
            continue
        tree = processes.descendants(table, [head.pid])
        if plan.gpus and not (tree & (on_port | on_gpus)) and head.port != plan.port:
            continue
        unit = owning_unit(table, head, main_pids)
        if unit:
            by_unit.setdefault(unit, []).append(head)
        else:
            strays.append(head)
    return Occupants(tuple(own), {unit: tuple(heads) for unit, heads in by_unit.items()}, tuple(strays))


def owning_unit(table: Dict[int, Process], head: Process, main_pids: Dict[str, int]) -> Optional[str]:
    """The unit that runs a server: the server is its main process, or stands below that through wrappers alone.

    A server left behind by an SSH session belongs to none, though its cgroup may be that of ssh.service.
    """
    if head.unit is None:
        return None
    process = head
    while process.pid != main_pids.get(head.unit):
        above = table.get(process.parent)
        if above is None or not above.argv or Path(above.argv[0]).name not in WRAPPERS:
            return None
        process = above
    return head.unit


def main_pids(table: Dict[int, Process]) -> Dict[str, int]:
    """The main process of every unit that an SGLang server is in.

    Not of transient ones: their files are gone with their end, so what brings such a server back is its command line.
    """
    names = {head.unit for head in processes.servers(table) if head.unit}
    found = {name: units.status(name) for name in names}
    return {name: unit.main_pid for name, unit in found.items() if not unit.fragment.startswith(TRANSIENT)}


def find(folders: Folders, plan: Plan) -> Occupants:
    """The occupants of an instance, now. Raises gpus.GpuError where GPUs are declared and cannot be read."""
    on_port = {pid for pid in processes.listeners(plan.port).values() if pid}
    on_gpus = {pid for gpu in my_gpus(plan) for pid in gpu.pids}
    table = processes.table()
    return sort(table, plan, other_units(folders), on_port, on_gpus, main_pids(table))


def my_gpus(plan: Plan) -> List[Gpu]:
    """The instance's GPUs; where the plan declares none, as many as can be read. Raises gpus.GpuError."""
    return gpus.assigned(host_gpus(plan), plan.gpus)


def host_gpus(plan: Plan) -> Tuple[Gpu, ...]:
    """The host's GPUs; those that cannot be read are left out where the plan declares none. Raises gpus.GpuError."""
    try:
        found = gpus.read(plan.timeouts.nvml)
    except gpus.GpuError:
        if gpus.needs(plan):
            raise
        return ()
    return found if gpus.needs(plan) else tuple(gpu for gpu in found if not gpu.error)


def foreign_holders(table: Dict[int, Process], found: Occupants, held: Sequence[Gpu]) -> List[str]:
    """Processes on the instance's GPUs that are no SGLang server of it."""
    known = processes.descendants(table, [process.pid for process in found.all])
    lines = []
    for gpu in held:
        for pid in gpu.pids:
            if pid not in known:
                what = processes.describe(table[pid]) if pid in table else f"pid {pid}, not visible here"
                lines.append(f"{'MIG device of ' if gpu.parent else ''}GPU {gpu.index} is held by {what}")
    return lines


TRANSIENT = "/run/systemd/transient/"
SHOWN = 4  # findings in one line; all of them are in the evidence


class Dirty(Exception):
    """The host is not clean; the text lists what is left, `todo` says what helps."""

    def __init__(self, left: Sequence[str], todo: str = "end what is left") -> None:
        self.left = tuple(left)
        self.todo = todo
        more = f"; and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        super().__init__("; ".join(left[:SHOWN]) + more)


def prove_clean(folders: Folders, plan: Plan, deadline: float) -> List[str]:
    """Wait until nothing is left of any server of the instance; returns what was seen, one fact a line.

    deadline: seconds; drivers need up to a minute or two to give memory back. Raises Dirty.
    """
    until = time.monotonic() + deadline
    since: Dict[str, float] = {}
    while True:
        try:
            present = host_gpus(plan)
            left = remains(folders, plan, present, since)
        except gpus.GpuError as error:
            present, left = (), [str(error)]
        if not left:
            break
        if time.monotonic() >= until:
            raise Dirty(left, what_helps(present, plan, idle_memory(folders), kernel_log.xids()))
        time.sleep(0.5)
    held = gpus.assigned(present, plan.gpus)
    _learn_idle_memory(folders, held)
    return ["no SGLang process", f"no listener on port {plan.port}", *map(_seen, held)]


def _seen(gpu: Gpu) -> str:
    memory = "unknown memory" if gpu.memory_used is None else f"{gpu.memory_used} MiB"
    busy = f", {gpu.utilization} % busy" if gpu.utilization else ""
    return f"{gpus.label(gpu)}: {memory} used, no process{busy}"


def remains(folders: Folders, plan: Plan, present: Sequence[Gpu], since: Dict[str, float]) -> List[str]:
    """What still stands in the way of a start, one fact a line; empty if the host is clean.

    present: the host's GPUs. since: when a GPU's memory was first seen held, by UUID; kept from one look to the next.
    """
    table = processes.table()
    found = find(folders, plan)
    # The guard runs inside the unit that is about to start: it and its ancestors are no rest.
    mine = processes.ancestors(table, os.getpid())
    left = [processes.describe(process) for process in found.all if process.pid not in mine]
    left += foreign_holders(table, found, gpus.assigned(present, plan.gpus))
    left += [_listener(table, plan.port, pid) for pid in processes.listeners(plan.port).values()]
    left += gpus.faults(present, plan.gpus) if gpus.needs(plan) else []
    idle = idle_memory(folders)
    for gpu in gpus.assigned(present, plan.gpus):
        if is_held(gpu, plan, idle):
            first = time.strftime("%H:%M:%S", time.localtime(since.setdefault(gpu.uuid, time.time())))
            whose = "" if gpu.pids else ", by no process that NVML shows"
            limit = _idle_limit(gpu, plan, idle)
            left.append(
                f"{gpus.label(gpu)}: {gpu.memory_used} MiB used, idle is at most {limit} MiB{whose}, since {first}"
            )
    return left


def is_held(gpu: Gpu, plan: Plan, idle: Mapping[str, int]) -> bool:
    """Whether more of its memory is used than when it is idle. How busy it says it is decides nothing."""
    return gpu.memory_used is not None and gpu.memory_used > _idle_limit(gpu, plan, idle)


def _idle_limit(gpu: Gpu, plan: Plan, idle: Mapping[str, int]) -> int:
    return idle.get(gpu.uuid, 0) + plan.memory_margin


def what_helps(present: Sequence[Gpu], plan: Plan, idle: Mapping[str, int], errors: Sequence[Xid]) -> str:
    """What to do about a host that does not get clean. errors: of its GPUs, from the kernel log."""
    if not present and gpus.needs(plan):
        return "repair the driver, or reboot the host"
    todo = []
    for gpu in gpus.assigned(present, plan.gpus):
        if gpu.error or (is_held(gpu, plan, idle) and not gpu.pids):
            reset = f"the kernel log has nothing of it: {kernel_log.action('reset', gpu)}"
            new = "" if gpu.error or gpu.uuid in idle else "; if that is its idle level, raise `memory-margin`"
            todo.append(f"GPU {gpu.index}: {kernel_log.advice(gpu, kernel_log.of(gpu, present, errors)) or reset}{new}")
    return "; ".join(todo) or "end what is left"


def _listener(table: Dict[int, Process], port: int, pid: Optional[int]) -> str:
    owner = processes.describe(table[pid]) if pid in table else "an unknown process"
    return f"port {port} is listened on by {owner}"


def idle_memory(folders: Folders) -> Dict[str, int]:
    """The lowest memory that was seen on each GPU with nothing on it, by UUID, in MiB."""
    try:
        values = json.loads(files.read(folders.idle_memory) or "{}")
    except ValueError:
        return {}
    return {str(uuid): int(value) for uuid, value in values.items()}


def gpu_failure(present: Sequence[Gpu], plan: Plan, errors: Sequence[Xid]) -> Optional[Tuple[str, str]]:
    """What failed of the instance's GPUs while it was swapped, and what helps; None if nothing did."""
    faults = gpus.faults(present, plan.gpus, errors) if gpus.needs(plan) else []
    if faults:
        what, _, todo = faults[0].rpartition(": ")
        return what, todo
    for gpu in gpus.assigned(present, plan.gpus):
        grave = [xid for xid in kernel_log.of(gpu, present, errors) if kernel_log.blames_host(xid)]
        if grave:
            return f"{gpus.label(gpu)} failed", kernel_log.advice(gpu, grave)
    return None


def my_xids(plan: Plan, errors: Sequence[Xid]) -> List[Tuple[Gpu, Xid]]:
    """The errors of the instance's GPUs, each with its GPU; NVML is not asked if there are none."""
    if not errors:
        return []
    present = host_gpus(plan)
    return [(gpu, xid) for gpu in gpus.assigned(present, plan.gpus) for xid in kernel_log.of(gpu, present, errors)]


FIRST_SIGHT = 0.02  # of its memory; what a GPU of which nothing is known uses beyond may be a rest of a dead process


def learned(known: Mapping[str, int], held: Sequence[Gpu]) -> Dict[str, int]:
    """The idle levels, with those of GPUs that nothing holds: they only fall, so that no rest becomes a level."""
    levels = dict(known)
    for gpu in held:
        if gpu.pids or gpu.error or gpu.memory_used is None or gpu.memory_total is None:
            continue
        if gpu.memory_used < levels.get(gpu.uuid, gpu.memory_total * FIRST_SIGHT):
            levels[gpu.uuid] = gpu.memory_used
    return levels


def _learn_idle_memory(folders: Folders, held: Sequence[Gpu]) -> None:
    known = idle_memory(folders)
    levels = learned(known, held)
    if levels != known:
        with contextlib.suppress(OSError):  # a full disk must not keep a server from starting
            files.write(folders.idle_memory, json.dumps(levels))
