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
from kernelswap.protocol import Plan

MIB = 1024 * 1024
SHM = Path("/dev/shm")  # noqa: S108 - the very place
# SGLang's ranks talk through a ring of 6 MiB and more each, NCCL through segments of 9 MiB for each pair without peer
# access; Docker's 64 MiB are known to be too little for both.
SHM_MIN, SHM_GOOD = 32, 1024  # MiB
RANK_MEMORY = 2048  # MiB of a rank's own on the host, measured for 0.5.23: 570 on CPU; CUDA's libraries come on top
CLOCK_ERROR_MAX = 16_000_000  # microseconds; from this error on systemd says that a clock is not synchronised
ALTERNATIVES = {"c++": ("c++", "g++", "clang++"), "cc": ("cc", "gcc", "clang")}


def faults(plan: Plan) -> List[str]:
    return [*_shared_memory(plan)[0], *_pinned_memory(plan)[0]]


def notes(plan: Plan, model: ModelFiles) -> List[str]:
    loading = _loading_memory(plan, model)
    return [*_shared_memory(plan)[1], *_pinned_memory(plan)[1], *loading, *_compilers(plan, model), *_clock()]


def _shared_memory(plan: Plan) -> Tuple[List[str], List[str]]:
    if plan.schedulers < 2:
        return [], []
    try:
        free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize // MIB
    except OSError as error:
        return [f"{SHM}: {error.strerror}, and ranks talk through it: mount a tmpfs there"], []
    line = f"{SHM} has {free} MiB free for {plan.schedulers} ranks to talk through"
    if free < SHM_MIN:
        return [f"{line}, {SHM_MIN} MiB are needed: remove old files there, or mount -o remount,size=8g {SHM}"], []
    return [], [f"{line}: NCCL may want more, see mount -o remount,size=8g {SHM}"] if free < SHM_GOOD else []


def _pinned_memory(plan: Plan) -> Tuple[List[str], List[str]]:
    """What flags set aside of the host's memory, on each rank. The old server gives its own back before the start, so
    only what the host does not have at all is a fault."""
    asked = {name: _number(plan.flags.get(name, "")) for name in ("cpu-offload-gb", "hicache-size")}
    need = int(sum(asked.values()) * plan.schedulers * 1000**3 / MIB)
    names = " and ".join(f"--{name}" for name, value in asked.items() if value)
    total, available = memory()
    line = f"{names} of {plan.schedulers} rank(s) take {need} MiB of the host's memory"
    if need > total > 0:
        return [f"{line}, it has {total} MiB: lower it"], []
    return [], [f"{line}, {available} MiB are available now"] if need > available > 0 else []


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


def _number(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0
