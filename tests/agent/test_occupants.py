from __future__ import annotations

from pathlib import Path

import pytest
from samples import plan
from systemd import Systemd

from kernelswap.agent import occupants, units
from kernelswap.agent.processes import Process
from kernelswap.protocol import Gpu

LAUNCH = ("python3", "-m", "sglang.launch_server", "--port")


def table(*rows: Process) -> dict[int, Process]:
    return {row.pid: row for row in rows}


def row(pid: int, *argv: str, parent: int = 1, unit: str = "") -> Process:
    cgroup = f"/system.slice/{unit}" if unit else "/user.slice/user-1000.slice/session-1.scope"
    return Process(pid, parent, 0, "S", 1000, argv, cgroup)


def sort(rows: dict[int, Process], *gpus: str, **more: object) -> tuple[list[int], dict[str, list[int]], list[int]]:
    settings = {"others": set(), "on_port": set(), "on_gpus": set(), "main_pids": {}, **more}
    found = occupants.sort(rows, plan(*gpus), **settings)  # type: ignore[arg-type]
    by_unit = {unit: [p.pid for p in heads] for unit, heads in found.units.items()}
    return [p.pid for p in found.own], by_unit, [p.pid for p in found.strays]


def test_own_unit_hand_written_unit_and_stray() -> None:
    rows = table(
        row(10, *LAUNCH, "30000", unit="sglang-main.service"),
        row(20, *LAUNCH, "30000", unit="my-glm.service"),
        row(30, *LAUNCH, "30000"),
    )
    assert sort(rows, main_pids={"my-glm.service": 20}) == ([10], {"my-glm.service": [20]}, [30])


def test_a_wrapper_in_front_of_the_server_is_the_units_own() -> None:
    rows = table(
        row(20, "/bin/bash", "/opt/start-glm.sh", unit="my-glm.service"),
        row(21, *LAUNCH, "30000", parent=20, unit="my-glm.service"),
    )
    assert sort(rows, main_pids={"my-glm.service": 20}) == ([], {"my-glm.service": [21]}, [])


def test_a_server_left_behind_by_ssh_does_not_make_sshd_its_unit() -> None:
    rows = table(
        row(5, "sshd: ops@pts/0", unit="ssh.service"),
        row(30, *LAUNCH, "30000", unit="ssh.service"),
        row(31, *LAUNCH, "30000", parent=5, unit="ssh.service"),
    )
    assert sort(rows, main_pids={"ssh.service": 5}) == ([], {}, [30, 31])


def test_other_instances_are_never_touched() -> None:
    rows = table(row(10, *LAUNCH, "30000", unit="sglang-b.service"))
    assert sort(rows, others={"sglang-b.service"}, on_port={10}, on_gpus={10}) == ([], {}, [])


def test_with_named_gpus_only_servers_on_them_or_on_the_port_count() -> None:
    rows = table(
        row(10, *LAUNCH, "30001"),
        row(11, "sglang::scheduler_TP0", parent=10),
        row(20, *LAUNCH, "30002"),
        row(21, "sglang::scheduler_TP0", parent=20),
        row(30, *LAUNCH, "30000"),
    )
    assert sort(rows, "0", "1", on_gpus={11}) == ([], {}, [10, 30])


def test_foreign_holders_are_named() -> None:
    rows = table(row(10, *LAUNCH, "30000"), row(11, "sglang::scheduler", parent=10), row(40, "python3", "train.py"))
    found = occupants.sort(rows, plan(), set(), set(), {11, 40}, {})
    held = [Gpu(0, "GPU-0", "RTX", "12.0", 97887, 5000, pids=(11, 40, 99))]
    lines = occupants.foreign_holders(rows, found, held)
    assert len(lines) == 2
    assert "pid 40" in lines[40]
    assert lines[99] == "GPU 0 is held by pid 99, not visible here"


def test_a_transient_unit_owns_no_server() -> None:
    """Its file is gone with its end, so it could not be started again; main_pids leaves it out."""
    rows = table(row(40, *LAUNCH, "30000", unit="run-u12.service"))
    assert sort(rows, main_pids={}) == ([], {}, [40])


def test_all_units_are_asked_about_in_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemd, asked = Systemd(tmp_path), []
    systemd.running = {"glm.service": "", "qwen.service": ""}
    monkeypatch.setattr(units, "_systemctl", lambda *words: asked.append(words) or systemd(*words))
    assert occupants.main_pids(systemd.processes()) == {name: systemd.pid(name) for name in systemd.running}
    assert len(asked) == 1
    assert occupants.main_pids({}) == {}
    assert len(asked) == 1
