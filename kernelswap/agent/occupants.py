"""Who is on an instance's GPUs or port, and whose that is."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from kernelswap.agent import gpus, identity, idle, processes, units
from kernelswap.agent.host import Folders
from kernelswap.agent.processes import Process
from kernelswap.protocol import CONFIG_ROOT, Gpu, Plan, unit_name

TRANSIENT = "/run/systemd/transient/"
UVM = "/dev/nvidia-uvm"  # whoever computes has it open; monitors have not


@dataclass(frozen=True)
class Occupants:
    """Who is on an instance's GPUs or port, each server by its head.

    own: SGLang in the instance's own unit; units: in hand-written ones, by unit; strays: in none.
    foreign: what is no SGLang, in no unit; foreign_units: the same by unit; ended only where `end-foreign` says so.
    bystanders: SGLang that is on neither, or another instance's: never touched.
    watchers: monitors and display servers on the GPUs: not in the way.
    suspects: ids that NVML does not show on a GPU and that may be on it.
    """

    own: Tuple[Process, ...] = ()
    units: Dict[str, Tuple[Process, ...]] = field(default_factory=dict)
    strays: Tuple[Process, ...] = ()
    foreign: Tuple[Process, ...] = ()
    foreign_units: Dict[str, Tuple[Process, ...]] = field(default_factory=dict)
    bystanders: Tuple[Process, ...] = ()
    watchers: Tuple[Process, ...] = ()
    suspects: FrozenSet[int] = frozenset()

    @property
    def all(self) -> List[Process]:
        """The SGLang servers of the instance."""
        return [*self.own, *(process for found in self.units.values() for process in found), *self.strays]

    @property
    def all_foreign(self) -> List[Process]:
        return [*self.foreign, *(process for found in self.foreign_units.values() for process in found)]


def other_units(folders: Folders) -> Set[str]:
    """The units of the host's other instances: never ours to touch."""
    config = folders.root / CONFIG_ROOT.lstrip("/")
    names = [entry.name for entry in config.iterdir() if entry.is_dir()] if config.is_dir() else []
    return {unit_name(name) for name in names if name != folders.instance}


def sort(
    table: Dict[int, Process],
    plan: Plan,
    others: Set[str],
    on_port: Set[int],
    on_gpus: Set[int],
    main_pids: Dict[str, int],
    present: Sequence[Gpu] = (),
) -> Occupants:
    """Decide whose each SGLang server of the process table is, and what else is in the way.

    others: the units of other instances. on_port, on_gpus: ids that listen on the instance's port, or hold its GPUs.
    main_pids: the main process of each unit. present: the host's GPUs.
    """
    own: List[Process] = []
    strays: List[Process] = []
    bystanders: List[Process] = []
    by_unit: Dict[str, List[Process]] = {}
    mine = {gpu.uuid for gpu in gpus.assigned(tuple(present), plan.gpus)}
    elsewhere = {pid for gpu in present if gpu.uuid not in mine for pid in gpu.pids}
    proxied = {port for pid in on_port if pid in table for port in _proxied_port(table[pid])}
    for head in processes.servers(table):
        tree = processes.descendants(table, [head.pid])
        if head.unit == plan.unit:
            own.append(head)
        elif head.unit in others:
            bystanders.append(head)
        elif (
            tree & (on_port | on_gpus)
            or head.port == plan.port
            or (head.container and head.port in proxied)
            or (not tree & elsewhere and _may_use(table, head, tree, plan, present, mine))
        ):
            unit = owning_unit(table, head, main_pids)
            if unit:
                by_unit.setdefault(unit, []).append(head)
            else:
                strays.append(head)
        else:
            bystanders.append(head)
    left_behind = [head for head in bystanders if _was_beside(head, strays) and head.pid not in elsewhere]
    strays += left_behind
    bystanders = [head for head in bystanders if head not in left_behind]
    known = processes.descendants(table, [p.pid for p in [*own, *strays, *(p for ps in by_unit.values() for p in ps)]])
    foreign = _foreign(table, on_port, on_gpus, known, bool(proxied & {p.port for p in strays}), others | {plan.unit})
    owners = {pid: owning_unit(table, table[pid], main_pids) for pid in foreign}
    foreign_units: Dict[str, List[Process]] = {}
    for pid, unit in owners.items():
        if unit:
            foreign_units.setdefault(unit, []).append(table[pid])
    return Occupants(
        tuple(own),
        {unit: tuple(heads) for unit, heads in by_unit.items()},
        tuple(strays),
        tuple(table[pid] for pid, unit in owners.items() if not unit and _may_be_ended(table[pid])),
        {unit: tuple(heads) for unit, heads in foreign_units.items()},
        tuple(bystanders),
        tuple(table[pid] for pid in sorted(on_gpus & table.keys()) if _is_harmless(table[pid])),
    )


