from __future__ import annotations

from dataclasses import replace

import pytest

from kernelswap.agent import occupants
from kernelswap.agent.kernel_log import Xid
from kernelswap.agent.processes import Process
from kernelswap.protocol import Gpu, Plan

LAUNCH = ("python3", "-m", "sglang.launch_server", "--port")


def plan(*gpus: str) -> Plan:
    return Plan(
        instance="main", release="r", profile="p", model="m", python="/p", argv=(), environment={}, user="u",
        model_path="/m", served_name="m", address="0.0.0.0", port=30000, gpus=gpus,
    )  # fmt: skip


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


WEDGED = Gpu(3, "GPU-w", "RTX", "12.0", 97887, 20004, utilization=100, pci="0000:04:00")
LOST = Gpu(1, error="GPU is lost")
SOUND = Gpu(0, "GPU-s", "RTX", "12.0", 97887, 4, pci="0000:01:00")


def test_memory_is_held_above_the_idle_level_and_the_margin() -> None:
    assert occupants.is_held(WEDGED, plan(), {})
    assert not occupants.is_held(WEDGED, plan(), {"GPU-w": 20000})
    assert not occupants.is_held(replace(WEDGED, memory_used=1024), plan(), {})
    assert not occupants.is_held(replace(WEDGED, memory_used=None), plan(), {}), "NVML does not know it"
    assert not occupants.is_held(replace(SOUND, utilization=100), plan(), {}), "how busy it is decides nothing"


@pytest.mark.parametrize(
    ("gpu", "known", "level"),
    [
        (SOUND, {}, 4),
        (SOUND, {"GPU-s": 500}, 4),
        (replace(SOUND, memory_used=900), {"GPU-s": 500}, 500),  # within the margin, and yet it may be a rest
        (replace(SOUND, memory_used=2500), {}, None),  # nothing is known of it, so it may be a rest
        (replace(SOUND, pids=(7,)), {}, None),
        (replace(SOUND, memory_used=None), {}, None),
        (replace(SOUND, error="no answer"), {}, None),
    ],
)
def test_an_idle_level_is_learned_from_a_gpu_that_nothing_holds(
    gpu: Gpu, known: dict[str, int], level: int | None
) -> None:
    assert occupants.learned(known, [gpu]).get("GPU-s") == level


def test_what_helps_against_a_wedged_gpu_is_in_the_kernel_log() -> None:
    firmware = Xid(1000.0, "0000:04:00", 119, "Timeout after 45s of waiting for RPC response from GPU0 GSP!")
    other = Xid(1000.0, "0000:09:00", 48, "")
    todo = occupants.what_helps([SOUND, WEDGED], plan("GPU-w"), {"GPU-w": 4}, [firmware, other])
    assert todo.startswith("GPU 3: the kernel log has Xid 119 at ")
    assert "reboot the host" in todo
    silent = occupants.what_helps([SOUND, WEDGED], plan("GPU-w"), {}, [other])
    assert "nvidia-smi --gpu-reset -i 3" in silent
    assert silent.endswith("if that is its idle level, raise `memory-margin`")
    held = replace(WEDGED, pids=(7,))
    assert occupants.what_helps([held], plan("GPU-w"), {}, [firmware]) == "end what is left"
    assert "repair the driver" in occupants.what_helps([], plan("GPU-w"), {}, [])


def test_a_gpu_that_failed_during_the_swap_is_named_with_what_helps() -> None:
    off_the_bus = Xid(1000.0, "0000:02:00", 79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    found = occupants.gpu_failure([SOUND, LOST], plan("GPU-s", "GPU-gone"), [off_the_bus])
    assert found is not None
    assert found[0].startswith(
        "no GPU GPU-gone on this host: it has 2; GPU 1 may be it (GPU is lost): the kernel log has"
    )
    found = occupants.gpu_failure([SOUND, LOST], plan("1"), [off_the_bus])
    assert found is not None
    assert "Xid 79" in found[0]
    assert found[1].startswith("reboot the host")
    here = [Xid(1000.0, "0000:01:00", 94, "Contained: FBHUB"), Xid(1001.0, "0000:01:00", 43, "")]
    found = occupants.gpu_failure([SOUND], plan("GPU-s"), here)
    assert found is not None
    assert (found[0], "Xid 94" in found[1]) == ("GPU 0 GPU-s failed", True)


def test_an_error_of_the_servers_own_kernels_or_of_another_gpu_is_no_failure_of_the_gpu() -> None:
    own = Xid(1000.0, "0000:01:00", 31, "MMU Fault: ENGINE GRAPHICS")
    other = Xid(1000.0, "0000:04:00", 79, "")
    assert occupants.gpu_failure([SOUND, WEDGED], plan("GPU-s"), [own, other]) is None
    assert occupants.gpu_failure([SOUND, LOST], plan("GPU-s"), []) is None
