"""What the host says of a server that answers: its processes, its log, and the kernel's log of its GPUs."""

from __future__ import annotations

from typing import Callable, List, Sequence

from kernelswap.agent import causes, gpus, kernel_log, processes, signatures, units
from kernelswap.agent.kernel_log import Xid
from kernelswap.protocol import Plan


def faults(plan: Plan, since: float) -> List[str]:
    """Signs of a server that is broken inside. since: its start, epoch seconds."""
    status = units.status(plan.unit)
    if status.active != "active":
        return [f"the server ended ({status.active}, {status.result})"]
    found = processes.schedulers(processes.table(), plan.unit)
    missing = [] if found >= plan.schedulers else [f"{found} of {plan.schedulers} scheduler(s) live"]
    return missing + log_faults(units.log(status.invocation)) + gpu_errors(plan, since, kernel_log.fails)


def log_faults(lines: Sequence[str]) -> List[str]:
    """What a server logged since it was ready that is known to break one; it may go on answering."""
    table = signatures.load()
    begin = max((index for index, line in enumerate(lines) if table.ready.search(line)), default=len(lines))
    cause = causes.find(lines[begin:], table, "")
    return [f"its log says: {cause.what[:200]}"] if cause and cause.signature != "unknown" else []


def gpu_errors(plan: Plan, since: float, counts: Callable[[Xid], bool] = lambda _xid: True) -> List[str]:
    """What the kernel's log says of the plan's GPUs, a line each. since: epoch seconds; counts: which of them."""
    errors = [xid for xid in kernel_log.xids(since=since) if counts(xid)]
    return [f"{gpus.label(gpu)}: {kernel_log.describe(xid)}" for gpu, xid in gpus.xids_of(plan, errors)]