def _was_beside(head: Process, strays: Sequence[Process]) -> bool:
    """Whether a worker without its launcher comes of the same start as one that is in the way."""
    return head.is_worker and any(
        p.is_worker and ((p.run and p.run == head.run) or (p.group and p.group == head.group)) for p in strays
    )


def _proxied_port(process: Process) -> List[int]:
    """The port inside a container that Docker's own listener on this host stands for."""
    return [port] if (port := process.number("-container-port")) else []


def _may_use(
    table: Dict[int, Process], head: Process, tree: Set[int], plan: Plan, present: Sequence[Gpu], mine: Set[str]
) -> bool:
    """Whether a server that holds nothing yet may be about to take the instance's GPUs.

    A title is easily given: of another user's process, it alone says nothing.
    """
    visible = visible_gpus([head, *(table[pid] for pid in sorted(tree))], present)
    if visible is not None:
        return bool(visible & mine)
    if plan.gpus:
        return False
    return head.is_launcher or head.uid == 0 or processes.user_name(head.uid) == plan.user


def visible_gpus(tree: Sequence[Process], present: Sequence[Gpu]) -> Optional[Set[str]]:
    """The UUIDs that a server's environment and flags leave it; None where they do not tell.

    An index counts CUDA's way: fastest first, which is NVML's order only if the GPUs are alike or CUDA is told so.
    """
    if any(process.flag("--device") == "cpu" for process in tree):
        return set()
    variables = next((dict(p.variables) for p in tree if "CUDA_VISIBLE_DEVICES" in dict(p.variables)), None)
    if variables is None:
        return None
    same_order = variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in present}) <= 1
    visible: Set[str] = set()
    for name in variables["CUDA_VISIBLE_DEVICES"].split(","):
        name = name.strip()
        if name.isdigit() and not same_order:
            return None
        found = {gpu.uuid for gpu in present if name == str(gpu.index) or (len(name) > 4 and gpu.uuid.startswith(name))}
        if not found:
            break  # as CUDA does: what follows a name that it does not know is not visible either
        visible |= found
    return visible


def _foreign(
    table: Dict[int, Process], on_port: Set[int], on_gpus: Set[int], known: Set[int], proxy_known: bool, ours: Set[str]
) -> List[int]:
    """The heads of what holds the GPUs or the port and is neither SGLang of this instance nor harmless."""
    heads = set()
    never = processes.ancestors(table, os.getpid())
    for pid in (on_port | on_gpus) - known - never:
        process = table.get(pid)
        if process is None or process.ended or process.unit in ours:
            continue
        if pid not in on_port and _is_harmless(process):
            continue
        if proxy_known and _proxied_port(process):
            continue
        heads.add(_head(table, process).pid)
    return sorted(pid for pid in heads if not (processes.ancestors(table, table[pid].parent) & heads) and pid > 1)


def _is_harmless(process: Process) -> bool:
    return identity.is_harmless(process.argv, process.comm)


def _may_be_ended(process: Process) -> bool:
    """Not what runs others' programs (sshd, dockerd), nor Docker's proxy: its container would lose its port."""
    return not identity.is_spawner(process.argv, process.comm) and not _proxied_port(process)


def _head(table: Dict[int, Process], process: Process) -> Process:
    """An engine's first process: above one that holds a GPU stands what takes its requests."""
    while process.engine and (above := table.get(process.parent)) and above.engine == process.engine:
        process = above
    return process


def owning_unit(table: Dict[int, Process], head: Process, main_pids: Dict[str, int]) -> Optional[str]:
    """The unit that runs a server: the server is its main process, or stands below that through wrappers alone.

    A script as the main process counts too, where the unit runs nothing but it and the server. A server left behind by
    an SSH session belongs to no unit, though its cgroup may be that of ssh.service.
    """
    main = table.get(main_pids.get(head.unit or "", 0))
    if main is None:
        return None
    process = head
    while process.pid != main.pid:
        above = table.get(process.parent)
        if above is None or not above.argv:
            return None
        if not identity.is_wrapper(above.argv) and not (
            above.pid == main.pid and _runs_nothing_else(table, head, main)
        ):
            return None
        process = above
    return head.unit


def _runs_nothing_else(table: Dict[int, Process], head: Process, main: Process) -> bool:
    """Whether a unit's main process is a script that starts the server, and the unit holds nothing but these two."""
    below = processes.descendants(table, [head.pid])
    others = {p.pid for p in table.values() if p.unit == head.unit and not p.ended} - below - {main.pid}
    return not others and identity.is_script(main.argv, main.exe) and not identity.is_spawner(main.argv, main.comm)


