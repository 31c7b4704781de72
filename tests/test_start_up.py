"""What is not loaded where it is not needed; how long it all takes is for benchmarks/startup.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("start", "spared"),
    [
        ("kernelswap.cli.main(['--help'], standalone_mode=False)", {"pyinfra", "pydantic", "ruamel", "jinja2"}),
        ("import kernelswap.cli.status, kernelswap.cli.drift", {"pyinfra", "gevent"}),
        ("import kernelswap.cli.status", {"pyinfra", "pydantic", "ruamel"}),
        (
            "from kernelswap import planning, router_planning; from roles import host, monitoring, router, server",
            {"pydantic", "ruamel"},
        ),
    ],
    ids=["kernelswap --help", "what tells drift", "kernelswap status", "deploy.py's imports"],
)
def test_little_is_loaded(start: str, spared: set[str]) -> None:
    code = f"import json, sys, kernelswap.cli; {start}; print(); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert spared & set(json.loads(done.stdout.splitlines()[-1])) == set()
