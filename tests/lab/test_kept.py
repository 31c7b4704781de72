"""What a host keeps after many swaps by the literal command; tests/agent/test_retention.py has each moment of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from labhost import Host, Lab
from project import MODEL, Project, main_pid, release, unused

pytestmark = [pytest.mark.xdist_group("retention"), pytest.mark.exhaustive]

INVENTORY = ("--inventory", "inventory/hosts.py")
STATE, RELEASES = "/var/lib/kernelswap/main", "/etc/kernelswap/main/releases"


@pytest.fixture
def host(lab: Lab) -> Host:
    return unused(lab)


def names(host: Host, folder: str) -> list[str]:
    return host.output(f"ls -A {folder}").split()


def test_a_host_keeps_what_its_policy_says(host: Host, tmp_path: Path) -> None:
    project = Project(tmp_path, [(host, {})]).write()
    policy = "retention: {releases: 2, swaps: 3}\n"
    project.model(MODEL + policy)
    for number in range(5):
        project.profile(f"p{number}", f"environment: {{NUMBER: {number}}}")
        assert project.deploy("--profile", f"p{number}", "-y").code == 0
    assert "ROLLED BACK" in project.deploy("--profile", "crash", "-y")
    assert len(names(host, f"{STATE}/swaps")) == 4, "a failed swap deletes nothing"

    project.profile("p5", "environment: {NUMBER: 5}")
    assert project.deploy("--profile", "p5", "-y").code == 0
    assert [name.split("-")[0] for name in names(host, RELEASES)] == ["p4", "p5"]
    assert {name.split("-")[0] for name in names(host, f"{STATE}/measured")} == {"p4", "p5"}
    swaps = names(host, f"{STATE}/swaps")
    assert len(swaps) == 3
    for swap in swaps:
        assert project.kernelswap("report", host.name, swap, "--text", *INVENTORY).code == 0
    assert [r["request"]["release"].split("-")[0] for r in _history(project, host)] == [
        *("p0", "p1", "p2", "p3", "p4", "crash", "p5")
    ]
    assert "barred" in project.deploy("--profile", "crash", "-y")

    assert project.deploy("--rollback", "-y").code == 0
    assert release(host).startswith("p4-")
    pid = main_pid(host)
    assert "no longer on the host" in project.deploy("--rollback", "-y")

    # A limit: it is renewed without a restart, and counts from the next commit on.
    project.model(MODEL + policy.replace("2", "9"))
    assert "without a restart" in project.deploy("--profile", "p4", "-y")
    assert main_pid(host) == pid
    assert project.deploy("--profile", "p0", "-y").code == 0
    assert len(names(host, RELEASES)) == 3


def _history(project: Project, host: Host) -> list[dict[str, dict[str, str]]]:
    reports: list[dict[str, dict[str, str]]] = json.loads(
        project.kernelswap("history", host.name, "--json", *INVENTORY).output
    )
    return reports