def first_pids(table: Dict[int, Process]) -> Dict[str, int]:
    """The first process of every service's cgroup: its main process, as far as the table alone can tell."""
    oldest_last = sorted(table.values(), key=lambda p: (p.started, p.pid), reverse=True)
    return {p.unit: p.pid for p in oldest_last if p.unit}


def main_pids(table: Dict[int, Process], pids: Iterable[int] = ()) -> Dict[str, int]:
    """The main process of every unit that an SGLang server, or one of these processes, is in.

    Not of transient ones: their files are gone with their end, so what brings such a server back is its command line.
    """
    heads = [*processes.servers(table), *(table[pid] for pid in pids if pid in table)]
    found = units.statuses(head.unit for head in heads if head.unit)
    first = first_pids(table)
    # What forked away from a unit that is content with that (oneshot, forking) has no main process by systemd's word.
    return {
        name: unit.main_pid or first[name] for name, unit in found.items() if not unit.fragment.startswith(TRANSIENT)
    }


def transient_units(heads: Iterable[Process]) -> Set[str]:
    """The transient units that these servers are all of: they would go on starting them (`systemd-run -p Restart=`)."""
    heads = list(heads)
    if not heads:
        return set()
    found = units.statuses(head.unit for head in heads if head.unit)
    mains = {unit: seen.main_pid for unit, seen in found.items() if seen.fragment.startswith(TRANSIENT)}
    table = processes.table()
    return {unit for head in heads if (unit := owning_unit(table, head, mains))}


def find(folders: Folders, plan: Plan, present: Optional[Sequence[Gpu]] = None) -> Occupants:
    """The occupants of an instance, now. present: the host's GPUs if they were read already.

    Raises gpus.GpuError where GPUs are declared and cannot be read.
    """
    present = gpus.of_host(plan) if present is None else present
    return judge(processes.PROC, plan, other_units(folders), present, idle.levels(folders), main_pids)


MainPids = Callable[[Dict[int, Process], Iterable[int]], Dict[str, int]]


def judge(
    proc: Path,
    plan: Plan,
    others: Set[str],
    present: Sequence[Gpu],
    levels: Mapping[str, int],
    main: MainPids = lambda table, _: first_pids(table),
) -> Occupants:
    """The occupants of an instance by a folder that stands for /proc, live or recorded; see sort.

    levels: see idle.levels. main: tells the main process of units.
    """
    mine = gpus.assigned(tuple(present), plan.gpus)
    on_port = {pid for pid in processes.listeners(plan.port, proc) if pid}
    table = processes.table(proc)
    doubted = [gpu.uuid for gpu in mine if idle.is_held(gpu, plan, levels) and not table.keys() & set(gpu.pids)]
    suspects = _computing(proc, table, doubted) if doubted else set()
    on_gpus = {pid for gpu in mine for pid in gpu.pids} | suspects
    found = sort(table, plan, others, on_port, on_gpus, main(table, on_port | on_gpus), present)
    return dataclasses.replace(found, suspects=frozenset(suspects))


def _computing(proc: Path, table: Dict[int, Process], uuids: Iterable[str]) -> Set[int]:
    """Who has the node of such a GPU open for CUDA: asked where memory is in use by nobody that NVML can show."""
    nodes = processes.gpu_nodes(proc)
    wanted = {nodes[uuid] for uuid in uuids if uuid in nodes}
    held = processes.open_files({*wanted, UVM}, proc)
    computing = {pid for pid, opened in held.items() if UVM in opened and opened & wanted}
    return {pid for pid in computing if pid in table and not _is_harmless(table[pid])}


def foreign_holders(table: Dict[int, Process], found: Occupants, held: Sequence[Gpu]) -> Dict[int, str]:
    """Processes on the instance's GPUs that are no SGLang server of it: process id -> what, whose, since when."""
    known = processes.descendants(table, [process.pid for process in found.all])
    lines = {pid: f"a GPU's memory is in use and may be held by {processes.describe(table[pid])}"
             for pid in sorted(found.suspects - known) if pid in table}  # fmt: skip
    for gpu in held:
        for pid in gpu.pids:
            process = table.get(pid)
            if pid in known or (process and _is_harmless(process)):
                continue
            what = processes.describe(process) if process else f"pid {pid}, not visible here"
            lines[pid] = f"{'MIG device of ' if gpu.parent else ''}GPU {gpu.index} is held by {what}"
    return lines


def may_end(table: Dict[int, Process], plan: Plan, found: Occupants, pid: Optional[int]) -> bool:
    """Whether the instance's owner has said that such a process is to be ended."""
    return plan.end_foreign and pid in processes.descendants(table, [process.pid for process in found.all_foreign])
