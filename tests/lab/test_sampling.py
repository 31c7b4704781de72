"""The sampler on a host: pynvml as NVIDIA ships it, the simulated NVML, which follows a script."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from labhost import Host, Lab
from project import unused

from kernelswap import bundle, traces
from kernelswap.diagnosis import diagnose

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripted import SCRIPTS, nvml

SAMPLE = """
import json, resource, sys, time
sys.path.insert(0, "/root/telemetry.pyz")
from pathlib import Path
from kernelswap.agent import gpus
from kernelswap.agent.verify import telemetry
from kernelswap.protocol import Plan
seconds, names = float(sys.argv[1]), tuple(sys.argv[2:])
plan = Plan(instance="main", release="r", profile="p", model="m", python="/p", argv=(), environment={}, user="u",
            model_path="/m", served_name="m", address="127.0.0.1", port=1, gpus=names, gpu_count=1)
begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
with telemetry.sampling(plan, Path("/root")) as sampled:
    sampled.phase("warm-up")
    time.sleep(1)
    sampled.phase("run c=64 1/1")
    time.sleep(seconds)
    ending = time.monotonic()
after = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({
    "notes": sampled.notes, "ended_in": time.monotonic() - ending,
    "cpu": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / (time.monotonic() - begin),
}))
"""


@pytest.fixture(scope="module")
def own(lab: Lab) -> Host:
    """On which no server of another test holds a GPU."""
    return unused(lab)


@pytest.fixture
def gpus(own: Host) -> Iterator[Host]:
    own.run("rm -rf /run/nvml-sim /etc/nvml-sim.conf /root/gpu.csv /root/metrics.csv; mkdir -p /run/nvml-sim")
    own.write("/root/telemetry.pyz", bundle.build().content)
    own.write("/root/sample.py", SAMPLE)
    yield own
    own.run("rm -rf /run/nvml-sim")


def sample(host: Host, seconds: float, *names: str) -> tuple[dict[str, Any], traces.Trace]:
    said: dict[str, Any] = json.loads(host.output(f"python3 /root/sample.py {seconds} {' '.join(names)}"))
    return said, traces.read_gpus(host.read("/root/gpu.csv"))


def test_what_a_script_shows_is_sampled_and_diagnosed(gpus: Host) -> None:
    script = SCRIPTS["glm5_100_at_55"]
    for gpu in range(8):
        gpus.write(
            f"/run/nvml-sim/gpu{gpu}/script", "0 util=0 power_w=90\n" + nvml(script, gpu).replace("0 ", "0.5 ", 1)
        )
    said, trace = sample(gpus, 5)
    assert said["notes"] == []
    assert {item.gpu for item in trace.samples} == {str(gpu) for gpu in range(8)}
    assert {item.phase for item in trace.samples} == {"warm-up", "run c=64 1/1"}
    last = trace.samples[-1]
    assert (last.utilization, last.power, last.power_limit, last.sm_clock, last.sm_clock_max) == (
        98,
        330,
        600,
        2280,
        2430,
    )
    assert (last.reasons, last.pcie_rx, last.pcie_gen, last.pcie_width, last.memory_total) == (0, 900, 5, 16, 97887)
    assert min(item.utilization or 0 for item in trace.samples) == 0, "the script's first half second"
    (finding, *_) = diagnose(trace.samples, traces.read_bench(script.bench()).runs)
    assert (finding.name, finding.phase) == ("busy-not-loaded", "run c=64")
    assert said["cpu"] < 0.5, "of one core, for eight GPUs, beside whatever else the tests' machine does"


def test_only_the_instances_gpus_and_a_hanging_one_hides_no_other(gpus: Host) -> None:
    uuids = json.loads(
        gpus.output(
            'cd /root && python3 -c \'import sys, json; sys.path.insert(0, "telemetry.pyz");'
            " from kernelswap.agent import gpus; print(json.dumps([gpu.uuid for gpu in gpus.read()]))'"
        )
    )
    gpus.write("/run/nvml-sim/gpu2/hang", "nvmlDeviceGetPcieThroughput 600\n")
    said, trace = sample(gpus, 2, uuids[1], uuids[2])
    assert {item.gpu for item in trace.samples} == {"1"}
    assert said["ended_in"] < 3
    gpus.run("rm /root/gpu.csv")
    gpus.write("/run/nvml-sim/gpu1/fail", "nvmlDeviceGetPowerUsage 3\n")
    gpus.write("/run/nvml-sim/gpu2/hang", "")
    gpus.write("/run/nvml-sim/gpu2/fail", "nvmlDeviceGetClockInfo 15\n")
    said, trace = sample(gpus, 1, uuids[1], uuids[2])
    assert {item.power for item in trace.samples if item.gpu == "1"} == {None}, "not known is not 0 W"
    assert said["notes"] == [f"GPU 2 {uuids[2]} is not sampled: GPU is lost"]


def test_a_script_begins_when_a_process_holds_the_gpu(gpus: Host) -> None:
    gpus.write("/run/nvml-sim/gpu0/script", "begin held\n0 util=100 power_w=140  # at once\n600 util=0\n")
    ask = (
        'python3 -c \'import sys; sys.path.insert(0, "/root/telemetry.pyz"); from pynvml import *; nvmlInit();'
        " g = nvmlDeviceGetHandleByIndex(0); print(nvmlDeviceGetUtilizationRates(g).gpu, nvmlDeviceGetPowerUsage(g))'"
    )
    assert gpus.output(ask) == "0 30000"
    gpus.run(
        "cp /bin/sleep /run/gpuholder; systemd-run --collect --unit=held -E NVML_SIM_HOLD_MIB=500 /run/gpuholder 99"
    )
    deadline = time.monotonic() + 20
    while gpus.output(ask) != "100 140000":
        assert time.monotonic() < deadline
    gpus.run("systemctl stop held")
    assert gpus.output(ask) == "0 30000"
