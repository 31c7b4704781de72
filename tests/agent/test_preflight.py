from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kernelswap.agent import preflight, processes
from kernelswap.agent.occupants import Occupants
from kernelswap.agent.processes import Process
from kernelswap.protocol import Plan, Request

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
    (line,) = preflight.stuck(Occupants(strays=(waiting,)), patience=0.3)
    assert f"pid {waiting.pid} of " in line
    assert "state D, in " in line
    assert line.endswith("reboot the host")


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
    (line,) = preflight.strays(request, Plan(**{**vars(PLAN), "end_foreign": True}), found)
    assert says in line


def test_what_is_foreign_is_nobodys_business_while_it_is_not_to_be_ended() -> None:
    process = Process(2**22 + 1, 1, 5, "S", 0, ("vllm", "serve"), "/lxc.payload.web")
    assert preflight.strays(REQUEST, PLAN, Occupants(foreign=(process,))) == []
