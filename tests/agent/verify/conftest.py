from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernelswap.agent.client import Client

STANDIN = Path(__file__).parents[3] / "lab" / "standin"


@pytest.fixture
def start() -> Iterator[Callable[[str], Client]]:
    """Starts the lab's stand-in for SGLang with a fault."""
    started: list[subprocess.Popen[bytes]] = []

    def launch(fault: str) -> Client:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [sys.executable, "-m", "sglang.launch_server", "--model-path", "m", "--port", str(port)]
        environment = {**os.environ, "PYTHONPATH": str(STANDIN), "STANDIN_FAULT": fault}
        started.append(subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL))
        client = Client(f"http://127.0.0.1:{port}", "m")
        until = time.monotonic() + 20
        while client.status("/ready") != 200:
            assert time.monotonic() < until
            time.sleep(0.02)
        return client

    yield launch
    for process in started:
        process.kill()
        process.wait()
