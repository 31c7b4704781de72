from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kernelswap.agent import hooks
from kernelswap.agent.hooks import Told
from kernelswap.protocol import Hook

MESSAGE = {"hook": "drain", "host": "gpu1", "cause": "it's $HOME; `x`", "from": None}


def run(script: str, timeout: float = 20) -> Told:
    return hooks.tell(Hook((sys.executable, "-c", script), timeout=timeout), MESSAGE)


def test_a_command_gets_the_message_and_little_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    told = run("import os, sys; print(sys.stdin.read()); print(sorted(os.environ)); print(os.getcwd())")
    message, names, folder = told.output.splitlines()
    assert json.loads(message) == MESSAGE
    assert {"PATH", "LANG", "HOME"} <= set(eval(names)) <= {"PATH", "LANG", "HOME", "LC_CTYPE"}  # noqa: S307
    assert (folder, told.problem) == ("/", "")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("raise SystemExit(7)", "ended with exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by signal 9"),
        ("pass", ""),  # it need not read what it is told
    ],
)
def test_how_a_command_ended(script: str, problem: str) -> None:
    assert run(script) == Told(problem, "")


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    start = time.monotonic()
    told = run(
        f"import subprocess, sys; print('so far', flush=True); subprocess.run([sys.executable, '-c', {child!r}])", 1
    )
    assert told == Told("did not end within 1 s", "so far\n")
    assert time.monotonic() - start < 1.9
    time.sleep(2)
    assert not mark.exists()


def test_what_a_command_leaves_running_holds_nobody_up() -> None:
    start = time.monotonic()
    told = run("import subprocess, sys; subprocess.Popen(['sleep', '5']); print('done')")
    assert (told.problem, told.output) == ("", "done\n")
    assert time.monotonic() - start < 4


def test_a_command_that_is_not_there() -> None:
    told = hooks.tell(Hook(("/nowhere/hook",)), MESSAGE)
    assert told.problem == "cannot be run: [Errno 2] No such file or directory: '/nowhere/hook'"


def test_output_is_bounded() -> None:
    assert len(run("print('x' * 1000000)").output) == hooks.MOST


class Handler(BaseHTTPRequestHandler):
    got: dict[str, object]

    def do_POST(self) -> None:
        type(self).got = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(int(self.path[1:4]))
        self.send_header("Location", "/200")
        self.end_headers()
        self.wfile.write(b"noted")

    def log_message(self, *_words: object) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_webhook(listener: str) -> None:
    assert hooks.tell(Hook(webhook=f"{listener}/202?token=t0k3n"), MESSAGE) == Told("", "noted")
    assert Handler.got == MESSAGE
    for status in (302, 404, 500):
        assert hooks.tell(Hook(webhook=f"{listener}/{status}"), MESSAGE).problem == f"answered HTTP {status}"
    told = hooks.tell(Hook(webhook="http://127.0.0.1:9/t0k3n"), MESSAGE)
    assert "does not answer" in told.problem
    assert "t0k3n" not in told.problem
