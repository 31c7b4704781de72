from __future__ import annotations

import time

import pytest

from kernelswap.agent import gpus
from kernelswap.protocol import Gpu

GPUS = (Gpu(0, "GPU-a", "RTX", "12.0", 97887, 4), Gpu(1, "GPU-b", "RTX", "12.0", 97887, 90000, pids=(7, 8)))


def test_the_child_tells_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_query", lambda: GPUS * 2000)  # more than a pipe holds at once
    assert gpus.read() == GPUS * 2000


def test_a_query_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_query", lambda: time.sleep(60))
    start = time.monotonic()
    with pytest.raises(gpus.GpuError, match=r"no answer within 0\.3 s"):
        gpus.read(deadline=0.3)
    assert time.monotonic() - start < 5


def test_a_child_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Driver/library version mismatch")

    monkeypatch.setattr(gpus, "_query", fail)
    with pytest.raises(gpus.GpuError, match="version mismatch"):
        gpus.read()


def test_assigned_by_index_or_uuid() -> None:
    assert gpus.assigned(GPUS, ()) == list(GPUS)
    assert gpus.assigned(GPUS, ("1",)) == [GPUS[1]]
    assert gpus.assigned(GPUS, ("GPU-a",)) == [GPUS[0]]
    assert gpus.missing(GPUS, ("GPU-a", "7")) == ["7"]
