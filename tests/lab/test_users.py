"""Any SSH user works: root, one with sudo, one with a sudo password, and behind a jump host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from labhost import Host, Lab
from project import Project, count_sessions, release, sessions, unused

pytestmark = pytest.mark.xdist_group("users")

SUDO = {"ssh_user": "ops", "_sudo": True}
WAYS: dict[str, Mapping[str, Any]] = {
    "root": {"ssh_user": "root"},
    "sudo": SUDO,
    "sudo with a password": {**SUDO, "_sudo_password": "ops"},
    "jump": {**SUDO, "_sudo_password": "ops"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_deploy_commits_and_the_next_one_asks_one_question(tmp_path: Path, lab: Lab, way: str) -> None:
    host, gate = unused(lab), lab.hosts[0]
    count_sessions(host)
    data = dict(WAYS[way])
    if way == "sudo":
        host.run("echo 'ops ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/ops")
    if way == "jump":
        data["ssh_config_file"] = str(tmp_path / "ssh_config")
        config = (lab.folder / "ssh_config").read_text()
        (tmp_path / "ssh_config").write_text(f"Host {host.name}\n  ProxyJump {gate.name}\n{config}")
    project = Project(tmp_path, [(host, data)]).write()

    first = project.deploy("-y", "-vv")
    assert first.code == 0
    assert "committed plain-" in first
    before = sessions(host)
    second = project.deploy("-y", "-vv")
    assert sessions(host) - before - 1 == 1  # this question is a session, too
    assert second.code == 0
    assert "main: unchanged: plain-" in second
    status = project.kernelswap("status", "inventory/hosts.py")
    assert status.code == 0
    assert " ok " in status

    assert (f"from {gate.address} " in host.output("journalctl -u ssh")) == (way == "jump")
    assert host.output("ls /tmp | grep -c pyinfra || true") == "0"


def test_a_missing_password_is_said_and_no_other_host_suffers(tmp_path: Path, lab: Lab) -> None:
    good, mute, dead = unused(lab), unused(lab), Host("gpu-dead", "192.0.2.7", lab)
    skip = {"rollout": {"unreachable": "skip"}}
    hosts = [(good, skip), (mute, {**skip, **SUDO}), (dead, {**skip, "ssh_hostname": dead.address})]
    project = Project(tmp_path, hosts).write()
    (tmp_path / "config.py").write_text("from pyinfra import config\nconfig.CONNECT_TIMEOUT = 2\n")
    run = project.deploy("-y")
    assert run.code == 1
    said = " ".join(run.output.split())
    assert f"[{mute.name}] sudo asks for a password: set _sudo_password" in said
    assert f"[{dead.name}] Could not connect" in said
    assert release(good).startswith("plain-")
    for host in (mute, dead):
        assert f"unreachable: {host.name}: could not be reached or read" in said

    status = project.kernelswap("status", "inventory/hosts.py")
    rows = {line.split()[0]: line for line in status.output.splitlines() if line.startswith("gpu")}
    assert status.code == 1
    assert " ok " in rows[good.name]
    assert "unreachable: sudo asks for a password" in rows[mute.name]
    assert "unreachable: Could not connect" in rows[dead.name]
