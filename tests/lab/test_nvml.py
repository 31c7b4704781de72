"""pynvml as NVIDIA ships it reads the simulated GPUs, whose memory follows the processes that hold it."""

import json
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest
from labhost import Host, Lab
from project import unused

pytestmark = pytest.mark.xdist_group("nvml")

MIB = 1024 * 1024
QUERY = """
import json, sys
sys.path.insert(0, "/root/nvml")
from pynvml import *
nvmlInit()
def gpu(index):
    handle = nvmlDeviceGetHandleByIndex(index)
    uuid = nvmlDeviceGetUUID(handle)
    try:
        mig = nvmlDeviceGetMigMode(handle)
    except NVMLError_NotSupported as error:
        mig = str(error)
    memory = nvmlDeviceGetMemoryInfo(handle, version=nvmlMemory_v2)
    return {
        "index": nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(uuid)), "uuid": uuid, "name": nvmlDeviceGetName(handle),
        "pci": nvmlDeviceGetPciInfo(handle).busId, "cc": nvmlDeviceGetCudaComputeCapability(handle),
        "total": memory.total, "used": memory.used, "reserved": memory.reserved,
        "used_v1": nvmlDeviceGetMemoryInfo(handle).used,
        "util": nvmlDeviceGetUtilizationRates(handle).gpu, "power": nvmlDeviceGetPowerUsage(handle),
        "limits": [nvmlDeviceGetEnforcedPowerLimit(handle), nvmlDeviceGetPowerManagementLimit(handle)],
        "clocks": [nvmlDeviceGetClockInfo(handle, kind) for kind in (NVML_CLOCK_SM, NVML_CLOCK_MEM)],
        "max": [nvmlDeviceGetMaxClockInfo(handle, kind) for kind in (NVML_CLOCK_SM, NVML_CLOCK_MEM)],
        "temperature": nvmlDeviceGetTemperature(handle, NVML_TEMPERATURE_GPU), "mig": mig,
        "reasons": [nvmlDeviceGetCurrentClocksThrottleReasons(handle), nvmlDeviceGetCurrentClocksEventReasons(handle)],
        "processes": [[process.pid, process.usedGpuMemory] for process in nvmlDeviceGetComputeRunningProcesses(handle)],
    }
print(json.dumps({
    "driver": nvmlSystemGetDriverVersion(), "cuda": nvmlSystemGetCudaDriverVersion(),
    "gpus": [gpu(index) for index in range(nvmlDeviceGetCount())],
}))
nvmlShutdown()
"""


@pytest.fixture(scope="module")
def host(lab: Lab) -> Host:
    """On which nobody else holds a GPU."""
    return unused(lab)


@pytest.fixture
def gpus(host: Host) -> Host:
    host.run("rm -rf /run/nvml-sim /etc/nvml-sim.conf")
    host.write("/root/nvml/pynvml.py", Path(pynvml.__file__).read_bytes())
    host.write("/root/nvml/query.py", QUERY)
    return host


def query(host: Host) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(host.output("python3 -W ignore /root/nvml/query.py"))
    return answer


def hold(host: Host, unit: str, environment: dict[str, str], name: str = "gpuholder") -> int:
    host.run(f"cp /bin/sleep '/run/{name}'")
    words = [f"--setenv={key}={value}" for key, value in environment.items()]
    host.run(f"systemd-run --collect --unit={unit} {' '.join(words)} '/run/{name}' 1000")
    return int(host.output(f"systemctl show -P MainPID {unit}"))


def test_a_host_has_eight_gpus_that_say_what_they_are(gpus: Host) -> None:
    answer = query(gpus)
    assert answer["cuda"] == 13000
    assert len(answer["gpus"]) == 8
    assert len({gpu["uuid"] for gpu in answer["gpus"]}) == 8
    assert [gpu["index"] for gpu in answer["gpus"]] == list(range(8))
    assert [gpu["pci"] for gpu in answer["gpus"]] == sorted(gpu["pci"] for gpu in answer["gpus"])
    first = answer["gpus"][0]
    assert (first["name"], first["cc"]) == ("NVIDIA RTX PRO 6000 Blackwell Server Edition", [12, 0])
    assert (first["total"], first["used"]) == (97887 * MIB, 4 * MIB)
    assert first["used_v1"] == first["used"] + first["reserved"]
    assert (first["util"], first["power"], first["limits"]) == (0, 30_000, [600_000, 600_000])
    assert (first["mig"], first["processes"], first["reasons"]) == ("Not Supported", [], [1, 1])


def test_uuids_differ_between_hosts_and_stay(hosts: list[Host], gpus: Host) -> None:
    show = (
        'python3 -c \'import ctypes as c; n = c.CDLL("libnvidia-ml.so.1"); n.nvmlInitWithFlags(0);'
        " b = c.create_string_buffer(96); n.nvmlDeviceGetUUID(c.c_void_p(1), b, 96); print(b.value.decode())'"
    )
    first, second, third = (host.output(show) for host in (gpus, *hosts))
    assert len({first, second, third}) == 3
    assert query(gpus)["gpus"][0]["uuid"] == first


