from __future__ import annotations

import time
from pathlib import Path

import pytest

from kernelswap.agent import gpus, kernel_log, processes, units
from kernelswap.agent.verify import health
from kernelswap.protocol import Gpu, Plan

READY = "[2026-11-30 10:00:00] The server is fired up and ready to roll!"
ALIVE = '[2026-11-30 10:00:01] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK'
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.34 GiB."
TRACEBACK = ["[2026-11-30 10:00:02 TP0] Traceback (most recent call last):", '  File "a.py", line 1, in f']


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([READY, ALIVE], ""),
        ([*TRACEBACK, OOM, READY, ALIVE], ""),  # before it was ready: it came up all the same
        ([READY, ALIVE, *TRACEBACK, OOM], "CUDA out of memory"),
        (
            [READY, "[2026-11-30 10:00:03 TP1] NaN detected in sampler: next_token_logits; values were sanitized"],
            "NaN detected in sampler",
        ),
        ([READY, *TRACEBACK, "RuntimeError: NCCL error: unhandled cuda error"], "NCCL error"),
        ([READY, "[2026-11-30 10:00:03] Exception in ASGI application", ALIVE], ""),
        ([READY, "[2026-11-30 10:00:03] ERROR: a client sent nonsense", ALIVE], ""),
        ([], ""),
    ],
)
def test_the_log_since_the_server_was_ready(lines: list[str], words: str) -> None:
    found = health.log_faults(lines)
    assert len(found) == bool(words)
    assert words in "".join(found)


PLAN = Plan("main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "m", "127.0.0.1", 1, gpus=("GPU-a",))
RUNS = units.UnitStatus("active", "running", 7, "/x", True, "", "success", None)


@pytest.mark.parametrize(
    ("seconds", "code", "pci", "text", "faults"),
    [
        (5, 31, "0000:01:00", "", 1),
        (5, 45, "0000:01:00", "", 1),
        (-5, 45, "0000:01:00", "", 0),  # of the old server's stop
        (5, 999, "0000:01:00", "", 1),  # nobody knows what it is
        (5, 79, "0000:02:00", "", 0),  # another instance's
        *((5, code, "0000:01:00", "", 0) for code in (63, 92, 93, 106, 121)),
        (5, 94, "0000:01:00", "", 1),
        (5, 154, "0000:01:00", "recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", 0),
        (5, 154, "0000:01:00", "recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", 1),
    ],
)
def test_xids_since_the_start(
    seconds: int, code: int, pci: str, text: str, faults: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.time() - 60
    line = f"{start + seconds:.3f} gpu1 kernel: NVRM: Xid (PCI:{pci}): {code}, {text}"
    monkeypatch.setattr(kernel_log, "_journal", lambda: [line])
    monkeypatch.setattr(kernel_log, "FILE", Path("/no/kern.log"))
    monkeypatch.setattr(gpus, "read", lambda _seconds: (Gpu(0, "GPU-a", pci="0000:01:00"),))
    monkeypatch.setattr(units, "status", lambda _unit: RUNS)
    monkeypatch.setattr(units, "log", lambda _invocation: [])
    monkeypatch.setattr(processes, "schedulers", lambda *_others: 1)
    found = health.faults(PLAN, start)
    assert len(found) == faults
    assert all(f"Xid {code} at" in line for line in found)
    here = seconds > 0 and pci == "0000:01:00"
    assert len(health.gpu_errors(PLAN, start)) == here, "all are told"
