"""How much memory a GPU uses with nothing on it: learned where nothing holds it, and kept on the host."""

from __future__ import annotations

import contextlib
import json
from typing import Dict, Mapping, Sequence

from kernelswap.agent import files
from kernelswap.agent.host import Folders
from kernelswap.protocol import Gpu, Plan

FIRST_SIGHT = 0.02  # of its memory; what a GPU of which nothing is known uses beyond may be a rest of a dead process


def levels(folders: Folders) -> Dict[str, int]:
    """The lowest memory that was seen on each GPU with nothing on it, by UUID, in MiB; none where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        values = json.loads(files.read(folders.idle_memory) or "{}")
        return {uuid: int(value) for uuid, value in values.items()}
    return {}


def is_held(gpu: Gpu, plan: Plan, levels: Mapping[str, int]) -> bool:
    """Whether more of its memory is used than when it is idle. How busy it says it is decides nothing."""
    return gpu.memory_used is not None and gpu.memory_used > limit(gpu, plan, levels)


def limit(gpu: Gpu, plan: Plan, levels: Mapping[str, int]) -> int:
    """The memory in MiB up to which a GPU counts as idle."""
    return levels.get(gpu.uuid, 0) + plan.memory_margin


def learned(known: Mapping[str, int], held: Sequence[Gpu]) -> Dict[str, int]:
    """The idle levels, with those of GPUs that nothing holds: they only fall, so that no rest becomes a level."""
    levels = dict(known)
    for gpu in held:
        if gpu.pids or gpu.error or gpu.memory_used is None or gpu.memory_total is None:
            continue
        if gpu.memory_used < levels.get(gpu.uuid, gpu.memory_total * FIRST_SIGHT):
            levels[gpu.uuid] = gpu.memory_used
    return levels


def learn(folders: Folders, held: Sequence[Gpu]) -> None:
    """Keep what a clean host showed."""
    known = levels(folders)
    now = learned(known, held)
    if now != known:
        files.keep(folders.idle_memory, json.dumps(now))
