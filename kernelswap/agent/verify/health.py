"""What the host says of a server that answers: its processes, its log, and the kernel's log of its GPUs."""

from __future__ import annotations

import re
from typing import List, Sequence

from kernelswap.agent import causes, gpus, kernel_log, processes, signatures, units
from kernelswap.protocol import Plan

# Source: SGLang 0.5.23, srt/utils/async_probe.py: it goes on with other numbers in their place.
NAN = re.compile(r"NaN detected in .*")


def faults(plan: Plan, since: float) -> List[str]:
    """Signs of a server that is broken inside. since: its start, epoch seconds."""
    status = units.status(plan.unit)
    if status.active != "active":
        return [f"the server ended ({status.active}, {status.result})"]
    found = schedulers(plan)
    missing = [] if found >= plan.schedulers else [f"{found} of {plan.schedulers} scheduler(s) live"]
    return missing + log_faults(units.log(status.invocation)) + _gpu_faults(plan, since)


def schedulers(plan: Plan) -> int:
    table = processes.table()
    mine = [table[pid].argv for pid in processes.cgroup_pids(table, plan.unit)]
    return sum(bool(argv) and argv[0].startswith("sglang::scheduler") for argv in mine)


def log_faults(lines: Sequence[str]) -> List[str]:
    """What a server logged since it was ready that is known to break one; it may go on answering."""
    table = signatures.load()
    begin = max((index for index, line in enumerate(lines) if table.ready.search(line)), default=len(lines))
    later = lines[begin:]
    found = next((match[0] for match in map(NAN.search, later) if match), "")
    cause = causes.find(later, table, "")
    known = cause.what if cause and cause.signature != "unknown" else ""
    return [f"its log says: {what[:200]}" for what in (found, known) if what]


def _gpu_faults(plan: Plan, since: float) -> List[str]:
    errors = kernel_log.xids(since=since)
    return [f"{gpus.label(gpu)}: {kernel_log.describe(xid)}" for gpu, xid in gpus.xids_of(plan, errors)]
