"""Real processes of this machine, named as the field names them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelswap.agent import processes
from kernelswap.agent.processes import Process

PYTHON = "/opt/sglang/bin/python3.11"


def process(*argv: str, cgroup: str = "/", pid: int = 100, parent: int = 1) -> Process:
    return Process(pid, parent, 0, "S", 0, argv, cgroup)


@pytest.mark.parametrize(
    "argv",
    [
        (PYTHON, "-m", "sglang.launch_server", "--model-path", "m"),
        ("python3", "-W", "ignore", "-m", "sglang.launch_server"),
        ("python3", "-Wignore", "-X", "utf8", "-u", "-m", "sglang.launch_server"),
        (PYTHON, "/opt/sglang/bin/sglang", "serve", "--model-path", "m"),
        ("/opt/sglang/bin/sglang", "serve", "--model-path", "m"),
        ("python3", "/srv/sglang/launch_server.py", "--port", "1"),
        ("env", "A=1", "python3", "-m", "sglang.launch_server"),
    ],
)
def test_launchers(argv: tuple[str, ...]) -> None:
    assert process(*argv).is_launcher


@pytest.mark.parametrize(
    "argv",
    [
        ("tail", "-f", "sglang.log"),
        ("vim", "sglang.md"),
        ("python3", "train.py", "--engine", "sglang"),
        ("python3", "train.py", "-m", "sglang.launch_server"),
        ("python3", "-c", "print('-m sglang.launch_server')"),
        ("python3", "-m", "sglang.bench_serving", "--port", "30000"),
        ("bash", "-c", "python3 -m sglang.launch_server"),
        ("grep", "sglang", "serve"),
        ("sudo", "python3", "-m", "sglang.launch_server"),
        ("sglang", "--help"),
        (),
        ("",),
    ],
)
def test_no_launchers(argv: tuple[str, ...]) -> None:
    assert not process(*argv).is_launcher


@pytest.mark.parametrize(
    ("argv", "port"),
    [
        (("python3", "-m", "sglang.launch_server"), 30000),
        (("python3", "-m", "sglang.launch_server", "--port", "81"), 81),
        (("python3", "-m", "sglang.launch_server", "--port=82"), 82),
        (("python3", "-m", "sglang.launch_server", "--port", "$PORT"), None),
        (("tail", "--port", "83"), None),
    ],
)
def test_port(argv: tuple[str, ...], port: int | None) -> None:
    assert process(*argv).port == port


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/system.slice/my-glm.service", "my-glm.service"),
        ("/system.slice/system-vllm.slice/vllm@0.service/child", "vllm@0.service"),
        ("/user.slice/user-1000.slice/session-3.scope", None),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/glm.service", None),
        ("/system.slice/docker-0123.scope", None),
        ("/", None),
    ],
)
def test_unit(cgroup: str, unit: str | None) -> None:
    assert process("x", cgroup=cgroup).unit == unit


def test_cgroup_of_both_hierarchies() -> None:
    assert processes._cgroup("0::/system.slice/a.service\n") == "/system.slice/a.service"
    assert processes._cgroup("9:cpu:/\n1:name=systemd:/system.slice/a.service\n0::/\n") == "/system.slice/a.service"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("--api-key", "s3cret", "--tp", "8"), ["--api-key", "[redacted]", "--tp", "8"]),
        (("--admin-api-key=s3cret",), ["--admin-api-key=[redacted]"]),
        (("--api_key", "s3cret"), ["--api_key", "[redacted]"]),
        (("--tokenizer-path", "/m"), ["--tokenizer-path", "/m"]),
        (("--skip-tokenizer-init", "x"), ["--skip-tokenizer-init", "x"]),
        (("--hf-token", "s3cret"), ["--hf-token", "[redacted]"]),
    ],
)
def test_secrets_are_hidden(argv: tuple[str, ...], shown: list[str]) -> None:
    assert processes.hide_secrets(argv) == shown


def test_heads_and_lost_workers() -> None:
    table = {
        p.pid: p
        for p in (
            process("bash", "start.sh", pid=10),
            process("python3", "-m", "sglang.launch_server", pid=11, parent=10),
            process("sglang::scheduler_TP0", pid=12, parent=11),
            process("sglang::detokenizer", pid=13, parent=11),
            process("sglang::scheduler_DP0_TP0_EP0", pid=20, parent=1),
            process("tail", "-f", "sglang.log", pid=30),
        )
    }
    assert [p.pid for p in processes.servers(table)] == [11, 20]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the title of a scheduler whose name holds a parenthesis."""
    child = subprocess.Popen(["bash", "-c", "exec -a 'sglang::scheduler) S 1 (' sleep 60"])
    while not Path(f"/proc/{child.pid}/cmdline").read_text().startswith("sglang"):  # before, it is still bash
        time.sleep(0.01)
    yield child
    child.kill()
    child.wait()


def test_table_reads_real_processes(sleeper: subprocess.Popen[bytes]) -> None:
    found = processes.table()[sleeper.pid]
    assert found.parent == os.getpid()
    assert found.is_worker
    assert abs(processes.started_at(found) - time.time()) < 30
    assert processes.ancestors(processes.table(), sleeper.pid) >= {sleeper.pid, os.getpid(), 1}
    assert processes.descendants(processes.table(), [os.getpid()]) >= {sleeper.pid}


def test_end_terminates_and_leaves_a_reused_id_alone(sleeper: subprocess.Popen[bytes]) -> None:
    found = processes.table()[sleeper.pid]
    stranger = Process(**{**vars(found), "started": found.started - 1})
    assert processes.end([stranger], deadline=0.2) == []
    assert sleeper.poll() is None
    assert processes.end([found], deadline=5) == []
    assert sleeper.wait() == -15


def test_end_kills_what_ignores_the_request() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert processes.end([processes.table()[child.pid]], deadline=0.3) == []
    assert child.wait() == -9


def test_end_never_touches_ourselves_or_our_ancestors() -> None:
    table = processes.table()
    mine = [table[pid] for pid in processes.ancestors(table, os.getpid())]
    assert mine
    assert processes.end(mine, deadline=0.1) == []


def test_listeners(unused_port: int) -> None:
    code = (
        "import socket, sys, time; s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); "
        "print('up', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(unused_port)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert processes.listeners(unused_port) == [child.pid]
    child.kill()
    child.wait()
    assert processes.listeners(unused_port) == []
