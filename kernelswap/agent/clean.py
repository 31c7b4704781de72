"""The proof of a clean host: nothing of a server of the instance is left, and nothing else is in its place."""

from __future__ import annotations

import os
import time
from typing import Dict, List, Mapping, Optional, Sequence

from kernelswap.agent import gpus, idle, kernel_log, occupants, processes
from kernelswap.agent.host import Folders
from kernelswap.agent.kernel_log import Xid
from kernelswap.agent.processes import Process
from kernelswap.protocol import Gpu, Plan

SHOWN = 4  # findings in one line; all of them are in the evidence


class Dirty(Exception):
    """The host is not clean; the text lists what is left, `todo` says what helps."""

    def __init__(self, left: Sequence[str], todo: str = "end what is left") -> None:
        self.left = tuple(left)
        self.todo = todo
        more = f"; and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        super().__init__("; ".join(left[:SHOWN]) + more)


def prove(folders: Folders, plan: Plan, deadline: float, stopped: Optional[float] = None) -> List[str]:
    """Wait until nothing is left of any server of the instance; returns what was seen, one fact a line.

    deadline: seconds; drivers need up to a minute or two to give memory back. stopped: when all had been stopped
    (seconds of the boot); what starts after that will not stop starting. Raises Dirty.
    """
    until = time.monotonic() + deadline
    held_since: Dict[str, float] = {}
    while True:
        again: List[str] = []
        try:
            present = gpus.of_host(plan)
            left = remains(folders, plan, present, held_since)
            again = came_back(folders, plan, present, stopped) if left and stopped else []
        except gpus.GpuError as error:
            present, left = (), [str(error)]
        if not left:
            break
        if again or time.monotonic() >= until:
            raise Dirty([*again, *left], what_helps(present, plan, idle.levels(folders), kernel_log.xids()))
        time.sleep(0.5)
    held = gpus.assigned(present, plan.gpus)
    idle.learn(folders, held)
    return [
        "no SGLang process",
        f"no listener on port {plan.port}",
        *map(_seen, held),
        *processes.zombies(processes.table()),
    ]


def _seen(gpu: Gpu) -> str:
    memory = "unknown memory" if gpu.memory_used is None else f"{gpu.memory_used} MiB"
    busy = f", {gpu.utilization} % busy" if gpu.utilization else ""
    return f"{gpus.label(gpu)}: {memory} used, no process{busy}"


def remains(folders: Folders, plan: Plan, present: Sequence[Gpu], held_since: Dict[str, float]) -> List[str]:
    """What still stands in the way of a start, one fact a line; empty if the host is clean.

    present: the host's GPUs. held_since: when a GPU's memory was first seen held, by UUID; kept between looks.
    """
    table = processes.table()
    found = occupants.find(folders, plan, present)
    mine_gpus = gpus.assigned(present, plan.gpus)
    # The guard runs inside the unit that is about to start: it and its ancestors are no rest.
    mine = processes.ancestors(table, os.getpid())
    left = [
        f"{processes.describe(process)} (started by {processes.origin(table, process)})"
        for process in found.all
        if process.pid not in mine
    ]
    left += occupants.foreign_holders(table, found, mine_gpus).values()
    left += [_listener(table, plan.port, pid) for pid in processes.listeners(plan.port)]
    left += gpus.faults(present, plan.gpus) if gpus.needs(plan) else []
    levels = idle.levels(folders)
    for gpu in mine_gpus:
        if idle.is_held(gpu, plan, levels):
            first = time.strftime("%H:%M:%S", time.localtime(held_since.setdefault(gpu.uuid, time.time())))
            whose = "" if gpu.pids else ", by no process that NVML shows"
            limit = idle.limit(gpu, plan, levels)
            left.append(
                f"{gpus.label(gpu)}: {gpu.memory_used} MiB used, idle is at most {limit} MiB{whose}, since {first}"
            )
    return left + (processes.zombies(table) if left else [])  # a zombie alone holds nothing


def _listener(table: Dict[int, Process], port: int, pid: Optional[int]) -> str:
    owner = processes.describe(table[pid]) if pid in table else "an unknown process"
    return f"port {port} is listened on by {owner}"


def came_back(folders: Folders, plan: Plan, present: Sequence[Gpu], stopped: float) -> List[str]:
    """Servers of the instance that were started again after they had been stopped, with who did it and what to do."""
    table = processes.table()
    return [
        f"pid {head.pid} was started again after the stop by {processes.origin(table, head)}: end what starts it first "
        f"(cron, a loop, a supervisor), then run the same command again"
        for head in occupants.find(folders, plan, present).all
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
            todo.append(f"GPU {gpu.index}: {kernel_log.advice(gpu, kernel_log.of(gpu, present, errors)) or reset}{new}")
    return "; ".join(todo) or "end what is left"
