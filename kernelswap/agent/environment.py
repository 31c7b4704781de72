"""What the host and the unit's environment must offer besides GPUs and files."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any, List, Tuple

from kernelswap.agent import gpus, knowledge
from kernelswap.agent.model_files import ModelFiles
from kernelswap.protocol import HostFault, Plan

MIB = 1024 * 1024
SHM = Path("/dev/shm")  # noqa: S108 - the very place
# SGLang's ranks talk through a ring of 24 MiB (srt/distributed/parallel_state.py: 6 pieces of 4 MiB), NCCL through
# segments of 9 MiB for each pair that has no peer access.
SHM_MIN, SHM_GOOD = 32, 1024  # MiB
RANK_MEMORY = 2048  # MiB of a rank's own on the host, measured for 0.5.23: 570 on CPU; CUDA's libraries come on top
CLOCK_ERROR_MAX = 16_000_000  # microseconds; from this error on systemd says that a clock is not synchronised
ALTERNATIVES = {"c++": ("c++", "g++", "clang++"), "cc": ("cc", "gcc", "clang")}


def faults(plan: Plan) -> List[HostFault]:
    return [*_shared_memory(plan)[0], *_host_cache(plan)[0]]


def notes(plan: Plan, model: ModelFiles) -> List[str]:
    loading = _loading_memory(plan, model)
    return [*_shared_memory(plan)[1], *_host_cache(plan)[1], *loading, *_compilers(plan, model), *_clock()]


def _shared_memory(plan: Plan) -> Tuple[List[HostFault], List[str]]:
    """Faults and notes. What the old server holds is free again before the start, so only the size is certain."""
    if plan.schedulers < 2:
        return [], []
    try:
        found = os.statvfs(SHM)
    except OSError as error:
        return [HostFault(f"{SHM}: {error.strerror}, and ranks talk through it", "mount a tmpfs there")], []
    size, free = (blocks * found.f_frsize // MIB for blocks in (found.f_blocks, found.f_bavail))
    todo = f"mount -o remount,size=8g {SHM}"
    if size < SHM_MIN:
        return [HostFault(f"{SHM} has {size} MiB, {SHM_MIN} MiB are needed for ranks to talk through", todo)], []
    return [], [f"{SHM} has {free} of {size} MiB free, NCCL may need more: {todo}"] if free < SHM_GOOD else []


def _host_cache(plan: Plan) -> Tuple[List[HostFault], List[str]]:
    """Faults and notes of the cache that each rank keeps in the host's memory (GB, memory_pool_host.py)."""
    given = plan.flags.get("hicache-size", "") if "enable-hierarchical-cache" in plan.flags else ""
    need = int(given) * plan.schedulers * 10**9 // MIB if given.isdecimal() else 0
    total, available = memory()
    line = f"--hicache-size takes {need} MiB of the host's memory for {plan.schedulers} ranks"
    if need > total > 0:
        return [HostFault(f"{line}, it has {total} MiB", "lower it")], []
    return [], [
        f"{line}, {available} MiB are available now: lower it if they stay so few"
    ] if need > available > 0 else []


def _loading_memory(plan: Plan, model: ModelFiles) -> List[str]:
    """A GPU's weights pass through the page cache, a CPU's stay."""
    total, available = memory()
    if plan.flags.get("device") == "cpu":
        need, what = model.weights // MIB, "the weights have"
    else:
        need, what = model.largest // MIB + RANK_MEMORY * plan.schedulers, "loading takes about"
    if not 0 < available < need:
        return []
    return [f"{what} {need} MiB, and the host has {available} of {total} MiB of memory available: free some"]


def memory() -> Tuple[int, int]:
    """The host's memory and what of it is available, in MiB; zeros where the kernel does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if line.endswith(" kB")}
    except (OSError, ValueError, IndexError):
        return 0, 0
    return found.get("MemTotal", 0), found.get("MemAvailable", 0)


def _compilers(plan: Plan, model: ModelFiles) -> List[str]:
    """Kernels that are compiled at the start need tools that a unit, unlike a shell, may not see."""
    if not gpus.needs(plan) or plan.flags.get("device") == "cpu":
        return []
    lines = []
    home = plan.environment.get("CUDA_HOME") or plan.environment.get("CUDA_PATH") or ""
    if home and not (Path(home) / "bin/nvcc").is_file():
        lines.append(f"CUDA_HOME is {home}, which has no bin/nvcc: name the toolkit's folder, e.g. /usr/local/cuda")
    for compiler in _table():
        by = [flag for flag in sorted(plan.flags) if flag.endswith("-backend") and _means(plan.flags[flag], compiler)]
        missing = [tool for tool in compiler["tools"] if not _found(plan, tool, home)] if by else []
        missing += ["Python.h"] if by and compiler.get("headers") and not model.headers else []
        if missing:
            why = f"{compiler['name']} (--{by[0]} {plan.flags[by[0]]}) compiles kernels at the start"
            lines.append(
                f"{why}, and the unit finds no {', '.join(missing)}: install it, or a build with the kernels inside"
            )
    return lines


def _means(value: str, compiler: Any) -> bool:
    return any(value.startswith(start) for start in compiler["values"])


def _found(plan: Plan, tool: str, home: str) -> bool:
    path = plan.environment.get("PATH", os.defpath) + (f":{home}/bin" if home else "")
    variable = {"c++": "CXX", "cc": "CC"}.get(tool, "")
    names = (plan.environment.get(variable) or tool, *ALTERNATIVES.get(tool, ()))
    return any(shutil.which(name, path=path) for name in names)


@cache
def _table() -> List[Any]:
    return list(json.loads(knowledge.read("jit.json"))["compilers"])


def _clock() -> List[str]:
    """Two hosts' logs and a fleet's history are told by their clocks."""
    timex = (ctypes.c_long * 64)()  # struct timex: all zero only asks; its fourth word is the error that may be
    try:
        asked = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (OSError, AttributeError):
        return []
    unsure = asked >= 0 and timex[3] >= CLOCK_ERROR_MAX
    return ["the host's clock is not synchronised: start chrony or systemd-timesyncd"] if unsure else []
