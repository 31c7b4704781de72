from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import samples

from kernelswap.agent import environment
from kernelswap.agent.model_files import ModelFiles
from kernelswap.protocol import Plan

GIB = 1024**3
MODEL = ModelFiles(weights=400 * GIB, largest=5 * GIB)


@pytest.fixture(autouse=True)
def ordinary_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "memory", lambda: (512_000, 400_000))
    monkeypatch.setattr(environment, "_clock", list)


def plan(flags: dict[str, str] | None = None, ranks: int = 1, **env: str) -> Plan:
    base = dataclasses.replace(samples.plan(), schedulers=ranks, gpu_count=ranks, flags=flags or {})
    return dataclasses.replace(base, environment={"PATH": "/usr/bin:/bin", **env})


def sized(monkeypatch: pytest.MonkeyPatch, size: int, free: int) -> None:
    """Of /dev/shm, in MiB."""
    figures = (4096, 4096, size * 256, free * 256, free * 256, 0, 0, 0, 0, 255)
    monkeypatch.setattr(environment.os, "statvfs", lambda _path: os.statvfs_result(figures))


@pytest.mark.parametrize(
    ("ranks", "size", "free", "faults", "notes"),
    [
        (1, 8, 8, 0, 0),
        (2, 8, 8, 1, 0),
        (2, 64, 64, 0, 1),  # Docker's
        (2, 64_000, 100, 0, 1),  # the old server may hold it
        (2, 64_000, 60_000, 0, 0),
    ],
)
def test_ranks_need_shared_memory(
    monkeypatch: pytest.MonkeyPatch, ranks: int, size: int, free: int, faults: int, notes: int
) -> None:
    sized(monkeypatch, size, free)
    found = environment.faults(plan(ranks=ranks))
    assert [fault.what.startswith("/dev/shm has") for fault in found] == [True] * faults
    assert [line.startswith("/dev/shm has") for line in environment.notes(plan(ranks=ranks), MODEL)] == [True] * notes


def test_without_shared_memory_ranks_cannot_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SHM", Path("/nowhere/shm"))
    (fault,) = environment.faults(plan(ranks=2))
    assert str(fault) == "/nowhere/shm: No such file or directory, and ranks talk through it: mount a tmpfs there"


@pytest.mark.parametrize(
    ("gigabytes", "on", "faults", "notes"),
    [("100", True, 0, 0), ("220", True, 0, 1), ("300", True, 1, 0), ("300", False, 0, 0), ("inf", True, 0, 0)],
)
def test_the_host_cache_must_fit(
    monkeypatch: pytest.MonkeyPatch, gigabytes: str, on: bool, faults: int, notes: int
) -> None:
    sized(monkeypatch, 64_000, 64_000)
    flags = {"hicache-size": gigabytes, **({"enable-hierarchical-cache": "true"} if on else {})}
    asked = plan(flags, ranks=2)
    assert [fault.what.startswith("--hicache-size takes") for fault in environment.faults(asked)] == [True] * faults
    assert [line.startswith("--hicache-size takes") for line in environment.notes(asked, MODEL)] == [True] * notes


@pytest.mark.parametrize(
    ("device", "available", "says"),
    [
        ("cuda", 400_000, ""),  # weights pass through the page cache
        ("cuda", 7_000, "loading takes about 7168 MiB"),
        ("cpu", 400_000, "the weights have 409600 MiB"),
        ("cpu", 0, ""),  # not known
    ],
)
def test_memory_for_loading(monkeypatch: pytest.MonkeyPatch, device: str, available: int, says: str) -> None:
    monkeypatch.setattr(environment, "memory", lambda: (512_000, available))
    lines = environment.notes(plan({"device": device}), MODEL)
    assert len(lines) == bool(says)
    assert says in "".join(lines)


def toolkit(folder: Path, *tools: str) -> Path:
    (folder / "bin").mkdir(exist_ok=True)
    for tool in tools:
        (folder / "bin" / tool).write_text("#!/bin/sh\n")
        (folder / "bin" / tool).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("flags", "tools", "headers", "says"),
    [
        ({"attention-backend": "flashinfer"}, ["ninja", "nvcc", "g++"], True, ""),
        ({"attention-backend": "flashinfer"}, ["nvcc", "c++"], True, "FlashInfer (--attention-backend flashinfer)"),
        ({"attention-backend": "trtllm_mla"}, [], True, "the unit finds no nvcc, ninja, c++: install it"),
        ({"moe-runner-backend": "flashinfer_trtllm"}, ["nvcc", "ninja"], True, "finds no c++:"),
        ({"moe-runner-backend": "deep_gemm"}, [], True, "DeepGEMM (--moe-runner-backend deep_gemm)"),
        ({"moe-runner-backend": "triton"}, ["gcc"], True, ""),
        ({"moe-runner-backend": "triton"}, ["gcc"], False, "finds no Python.h"),
        ({"attention-backend": "torch_native", "sampling-backend": "pytorch"}, [], False, ""),
        ({"attention-backend": "flashinfer", "device": "cpu"}, [], True, ""),
    ],
)
def test_compilers_are_looked_for_on_the_units_own_path(
    tmp_path: Path, flags: dict[str, str], tools: list[str], headers: bool, says: str
) -> None:
    path = str(toolkit(tmp_path, *tools) / "bin")
    lines = environment.notes(plan(flags, PATH=path), ModelFiles(headers=headers))
    assert len(lines) == bool(says), lines
    assert says in "".join(lines)


def test_cuda_home_must_hold_a_compiler(tmp_path: Path) -> None:
    (line,) = environment.notes(plan(CUDA_HOME=str(tmp_path)), ModelFiles())
    assert line.startswith(f"CUDA_HOME is {tmp_path}, which has no bin/nvcc")
    home = str(toolkit(tmp_path, "nvcc"))
    assert environment.notes(plan({"moe-runner-backend": "deep_gemm"}, CUDA_HOME=home, PATH="/"), ModelFiles()) == []


def test_the_host_is_really_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    total, available = environment.memory()
    assert total >= available > 0
    assert all(line.startswith("the host's clock is not synchronised") for line in environment._clock())
