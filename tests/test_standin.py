"""The lab's stand-in for SGLang keeps to what SGLang 0.5.23 was measured to do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernelswap.agent.client import Client, Generated, Unanswered

STANDIN = Path(__file__).parent.parent / "lab" / "standin"
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start(port: int, tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def launch(*words: str, fault: str = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "m", "--port", str(port), *words]
        environment = {**os.environ, "PYTHONPATH": str(STANDIN), "STANDIN_FAULT": fault}
        with (tmp_path / "log").open("w") as log:
            started.append(subprocess.Popen(command, env=environment, stderr=log))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def client(port: int) -> Client:
    return Client(f"http://127.0.0.1:{port}", "m", "key")


def wait_ready(client: Client) -> None:
    until = time.monotonic() + 20
    while client.status("/ready") != 200:
        assert time.monotonic() < until
        time.sleep(0.02)


def answer(client: Client) -> str:
    body = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 16}
    return str(client.post("/v1/chat/completions", body, timeout=5)["choices"][0]["message"]["content"])


def titles(pid: int) -> list[str]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(Path(f"/proc/{child}/cmdline").read_text().split("\0")[0] for child in children)


def test_it_answers_as_the_agent_asks(start: Start, client: Client) -> None:
    process = start("--api-key", "key", "--enable-metrics", "--tp-size", "2")
    wait_ready(client)
    assert titles(process.pid) == ["sglang::detokenizer", "sglang::scheduler_TP0", "sglang::scheduler_TP1"]
    assert answer(client) == "2+2 is 4."
    assert client.complete("x", 8, timeout=5).text == client.stream_completion("x", 8, timeout=5).text
    assert len(client.generate("x", 8, timeout=5).tokens) == 8
    assert client.running_requests() == 0
    assert Client(client.base, "m").status("/v1/models") == 401
    assert client.server_info()["tp_size"] == 2
    with pytest.raises(Unanswered, match="401"):
        Client(client.base, "m").server_info()


def test_sigint_finishes_open_requests_and_takes_no_new_ones(start: Start, client: Client) -> None:
    process = start(fault="slow-answer:0.1")
    wait_ready(client)
    answers: list[Generated] = []
    open_request = threading.Thread(target=lambda: answers.append(client.generate("x", 10, timeout=10)))
    open_request.start()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert client.status("/ready") == 0
    open_request.join()
    assert len(answers) == 1
    assert process.wait(5) == -signal.SIGINT


@pytest.mark.parametrize(("fault", "code"), [("crash-at-load", -signal.SIGKILL), ("exit-0-at-load", 0)])
def test_it_crashes_when_told_to(fault: str, code: int, start: Start, tmp_path: Path) -> None:
    assert start(fault=fault).wait(10) == code
    assert "no kernel image" in (tmp_path / "log").read_text()


def test_its_parser_speaks_as_argparse_does(start: Start, tmp_path: Path) -> None:
    assert start("--moe-runner-backend", "tritn").wait(10) == 2
    assert "error: argument --moe-runner-backend: invalid choice: 'tritn'" in (tmp_path / "log").read_text()


def test_a_taken_port_shows_after_the_load_and_as_exit_code_3(start: Start, client: Client) -> None:
    start()
    wait_ready(client)
    assert start().wait(10) == 3


def test_sigterm_drains_and_new_requests_are_still_answered(start: Start, client: Client) -> None:
    process = start()
    wait_ready(client)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert client.status("/ready") == 503
    assert answer(client) == "2+2 is 4."
    assert process.wait(15) == 0
