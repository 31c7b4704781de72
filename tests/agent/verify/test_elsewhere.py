from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_recorded import lay_out

from kernelswap.agent.verify.elsewhere import Meter

UNIT = "sglang-main.service"
ME, BENCHMARK, SERVER, WORKER, OTHER = os.getpid(), 70, 800, 801, 900


def tick(proc: Path, busy: int, idle: int, **used: int) -> None:
    """All cores, and our processes, go on by so many ticks."""
    cells = [int(cell) for cell in (proc / "stat").read_text().split()[1:9]]
    cells = [cells[0] + busy // 2, 0, cells[2] + busy - busy // 2, cells[3] + idle // 2, cells[4] + idle - idle // 2]
    (proc / "stat").write_text(f"cpu {' '.join(map(str, cells))} 0 0 0\ncpu0 1 2 3\n")
    for pid, ticks in used.items():
        path = proc / pid.lstrip("p") / "stat"
        head, _, tail = path.read_text().rpartition(")")
        words = tail.split()
        words[11] = str(int(words[11]) + ticks - 1)
        words[12] = str(int(words[12]) + 1)
        path.write_text(f"{head}) {' '.join(words)}")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    def row(pid: int, parent: int, cgroup: str) -> dict[str, Any]:
        return {"pid": pid, "parent": parent, "argv": ["python3"], "cgroup": f"/system.slice/{cgroup}"}

    rows = [row(ME, 1, "kernelswap-swap-main.service"), row(BENCHMARK, ME, "kernelswap-swap-main.service")]
    rows += [row(SERVER, 1, UNIT), row(WORKER, SERVER, UNIT), row(OTHER, 1, "cron.service")]
    lay_out({"processes": rows}, tmp_path)
    (tmp_path / "stat").write_text("cpu 100 0 100 1000 0 0 0 0\n")
    return tmp_path


def test_what_others_had_of_all_cores(proc: Path) -> None:
    meter = Meter(UNIT, proc)
    tick(proc, 60, 40, **{f"p{ME}": 5, f"p{BENCHMARK}": 10, f"p{SERVER}": 10, f"p{WORKER}": 15, f"p{OTHER}": 20})
    assert meter.share() == pytest.approx(0.2)


def test_a_worker_that_came_meanwhile_is_the_servers(proc: Path) -> None:
    (proc / str(WORKER) / "stat").rename(proc / "kept")
    meter = Meter(UNIT, proc)
    (proc / "kept").rename(proc / str(WORKER) / "stat")
    tick(proc, 60, 40, **{f"p{WORKER}": 60})
    assert meter.share() == 0


def test_another_process_that_has_a_workers_number_now_takes_nothing_away(proc: Path) -> None:
    tick(proc, 0, 0, **{f"p{WORKER}": 50})
    meter = Meter(UNIT, proc)
    tick(proc, 60, 40, **{f"p{WORKER}": -40, f"p{SERVER}": 60})
    assert meter.share() == 0


def test_what_cannot_be_read_is_unknown(proc: Path) -> None:
    meter = Meter(UNIT, proc)
    assert meter.share() is None  # no time has passed
    (proc / "stat").unlink()
    assert meter.share() is None
    assert Meter(UNIT, proc).share() is None


def test_this_very_host() -> None:
    meter = Meter(UNIT)
    sum(range(10**7))
    share = meter.share()
    assert share is not None
    assert 0 <= share <= 1
