"""An ops project of its own for a test, in which the stand-in for SGLang serves: a swap takes seconds."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from labhost import ROOT, Host, Lab

BIN = Path(sys.executable).parent
T = TypeVar("T")

MODEL = """
path: /srv/models/tiny
engine: {python: /usr/bin/python3}
flags: {device: cpu}
environment: {PYTHONPATH: /opt/standin}
memory-margin: 1024
verify:
  drift: null
  min-healthy: 0
  answers: [{prompt: "What is 2+2?", expect: '\\b4\\b'}]
timeouts: {ready: 60, clean: 20}
"""
PROFILES = {
    "plain": "flags: {moe-runner-backend: auto}",
    "triton": "flags: {moe-runner-backend: triton}",
    "cutlass": "flags: {moe-runner-backend: cutlass}",
    "crash": "flags: {moe-runner-backend: flashinfer_trtllm}\nenvironment: {STANDIN_FAULT: crash-at-load}",
    "slow": "environment: {STANDIN_FAULT: 'slow-load:45'}\ntimeouts: {ready: 180}",
}


def unused(lab: Lab) -> Host:
    """A host that no test has touched."""
    return lab.up(len(lab.hosts) + 1)[-1]


def main_pid(host: Host) -> int:
    return int(host.output("systemctl show -P MainPID sglang-main.service"))


def release(host: Host) -> str:
    return host.output("basename $(readlink /etc/kernelswap/main/known-good)")


def traces(host: Host) -> str:
    """Whatever a deploy could leave: name, size, mode and time of all that it may write, and the units."""
    places = "/etc /usr/local /var/lib/kernelswap /var/cache/sglang /run/systemd/system /run/systemd/system.control"
    files = f"find {places} /run/systemd/transient ! -type d -printf '%p %s %m %T@\\n' 2>/dev/null | sort"
    return host.output(f"{files}; systemctl list-units --all --no-legend --plain 'sglang*' 'kernelswap*'")


def count_sessions(host: Host) -> None:
    """From now on sshd logs each command and file transfer that it is asked for."""
    host.run("echo LogLevel VERBOSE >/etc/ssh/sshd_config.d/sessions.conf; systemctl restart ssh")
    host.hang_up()


def asking(host: Host, do: Callable[[], T]) -> tuple[T, int]:
    """What is done, and how many commands and file transfers it has asked the host for."""
    before = sessions(host)
    done = do()
    return done, sessions(host) - before - 1


def sessions(host: Host) -> int:
    """How many have been asked for so far, this one included."""
    return int(host.output("journalctl -u ssh | grep -c 'Starting session: '"))


@dataclass(frozen=True)
class Project:
    """An ops repository as `kernelswap init` would make it: deploy.py, roles and templates, and its own inventory."""

    folder: Path
    hosts: Sequence[tuple[Host, Mapping[str, Any]]]

    def write(self) -> Project:
        for name in ("deploy.py", "roles", "templates"):
            (self.folder / name).symlink_to(ROOT / name)
        for kind in ("models", "profiles"):
            (self.folder / "inventory" / kind).mkdir(parents=True)
        self.model(MODEL)
        for name, text in PROFILES.items():
            self.profile(name, text)
        self.declare(self.hosts)
        return self

    def declare(self, hosts: Sequence[tuple[Host, Mapping[str, Any]]]) -> None:
        """Write the inventory."""
        named = [(host.name, data) for host, data in hosts]
        config = str(hosts[0][0].lab.folder / "ssh_config")
        shared = {"model": "standin", "profile": "plain", "ssh_config_file": config}
        (self.folder / "inventory" / "hosts.py").write_text(f"lab = ({named!r}, {shared!r})\n")

    def model(self, text: str) -> None:
        (self.folder / "inventory" / "models" / "standin.yaml").write_text(text)

    def profile(self, name: str, text: str) -> None:
        (self.folder / "inventory" / "profiles" / f"{name}.yaml").write_text(text)

    def words(self, *words: str) -> Sequence[str]:
        return [str(BIN / "pyinfra"), "inventory/hosts.py", "deploy.py", *words]

    def deploy(self, *words: str, **environment: str) -> Run:
        return run(self.words(*words), self.folder, environment)

    def kernelswap(self, *words: str) -> Run:
        return run([str(BIN / "kernelswap"), *words], self.folder)


@dataclass(frozen=True)
class Run:
    """How a command ended. output: both streams."""

    code: int
    output: str

    def __contains__(self, words: str) -> bool:
        return words in self.output


def run(words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Run:
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stdout.write(f"$ {shlex.join(words)}\n{done.stdout}")  # pytest shows it when the test fails
    assert "Traceback" not in done.stdout
    return Run(done.returncode, done.stdout)
