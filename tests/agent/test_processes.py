"""Real processes of this machine, named as the field names them."""

from __future__ import annotations

import os
import signal
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
        (("python3", "-m", "sglang.launch_server", "--port", "\u00b2"), None),
        (("python3", "-m", "sglang.launch_server", "--port", "9" * 5000), None),
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
        ("/system.slice/user-glm.service", "user-glm.service"),
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


TREE = """
import os, signal, subprocess, sys, time
log = open(sys.argv[1], "a", buffering=1)
def told(number, _frame):
    log.write(f"{os.getpid()} {number}\\n")
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, told if sys.argv[2] == "main" or number == signal.SIGTERM else signal.SIG_DFL)
if sys.argv[2] == "main":
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "worker"], start_new_session=True)
log.write(f"{os.getpid()} {sys.argv[2]}\\n")
time.sleep(60)
"""


def run_server(folder: Path, *before: str) -> tuple[subprocess.Popen[bytes], int, Path]:
    """A launcher by its words, whose worker leaves its session and outlives it: the process, the worker, their log."""
    script, log = folder / "sglang/launch_server.py", folder / "log"
    script.parent.mkdir()
    script.write_text(TREE)
    main = subprocess.Popen([*before, sys.executable, str(script), str(log), "main"])
    until = time.monotonic() + 20
    while (log.read_text().count("\n") if log.exists() else 0) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    worker = next(int(line.split()[0]) for line in log.read_text().splitlines() if line.endswith("worker"))
    return main, worker, log


def test_end_asks_the_launcher_alone_and_follows_what_it_leaves_behind(tmp_path: Path) -> None:
    main, worker, log = run_server(tmp_path)
    found = processes.table()
    assert [p.pid for p in processes.servers({pid: found[pid] for pid in (main.pid, worker)})] == [main.pid]
    assert processes.end([found[main.pid]], deadline=1.0) == []
    assert main.wait() == 0
    told = [line for line in log.read_text().splitlines() if line.split()[1].isdigit()]
    assert told == [f"{main.pid} {signal.SIGINT.value}"]  # the worker was killed at the deadline, unasked
    left = processes.table().get(worker)
    assert left is None or left.ended


def test_the_launcher_below_a_wrapper_is_asked(tmp_path: Path) -> None:
    main, _worker, log = run_server(tmp_path, "timeout", "60")
    found = processes.table()
    assert found[main.pid].is_launcher
    assert processes.main_launcher(found, found[main.pid]).parent == main.pid
    assert processes.end([found[main.pid]], deadline=1.0) == []
    main.wait()
    told = [line.split() for line in log.read_text().splitlines() if line.split()[1].isdigit()]
    assert [number for _, number in told] == [str(signal.SIGINT.value)]
    assert told[0][0] != str(main.pid)


def test_end_spares_what_it_is_told_to(tmp_path: Path) -> None:
    main, worker, _log = run_server(tmp_path)
    found = processes.table()
    assert processes.end([found[main.pid]], deadline=0.5, spare=[worker]) == []
    assert processes.alive(found[worker])
    assert processes.end([found[worker]], deadline=5) == []
    main.wait()


@pytest.mark.parametrize(
    ("argv", "ignored", "number"),
    [
        (("python3", "-m", "sglang.launch_server"), "0000000000000000", signal.SIGINT),
        (
            ("python3", "-m", "sglang.launch_server"),
            "0000000001001002",
            signal.SIGTERM,
        ),  # nohup in a script's background
        (("sglang::scheduler",), "0000000000000000", signal.SIGTERM),
        (("vllm", "serve"), "0000000000000000", signal.SIGTERM),
    ],
)
def test_the_signal_that_drains(argv: tuple[str, ...], ignored: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "100").mkdir()
    (tmp_path / "100/status").write_text(f"Name:\tx\nSigIgn:\t{ignored}\n")
    assert processes.drain_signal(process(*argv), tmp_path) == number


def test_what_no_signal_ends_is_told_with_where_it_waits(tmp_path: Path) -> None:
    (tmp_path / "100").mkdir()
    (tmp_path / "100/stat").write_text("100 (sglang::schedul) D 1 " + "0 " * 48)
    (tmp_path / "100/wchan").write_text("os_acquire_rwlock_write")
    said = processes.stuck(process("sglang::scheduler"), tmp_path)
    assert "pid 100" in said
    assert "state D, in os_acquire_rwlock_write" in said


@pytest.mark.parametrize(
    ("rows", "who"),
    [
        ([process("x", pid=9, cgroup="/system.slice/cron.service")], "unit cron.service"),
        ([process("x", pid=9, parent=8), process("bash", "loop.sh", pid=8)], "pid 8: bash loop.sh"),
        (
            [process("x", pid=9, cgroup="/system.slice/docker-" + "a" * 64 + ".scope")],
            "docker (container aaaaaaaaaaaa)",
        ),
        ([process("x", pid=9, cgroup="/user.slice/user-0.slice/user@0.service/app.slice/a.service")], "unit a.service"),
    ],
)
def test_who_started_it(rows: list[Process], who: str) -> None:
    assert who in processes.origin({row.pid: row for row in rows}, rows[0])


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
