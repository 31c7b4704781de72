from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kernelswap.agent import preflight, processes
from kernelswap.agent.engine import Answer
from kernelswap.agent.occupants import Occupants
from kernelswap.agent.processes import Process
from kernelswap.protocol import Gpu, Plan, Request

REQUEST = Request("20261130T023000Z-ab12", "main", "converge", "b-2", "ada@desk")
PLAN = Plan("main", "b-2", "b", "m", "/usr/bin/python3", (), {}, "root", "/m", "m", "0.0.0.0", 30000)
# Who calls vfork waits in the kernel, in state D, until its child runs another program: this child never does.
VFORK = "import ctypes, time; print('up', flush=True); ctypes.CDLL(None).vfork() or time.sleep(60)"


@pytest.fixture
def waiting() -> Iterator[Process]:
    child = subprocess.Popen([sys.executable, "-c", VFORK], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()
    until = time.monotonic() + 10
    while processes.table()[child.pid].state != "D":
        assert time.monotonic() < until
        time.sleep(0.01)
    yield processes.table()[child.pid]
    table = processes.table()
    processes.end([table[child.pid]], deadline=0)
    child.wait()


def test_what_waits_in_the_kernel_is_refused_with_what_helps(waiting: Process) -> None:
    (fault,) = preflight.stuck(Occupants(strays=(waiting,)), patience=0.3)
    assert f"pid {waiting.pid} of " in fault.what
    assert "state D, in " in fault.what
    assert fault.todo.endswith("reboot the host")


def test_a_wait_that_ends_is_none() -> None:
    child = subprocess.Popen(["sleep", "60"])
    begin = time.monotonic()
    assert preflight.stuck(Occupants(strays=(processes.table()[child.pid],)), patience=5) == []
    assert time.monotonic() - begin < 4
    child.kill()
    child.wait()


@pytest.mark.parametrize(
    ("cgroup", "says"),
    [
        ("/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + "a" * 64 + ".scope", "a kubernetes container"),
        ("/lxc.payload.web/system.slice/glm.service", "a lxc container (web)"),
        ("/user.slice/user-0.slice/user@0.service/app.slice/glm.service", "--machine=root@ disable --now glm.service"),
    ],
)
@pytest.mark.parametrize("foreign", [False, True])
def test_what_others_would_start_again_is_refused(cgroup: str, says: str, foreign: bool) -> None:
    process = Process(2**22 + 1, 1, 5, "S", 0, ("python3", "-m", "sglang.launch_server"), cgroup)
    found = Occupants(foreign=(process,)) if foreign else Occupants(strays=(process,))
    request = Request(**{**vars(REQUEST), "adopt": True})
    (fault,) = preflight.strays(request, Plan(**{**vars(PLAN), "end_foreign": True}), found)
    assert says in str(fault)


def test_what_is_foreign_is_nobodys_business_while_it_is_not_to_be_ended() -> None:
    process = Process(2**22 + 1, 1, 5, "S", 0, ("vllm", "serve"), "/lxc.payload.web")
    assert preflight.strays(REQUEST, PLAN, Occupants(foreign=(process,))) == []


FLAGS = {"attention-backend": "trtllm_mla", "tp-size": "8", "trust-remote-code": "true"}
MLA = Answer("0.5.23", "resolve", "TRTLLM MLA backend is only supported on Blackwell GPUs. true")


@pytest.mark.parametrize(
    ("said", "others", "unusable", "says"),
    [
        (Answer("0.5.23", resolved=True), False, False, ""),
        (Answer("0.5.23", "resolve", unknown="CUDA error"), False, False, ""),
        (MLA, True, False, f"{MLA.refusal} (--attention-backend trtllm_mla): correct the profile"),
        (MLA, True, True, ""),  # it may only miss the model's files
        (Answer("0.5.23", "parse", "ambiguous option: --x"), True, True, "ambiguous option: --x: correct the profile"),
        (Answer(phase="start", refusal="/p: No such file"), True, True, ""),
        (
            Answer(phase="start", refusal="no answer"),
            False,
            False,
            "SGLang cannot be asked about b-2: no answer: see what ",
        ),
        (
            Answer("0.5.22", resolved=True),
            False,
            False,
            "SGLang 0.5.22 is installed for /usr/bin/python3, b-2 wants 0.5.23",
        ),
        (
            Answer("0.5.23", resolved=True, missing={"throughput": "No module named 'aiohttp'"}),
            False,
            False,
            "what verify.throughput needs of SGLang cannot be imported: No module named 'aiohttp': install it for /usr",
        ),
    ],
)
def test_what_sglang_refuses(said: Answer, others: bool, unusable: bool, says: str) -> None:
    plan = dataclasses.replace(PLAN, flags=FLAGS, engine_version="0.5.23")
    faults = preflight.engine_faults(plan, said, others, unusable)
    assert len(faults) == bool(says)
    assert says in "".join(map(str, faults))


def test_any_version_will_do_where_none_is_asked_for() -> None:
    assert preflight.engine_faults(PLAN, Answer("0.5.22", resolved=True)) == []


def test_what_is_worth_knowing() -> None:
    plan = dataclasses.replace(PLAN, flags={"moe-runner-backend": "flashinfer_trtllm"})
    given = {"page_size": "1", "backend": '"auto"', "tp_size": "8", "api_key": '"k3y"'}
    values = {
        "page_size": "64",
        "backend": '"triton"',
        "tp_size": "8",
        "api_key": "null",
        "quantization": '"modelopt_fp4"',
    }
    said = Answer("0.5.23", resolved=True, values=values, given=given, warnings=("an old flag",))
    sm120 = Gpu(0, capability="12.0")
    warned, changed, advice = preflight.notes(plan, said, [sm120, sm120])
    assert warned == "SGLang warns: an old flag"
    assert changed == "SGLang changes page_size from 1 to 64"
    assert advice.startswith("moe-runner-backend: SGLang takes flashinfer_trtllm on SM120, but ")
    # Cards of two kinds have no architecture of their own.
    assert len(preflight.notes(plan, said, [sm120, Gpu(1, capability="9.0")])) == 2


def test_our_table_speaks_of_refusals_only_where_sglang_could_not() -> None:
    plan = dataclasses.replace(PLAN, flags={"attention-backend": "cutedsl_mla"})
    hopper = [Gpu(0, capability="9.0")]
    assert preflight.notes(plan, Answer("0.5.23", "resolve", refusal="no"), hopper) == []
    unknown, ours = preflight.notes(plan, Answer("0.5.23", "resolve", unknown="CUDA error"), hopper)
    assert unknown == "SGLang's rules could not be asked here: CUDA error; see whether it starts"
    assert "cutedsl_mla needs SM100" in ours
    (parsed,) = preflight.notes(PLAN, Answer("0.4.9", values={"tp_size": "1"}), hopper)
    assert "its parser was asked, its rules were not" in parsed
