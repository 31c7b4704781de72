"""The kernelswap command in a process of its own: reading an inventory applies gevent's patch to the process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
Kernelswap = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def kernelswap() -> Kernelswap:
    def run(*words: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
        program = [sys.executable, "-c", "from kernelswap.cli import main; main()", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(program, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)

    return run
