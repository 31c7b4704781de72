"""Prometheus's own checker of rules and metrics, from the package of this machine's system and without its daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("KERNELSWAP_LAB_CACHE", "/var/cache/kernelswap")) / "promtool"


def promtool() -> str:
    found = shutil.which("promtool") or shutil.which("promtool", path=str(CACHE / "usr/bin"))
    if found:
        return found
    if not shutil.which("apt-get"):
        pytest.skip("promtool is missing: install Prometheus")
    CACHE.mkdir(parents=True, exist_ok=True)
    download = ["apt-get", "-qq", "download", "prometheus"]
    if subprocess.run(download, cwd=CACHE, capture_output=True, check=False).returncode:
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        subprocess.run(download, cwd=CACHE, check=True)
    (package,) = CACHE.glob("prometheus_*.deb")
    unpacked = CACHE.with_name("promtool.new")
    shutil.rmtree(unpacked, ignore_errors=True)
    subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
    (CACHE / "usr/bin").mkdir(parents=True, exist_ok=True)
    (unpacked / "usr/bin/promtool").replace(CACHE / "usr/bin/promtool")
    shutil.rmtree(unpacked)
    package.unlink()
    return str(CACHE / "usr/bin/promtool")


def check(*words: str, text: str = "", folder: Path | None = None) -> str:
    """What promtool says; it must find no fault."""
    done = subprocess.run([promtool(), *words], input=text, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
