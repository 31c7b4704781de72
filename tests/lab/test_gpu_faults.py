"""Swaps on a host whose GPUs hang, are lost, are divided or keep their memory, and what the agent sees of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from labhost import Host, Lab
from project import MODEL, Project, unused

from kernelswap import bundle

pytestmark = pytest.mark.xdist_group("gpus")

SIM = "/run/nvml-sim"
HOLDS = MODEL.replace("{device: cpu}", "{}").replace("/opt/standin}", "/opt/standin, NVML_SIM_HOLD_MIB: 20000}")


@pytest.fixture(scope="module")
def untouched(lab: Lab) -> Host:
    return unused(lab)


@pytest.fixture
def host(untouched: Host) -> Iterator[Host]:
    untouched.write("/etc/nvml-sim.conf", "gpus=3\n")
    untouched.write("/root/agent.pyz", bundle.build().content)
    yield untouched
    untouched.run(f"systemctl stop sglang-main; rm -rf {SIM} /var/log/kern.log /etc/kernelswap /var/lib/kernelswap")


@pytest.fixture
def project(tmp_path: Path, host: Host) -> Project:
    project = Project(tmp_path, [(host, {})]).write()
    project.model(MODEL.replace("clean: 20", "clean: 4, nvml: 2"))
    return project


def seen(host: Host) -> list[dict[str, Any]]:
    question = json.dumps({"instances": [], "gpus": True})
    state = json.loads(host.output(f"python3 /root/agent.pyz inspect '{question}'", timeout=30))
    assert state["gpu_error"] == ""
    gpus: list[dict[str, Any]] = state["gpus"]
    return gpus


def report(host: Host) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(host.output("tail -n 1 /var/lib/kernelswap/main/history.jsonl"))
    return value


def log_xid(host: Host, gpu: dict[str, Any], code: int) -> None:
    line = f"gpu1 kernel: NVRM: Xid (PCI:{gpu['pci']}): {code}, as the driver says"
    host.run(f"echo $(date --iso-8601=seconds) '{line}' >>/var/log/kern.log")


def log_xid_in_the_swap(host: Host, gpu: dict[str, Any], code: int) -> None:
    """Between the old server's end and the candidate's start."""
    line = f"gpu1 kernel: NVRM: Xid (PCI:{gpu['pci']}): {code}, as the driver says"
    wait = "until [ -e /run/systemd/system.control/sglang-main.service ]; do sleep 0.02; done"
    host.write("/root/xid.sh", f"{wait}; echo $(date +%FT%T.%6N%:z) '{line}' >>/var/log/kern.log\n")
    host.run("systemd-run -q --collect sh /root/xid.sh")


def needing(*gpus: str | int) -> str:
    return f"{HOLDS.replace('clean: 20', 'clean: 4, nvml: 2')}gpus: {json.dumps(gpus)}\n"


def test_a_query_that_hangs_costs_its_limit_and_stops_who_needs_the_figures(project: Project, host: Host) -> None:
    uuid = seen(host)[0]["uuid"]
    host.write(f"{SIM}/hang", "nvmlInit 600")
    done = project.deploy("-y")
    assert done.code == 0, "the instance declares no GPUs"
    seconds = {step["name"]: step["seconds"] for step in report(host)["steps"]}
    assert seconds["preflight"] >= 2
    assert sum(seconds.values()) < 2 + 8
    assert len(json.loads(host.read("/run/kernelswap/nvml-silent.json"))) == 1
    assert "main: unchanged" in project.deploy("-y")

    project.model(needing(uuid))
    start = time.monotonic()
    refused = project.deploy("-y")
    assert refused.code != 0
    assert "NVML gives no answer since 20" in refused, "the first question still waits, so it is not asked again"
    assert "repair the driver, or reboot the host" in refused
    assert time.monotonic() - start < 10
    assert host.output("systemctl is-active sglang-main") == "active"
    assert host.output("systemctl is-active 'kernelswap-nvml-*.scope'") == "active", "no service waits for it"
    host.run("systemctl stop 'kernelswap-nvml-*.scope'")


def test_a_lost_gpu_stops_its_own_instance_only(project: Project, host: Host) -> None:
    first, second, _ = seen(host)
    host.write(f"{SIM}/gpu1/fail", "nvmlDevice 15")
    log_xid(host, second, 79)
    project.model(needing(0))
    assert project.deploy("-y").code == 0
    pid = host.output("systemctl show -P MainPID sglang-main")
    visible = host.output(f"tr '\\0' '\\n' </proc/{pid}/environ | grep CUDA_VISIBLE")
    assert visible == f"CUDA_VISIBLE_DEVICES={first['uuid']}", "CUDA does not count the lost one"

    project.model(needing(second["uuid"]))
    refused = project.deploy("-y")
    assert refused.code != 0
    assert f"no GPU {second['uuid']} on this host: it has 3; GPU 1 may be it (GPU is lost)" in refused
    assert "Xid 79" in refused
    assert "reboot the host" in refused
    assert "REFUSED" in refused
    project.model(needing(1))
    assert "GPU 1: GPU is lost" in project.deploy("-y")
    assert host.output("systemctl show -P MainPID sglang-main") == pid


def test_a_release_is_pinned_by_uuid_and_its_server_told_the_index(project: Project, host: Host) -> None:
    gpus = seen(host)
    project.model(needing(2))
    assert project.deploy("-y").code == 0
    plan = json.loads(host.read("/etc/kernelswap/main/known-good/plan.json"))
    assert plan["gpus"] == [gpus[2]["uuid"]]
    pid = host.output("systemctl show -P MainPID sglang-main")
    assert host.output(f"tr '\\0' '\\n' </proc/{pid}/environ | grep CUDA_VISIBLE") == "CUDA_VISIBLE_DEVICES=2"
    host.write(f"{SIM}/gpu0/gone", "1")
    host.run("systemctl restart sglang-main", timeout=60)
    pid = host.output("systemctl show -P MainPID sglang-main")
    assert host.output(f"tr '\\0' '\\n' </proc/{pid}/environ | grep CUDA_VISIBLE") == "CUDA_VISIBLE_DEVICES=1"


def test_what_a_gpu_does_during_a_swap_is_told_and_its_failure_bars_no_release(project: Project, host: Host) -> None:
    gpu = seen(host)[0]
    project.model(needing(0))
    log_xid_in_the_swap(host, gpu, 31)
    committed = project.deploy("-y")
    assert committed.code == 0
    assert f"GPU 0 {gpu['uuid']}: Xid 31 at " in committed

    log_xid_in_the_swap(host, gpu, 95)
    assert "ROLLED BACK" in project.deploy("--profile", "crash", "-y")
    cause = report(host)["cause"]
    assert (cause["blame"], cause["signature"]) == ("host", "gpu")
    assert cause["what"].startswith(f"GPU 0 {gpu['uuid']} failed; ")
    assert "Xid 95" in cause["todo"]


def test_a_swap_on_a_mig_device_leaves_the_next_one_alone(project: Project, host: Host) -> None:
    host.write(f"{SIM}/gpu1/mig", "2")
    _, parent, left, right, _ = seen(host)
    assert (parent["mig"], left["parent"], right["parent"]) == (True, parent["uuid"], parent["uuid"])
    host.run("cp /bin/sleep /run/gpuholder")
    hold = f"--setenv=NVML_SIM_HOLD_MIB=5000 --setenv=CUDA_VISIBLE_DEVICES={right['uuid']}"
    host.run(f"systemd-run -q --collect --unit=neighbour {hold} /run/gpuholder 1000")
    try:
        project.model(needing(1))
        assert f"choose among {left['uuid']}, {right['uuid']}" in project.deploy("-y")
        project.model(needing(left["uuid"]))
        assert project.deploy("-y").code == 0
        assert project.deploy("--profile", "triton", "-y").code == 0
        now = {gpu["uuid"]: gpu for gpu in seen(host)}
        assert (now[left["uuid"]]["memory_used"], len(now[left["uuid"]]["pids"])) == (20004, 1)
        assert now[right["uuid"]]["memory_used"] == 5004
        project.model(needing(right["uuid"]))
        assert "MIG device of GPU 1 is held by pid" in project.deploy("-y")
    finally:
        host.run("systemctl stop neighbour")


def test_memory_that_no_process_holds_is_a_wedged_gpu_and_the_kernel_log_says_what_helps(
    project: Project, host: Host
) -> None:
    project.model(needing(0))
    assert project.deploy("-y").code == 0
    host.write(f"{SIM}/gpu0/linger_s", "-1")
    log_xid(host, seen(host)[0], 62)  # the first look, too, at what will linger
    down = project.deploy("--profile", "triton", "-y")
    assert "DOWN after" in down
    assert "20004 MiB used, idle is at most 1028 MiB, by no process that NVML shows, since " in down
    assert "GPU 0: the kernel log has Xid 62 at " in down
    assert "nvidia-smi --gpu-reset -i 0" in down
    host.run(f"rm -r {SIM}")
    assert "committed triton-" in project.deploy("--profile", "triton", "-y"), "no release was to blame"