def test_memory_is_held_while_a_process_lives(gpus: Host) -> None:
    uuid = query(gpus)["gpus"][3]["uuid"]
    pid = hold(gpus, "held", {"NVML_SIM_HOLD_MIB": "5000", "CUDA_VISIBLE_DEVICES": f"1,{uuid}"})
    try:
        answer = query(gpus)["gpus"]
        assert [gpu["used"] // MIB for gpu in answer] == [4, 5004, 4, 5004, 4, 4, 4, 4]
        assert answer[1]["processes"] == [[pid, 5000 * MIB]]
        assert (answer[1]["power"], answer[0]["power"]) == (90_000, 30_000)
    finally:
        gpus.run("systemctl stop held")
    answer = query(gpus)["gpus"]
    assert {gpu["used"] // MIB for gpu in answer} == {4}
    assert answer[1]["processes"] == []


def test_a_scheduler_holds_by_its_name_and_takes_the_environment_above(gpus: Host) -> None:
    """As SGLang's do: the environment of the process with the title is gone, that of the server above counts."""
    script = (
        "import os, time, setproctitle\n"
        "if os.fork() == 0:\n    setproctitle.setproctitle('sglang::scheduler_TP0' + ' ' * 4000)\ntime.sleep(1000)\n"
    )
    gpus.write("/run/scheduler.py", script)
    gpus.run(
        "systemd-run --collect --unit=titled --setenv=CUDA_VISIBLE_DEVICES=0,1 /opt/sglang/bin/python /run/scheduler.py"
    )
    try:
        deadline = time.monotonic() + 20
        while [gpu["used"] // MIB for gpu in query(gpus)["gpus"]] != [90004, 90004, 4, 4, 4, 4, 4, 4]:
            assert time.monotonic() < deadline
    finally:
        gpus.run("systemctl stop titled")


def test_no_gpu_for_an_empty_list(gpus: Host) -> None:
    hold(gpus, "none", {"NVML_SIM_HOLD_MIB": "5000", "CUDA_VISIBLE_DEVICES": ""})
    try:
        assert {gpu["used"] // MIB for gpu in query(gpus)["gpus"]} == {4}
    finally:
        gpus.run("systemctl stop none")


def test_memory_lingers_as_told(gpus: Host) -> None:
    gpus.write("/run/nvml-sim/linger_mib", "100\n")
    gpus.write("/run/nvml-sim/gpu3/linger_mib", "2000\n")
    assert [gpu["used"] // MIB for gpu in query(gpus)["gpus"]] == [104, 104, 104, 2004, 104, 104, 104, 104]
    gpus.run("rm -r /run/nvml-sim")
    assert {gpu["used"] // MIB for gpu in query(gpus)["gpus"]} == {4}


def test_a_host_may_have_other_gpus(gpus: Host) -> None:
    gpus.write("/etc/nvml-sim.conf", "# two of another kind\ngpus = 2\nname=NVIDIA B200\ncc=10.0\nmemory_mib=183359\n")
    gpus.write("/run/nvml-sim/gpu1/power_w", "640")
    answer = query(gpus)["gpus"]
    gpus.run("rm -r /etc/nvml-sim.conf /run/nvml-sim")
    assert [(gpu["name"], gpu["cc"], gpu["total"] // MIB) for gpu in answer] == [("NVIDIA B200", [10, 0], 183359)] * 2
    assert [gpu["power"] for gpu in answer] == [30_000, 640_000]


def ask(host: Host, expressions: dict[str, str]) -> dict[str, Any]:
    """What pynvml makes of each expression: its value, or the text of the error."""
    script = (
        "import json, sys, time; sys.path.insert(0, '/root/nvml'); from pynvml import *\n"
        "def tell(text):\n"
        "    try: return eval(text)\n"
        "    except NVMLError as error: return str(error)\n"
        "gpu = nvmlDeviceGetHandleByIndex\n"
        "def mig(index, number): return nvmlDeviceGetMigDeviceHandleByIndex(gpu(index), number)\n"
        "def used(device): return nvmlDeviceGetMemoryInfo(device, version=nvmlMemory_v2).used >> 20\n"
        "def pids(device): return [process.pid for process in nvmlDeviceGetComputeRunningProcesses(device)]\n"
        f"nvmlInit(); print(json.dumps({{key: tell(text) for key, text in {expressions!r}.items()}}))\n"
    )
    answer: dict[str, Any] = json.loads(host.run("python3 -W ignore -", data=script.encode()).stdout)
    return answer


def test_a_gpu_falls_off_the_bus_hangs_hides_its_processes_and_is_gone(gpus: Host) -> None:
    uuids = [gpu["uuid"] for gpu in query(gpus)["gpus"]]
    gpus.write("/run/nvml-sim/gpu1/fail", "nvmlDevice 15\n")
    gpus.write("/run/nvml-sim/gpu2/fail", "nvmlDeviceGetTemperature 3\nnvmlDeviceGetComputeRunningProcesses 4\n")
    gpus.write("/run/nvml-sim/gpu3/hang", "nvmlDeviceGetUtilizationRates 1\n")
    gpus.write("/run/nvml-sim/gpu4/hide_pids", "1")
    gpus.write("/run/nvml-sim/gpu4/linger_mib", "1000")
    pid = hold(gpus, "held", {"NVML_SIM_HOLD_MIB": "5000", "CUDA_VISIBLE_DEVICES": "0,4"})
    try:
        answer = ask(
            gpus,
            {
                "count": "nvmlDeviceGetCount()",
                "lost": "gpu(1)",
                "cold": "nvmlDeviceGetTemperature(gpu(2), 0)",
                "denied": "pids(gpu(2))",
                "seconds": "[time.time(), nvmlDeviceGetUtilizationRates(gpu(3)), time.time()][::2]",
                "seen": "[pids(gpu(0)), used(gpu(0))]",
                "hidden": "[pids(gpu(4)), used(gpu(4))]",
            },
        )
        begin, end = answer.pop("seconds")
        assert 1 <= end - begin < 5
        assert answer == {
            "count": 8,
            "lost": "GPU is lost",
            "cold": "Not Supported",
            "denied": "Insufficient Permissions",
            "seen": [[pid], 5004],
            "hidden": [[], 6004],
        }
        gpus.run("rm -r /run/nvml-sim")
        gpus.write("/run/nvml-sim/gpu0/gone", "1")
        left = query(gpus)["gpus"]
        assert [gpu["uuid"] for gpu in left] == uuids[1:]
        assert left[3]["processes"] == [], "index 4 is another GPU now"
        assert left[4]["processes"] == [[pid, 5000 * MIB]]
    finally:
        gpus.run("systemctl stop held; rm -rf /run/nvml-sim")


def test_memory_lingers_for_a_while_after_its_process(gpus: Host) -> None:
    gpus.write("/run/nvml-sim/gpu0/linger_s", "3")
    gpus.write("/run/nvml-sim/gpu1/linger_s", "-1")
    hold(gpus, "held", {"NVML_SIM_HOLD_MIB": "5000", "CUDA_VISIBLE_DEVICES": "0,1,2"})
    both = {"used": "[used(gpu(index)) for index in range(3)]"}
    assert ask(gpus, both)["used"] == [5004, 5004, 5004]
    gpus.run("systemctl stop held")
    assert ask(gpus, both)["used"] == [5004, 5004, 4]
    time.sleep(4)
    assert ask(gpus, both)["used"] == [4, 5004, 4]
    gpus.run("rm -r /run/nvml-sim")
    assert ask(gpus, both)["used"] == [4, 4, 4]


def test_a_gpu_is_divided_into_mig_devices(gpus: Host) -> None:
    gpus.write("/run/nvml-sim/gpu1/mig", "2")
    names = ask(gpus, {"uuids": "[nvmlDeviceGetUUID(mig(1, number)) for number in (0, 1)]"})["uuids"]
    assert len(set(names)) == 2
    assert all(name.startswith("MIG-") for name in names)
    pid = hold(gpus, "held", {"NVML_SIM_HOLD_MIB": "5000", "CUDA_VISIBLE_DEVICES": names[1]})
    try:
        answer = ask(
            gpus,
            {
                "modes": "[nvmlDeviceGetMigMode(gpu(1)), nvmlDeviceGetMaxMigDeviceCount(gpu(1))]",
                "none": "mig(1, 2)",
                "off": "nvmlDeviceGetMigMode(gpu(0))",
                "ids": "[nvmlDeviceGetGpuInstanceId(mig(1, 1)), nvmlDeviceGetComputeInstanceId(mig(1, 1))]",
                "kind": "[nvmlDeviceIsMigDeviceHandle(device).value for device in (gpu(1), mig(1, 0))]",
                "parent": "nvmlDeviceGetIndex(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig(1, 1)))",
                "by name": f"pids(nvmlDeviceGetHandleByUUID('{names[1]}'))",
                "used": "[used(device) for device in (gpu(1), mig(1, 0), mig(1, 1))]",
                "share": "nvmlDeviceGetMemoryInfo(mig(1, 0)).total * 2 == nvmlDeviceGetMemoryInfo(gpu(1)).total",
                "busy": "nvmlDeviceGetUtilizationRates(gpu(1))",
            },
        )
        assert answer == {
            "modes": [[1, 1], 8],
            "none": "Not Found",
            "off": "Not Supported",
            "ids": [2, 0],
            "kind": [0, 1],
            "parent": 1,
            "by name": [pid],
            "used": [5004, 4, 5004],
            "share": True,
            "busy": "Not Supported",
        }
    finally:
        gpus.run("systemctl stop held; rm -r /run/nvml-sim")
