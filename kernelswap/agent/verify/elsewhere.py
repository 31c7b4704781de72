"""How much of the host's CPU went elsewhere while a server was measured: to neither the server nor who measures it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, Optional, Tuple

from kernelswap.agent import processes


class Meter:
    """Counts from when it is made. The agent and what it runs measure; unit: of the server."""

    def __init__(self, unit: str, proc: Path = processes.PROC) -> None:
        self._unit, self._proc = unit, proc
        self._begin = self._now()

    def share(self) -> Optional[float]:
        """Of all of the host's CPU time since then, 0 to 1; None if it cannot be told."""
        if self._begin is None or (end := self._now()) is None:
            return None
        (busy, idle, ours), (busy_before, idle_before, ours_before) = end, self._begin
        whole = busy + idle - busy_before - idle_before
        used = sum(max(0, ticks - ours_before.get(pid, 0)) for pid, ticks in ours.items())
        return min(1.0, max(0.0, busy - busy_before - used) / whole) if whole > 0 else None

    def _now(self) -> Optional[Tuple[int, int, Dict[int, int]]]:
        """Busy and idle ticks of all cores, and the ticks of each process of ours."""
        try:
            cells = [int(cell) for cell in (self._proc / "stat").read_text().splitlines()[0].split()[1:9]]
            table = processes.table(self._proc)
            counted = processes.descendants(table, [os.getpid()]) | processes.cgroup_pids(table, self._unit)
            idle = sum(cells[3:5])  # and waiting for a disk
            return (
                sum(cells) - idle,
                idle,
                {pid: processes.cpu_ticks(self._proc / str(pid) / "stat") for pid in counted},
            )
        except (OSError, ValueError, IndexError):
            return None
