from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
Kernelswap = Callable[..., "subprocess.CompletedProcess[str]"]
HOSTS = """
near = [("gpu1", {"model": "m", "profile": "p", "ssh_hostname": "127.0.0.1", "ssh_port": 1})]
far = [("gpu2", {"model": "gone", "profile": "p"}), ("gpu3", {"model": "m", "profile": "p", "metrics": "here"})]
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    for kind, text in (("models", "path: /m\n"), ("profiles", "flags: {}\n")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"{kind[0]}.yaml").write_text(text)
    (tmp_path / "hosts.py").write_text(HOSTS)
    shutil.copytree(ROOT / "templates", tmp_path / "templates")
    return tmp_path


def test_every_fault_is_told_before_a_host_is_asked(kernelswap: Kernelswap, inventory: Path) -> None:
    done = kernelswap("status", "hosts.py", "--drift", cwd=inventory)
    assert done.returncode == 2
    assert "hosts.py: gpu2: model: there is no model `gone`" in done.stderr
    assert "hosts.py: gpu3: metrics: 'here' is no absolute path" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("limit", ["gpu1", "near", "*1"])
def test_only_hosts_that_are_looked_at_must_be_right(kernelswap: Kernelswap, inventory: Path, limit: str) -> None:
    done = kernelswap("status", "hosts.py", "--drift", "--limit", limit, "--json", cwd=inventory)
    (host,) = json.loads(done.stdout)
    assert (host["host"], host["ok"], host["unknown"]) == ("gpu1", False, 1)
    assert host["findings"][0]["kind"] == "unreachable"
    assert done.returncode == 2
