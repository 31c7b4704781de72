"""The proof of a clean host: nothing of a server of the instance is left, and nothing else is in its place."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from kernelswap.agent import clock, gpus, idle, kernel_log, occupants, processes
from kernelswap.agent.host import Folders
from kernelswap.agent.kernel_log import Xid
from kernelswap.agent.occupants import Occupants
from kernelswap.agent.processes import Process
from kernelswap.protocol import Gpu, Plan

SHOWN = 4  # findings in one line; all of them are in the evidence


class Dirty(Exception):
    """The host is not clean; the text lists what is left, `todo` says what helps.

    blind: nothing was seen to be left, only that the GPUs cannot be asked.
    """

    def __init__(self, left: Sequence[str], todo: str, blind: bool = False) -> None:
        self.left = tuple(left)
        self.todo = todo
        self.blind = blind
        more = f"; and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        super().__init__("; ".join(left[:SHOWN]) + more)


@dataclass(frozen=True)
class Proof:
    """What a clean host showed. gpus: all of the host's; held: those of the instance; seen: one fact a line."""

    gpus: Tuple[Gpu, ...]
    held: Tuple[Gpu, ...]
    seen: Tuple[str, ...]


def prove(folders: Folders, plan: Plan, deadline: float, stopped: Optional[float] = None) -> Proof:
    """Wait until nothing is left of any server of the instance.

    deadline: seconds; drivers need up to a minute or two to give memory back. stopped: when all had been stopped
    (seconds of the boot); what starts after that will not stop starting. Raises Dirty.
    """
    until = time.monotonic() + deadline
    pause = 0.05
    held_since: Dict[str, float] = {}
    while True:
        try:
            present, unread = gpus.of_host(plan), ""
        except gpus.GpuError as error:
            present, unread = (), str(error)
        table, levels = processes.table(), idle.levels(folders)
        found = occupants.find(folders, plan, present)
        left = remains(table, plan, found)
        left += [unread] if unread else held_gpus(table, plan, found, present, levels, held_since)
        if not left:
            break
        again = came_back(table, plan, found, stopped) if stopped else []
        if again or time.monotonic() >= until:
            todo = what_helps(present, plan, levels, kernel_log.xids())
            raise Dirty([*again, *left, *processes.zombies(table)], todo, blind=left == [unread])
        time.sleep(pause)
        pause = min(0.5, 2 * pause)
    held = tuple(gpus.assigned(present, plan.gpus))
    idle.learn(folders, held)
    seen = ("no SGLang process", f"no listener on port {plan.port}", *map(_seen, held), *processes.zombies(table))
    return Proof(present, held, seen)


def _seen(gpu: Gpu) -> str:
    memory = "unknown memory" if gpu.memory_used is None else f"{gpu.memory_used} MiB"
    busy = f", {gpu.utilization} % busy" if gpu.utilization else ""
    return f"{gpus.label(gpu)}: {memory} used, no process{busy}"


def remains(table: Dict[int, Process], plan: Plan, found: Occupants) -> List[str]:
    """The processes that stand in the way of a start, one a line."""
    # The guard runs inside the unit that is about to start: it and its ancestors are no rest.
    mine = processes.ancestors(table, os.getpid())
    left = [
        f"{processes.describe(process)} (started by {processes.origin(table, process)})"
        for process in found.all
        if process.pid not in mine
    ]
    return left + [_listener(table, plan.port, pid) for pid in processes.listeners(plan.port)]


def held_gpus(
    table: Dict[int, Process],
    plan: Plan,
    found: Occupants,
    present: Sequence[Gpu],
    levels: Mapping[str, int],
    held_since: Dict[str, float],
) -> List[str]:
    """Why the instance's GPUs are not free, one reason a line; empty if they are. A zombie alone holds nothing.

    present: the host's GPUs. levels: see idle.levels. held_since: when a GPU's memory was first seen held, by UUID;
    kept between looks.
    """
    mine = gpus.assigned(present, plan.gpus)
    left = list(occupants.foreign_holders(table, found, mine).values())
    left += map(str, gpus.faults(present, plan.gpus) if gpus.needs(plan) else ())
    for gpu in mine:
        if idle.is_held(gpu, plan, levels):
            first = clock.shown(held_since.setdefault(gpu.uuid, time.time()))
            whose = "" if gpu.pids else ", by no process that NVML shows"
            limit = idle.limit(gpu, plan, levels)
            left.append(
                f"{gpus.label(gpu)}: {gpu.memory_used} MiB used, idle is at most {limit} MiB{whose}, since {first}"
            )
    return left


def _listener(table: Dict[int, Process], port: int, pid: Optional[int]) -> str:
    owner = processes.describe(table[pid]) if pid in table else "an unknown process"
    return f"port {port} is listened on by {owner}"


def came_back(table: Dict[int, Process], plan: Plan, found: Occupants, stopped: float) -> List[str]:
    """Servers of the instance that were started again after they had been stopped, with who did it and what to do."""
    return [
        f"pid {head.pid} was started again after the stop by {processes.origin(table, head)}: end what starts it first "
        f"(cron, a loop, a supervisor), then run the same command again"
        for head in found.all
        if head.unit != plan.unit and head.started > stopped * os.sysconf("SC_CLK_TCK")
    ]


def what_helps(present: Sequence[Gpu], plan: Plan, levels: Mapping[str, int], errors: Sequence[Xid]) -> str:
    """What to do about a host that does not get clean. errors: of its GPUs, from the kernel log."""
    if not present and gpus.needs(plan):
        return "repair the driver, or reboot the host"
    todo = []
    for gpu in gpus.assigned(present, plan.gpus):
        if gpu.error or (idle.is_held(gpu, plan, levels) and not gpu.pids):
            reset = f"the kernel log has nothing of it: {kernel_log.action('reset', gpu)}"
            new = "" if gpu.error or gpu.uuid in levels else "; if that is its idle level, raise `memory-margin`"
            said = kernel_log.gravest(gpu, kernel_log.of(gpu, present, errors))
            todo.append(f"GPU {gpu.index}: {said or reset}{new}")
    return "; ".join(todo) or "end what is left"
