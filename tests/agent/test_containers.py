"""What is asked of Docker and Podman, noted by an executable; tests/lab/test_owners.py has a real Docker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kernelswap.agent import containers
from kernelswap.agent.containers import ContainerError, Place

ID = "c" * 64
ANSWER: dict[str, Any] = {
    "Name": "/glm",
    "Config": {"Image": "lmsysorg/sglang:v0.5.23", "Labels": None},
    "State": {"StartedAt": "2026-11-30T08:04:47.123456789Z"},
    "HostConfig": {
        "RestartPolicy": {"Name": "unless-stopped", "MaximumRetryCount": 0},
        "AutoRemove": False,
        "PortBindings": {"8000/tcp": [{"HostIp": "", "HostPort": "30000"}], "9000/tcp": None},
    },
}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`docker` and `podman` that note each word and answer as `answer` says."""
    (tmp_path / "answer").write_text(json.dumps([ANSWER]))
    for name in ("docker", "podman"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/asked\ncat {tmp_path}/answer\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "asked"


def test_stopped_for_good_and_brought_back_as_it_was(asked: Path) -> None:
    where = Place("docker", ID)
    container = containers.found(where, containers.ask(where))
    assert str(container) == (
        "docker container glm (cccccccccccc, image lmsysorg/sglang:v0.5.23, since 2026-11-30T08:04:47)"
    )
    assert container.ports == {"8000": 30000}
    containers.stop(container, 60)
    containers.start(container)
    assert asked.read_text().splitlines() == [
        f"docker inspect --type=container {ID}",
        f"docker update --restart=no {ID}",
        f"docker stop --time=60 {ID}",
        f"docker update --restart=unless-stopped {ID}",
        f"docker start {ID}",
    ]


def test_a_runtime_that_hangs_holds_no_description_up(
    asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(containers, "GLANCE", 0.2)
    start = time.monotonic()
    assert containers.describe(Place("docker", ID)) == "docker container cccccccccccc"
    assert time.monotonic() - start < 30


def test_podman_without_a_policy_needs_no_update(asked: Path) -> None:
    where = Place("podman", ID)
    answer = {**ANSWER, "HostConfig": {"RestartPolicy": {"Name": ""}}}
    container = containers.found(where, answer)
    assert containers.obstacle(container, answer) is None
    containers.stop(container, 5)
    containers.start(container)
    assert asked.read_text().splitlines() == [f"podman stop --time=5 {ID}", f"podman start {ID}"]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({"Name": "on-failure", "MaximumRetryCount": 3}, "on-failure:3"),
        ({"Name": "on-failure", "MaximumRetryCount": 0}, "on-failure"),
        ({"Name": "always", "MaximumRetryCount": 0}, "always"),
        (None, "no"),
    ],
)
def test_the_restart_policy_as_the_command_line_spells_it(policy: dict[str, Any] | None, told: str) -> None:
    assert containers.found(Place("docker", ID), {"HostConfig": {"RestartPolicy": policy}}).restart == told


@pytest.mark.parametrize(
    ("runtime", "changed", "todo"),
    [
        ("docker", {}, ""),
        ("docker", {"HostConfig": {"AutoRemove": True}}, "(--rm)"),
        ("docker", {"Config": {"Labels": {"com.docker.swarm.service.name": "llm"}}}, "docker service scale llm=0"),
        ("podman", {}, "podman cannot change its restart policy (unless-stopped): podman stop glm"),
        ("podman", {"Config": {"Labels": {"PODMAN_SYSTEMD_UNIT": "glm.service"}}}, "systemctl stop glm.service"),
    ],
)
def test_what_cannot_be_taken_over_says_what_to_do(runtime: str, changed: dict[str, Any], todo: str) -> None:
    answer = {**ANSWER, **changed}
    said = containers.obstacle(containers.found(Place(runtime, ID), answer), answer)
    assert todo in str(said or "")
    assert bool(todo) == bool(said)


def test_a_runtime_that_cannot_be_asked(asked: Path) -> None:
    with pytest.raises(ContainerError, match="a kubernetes container \\(cccccccccccc\\)"):
        containers.ask(Place("kubernetes", ID))
    assert containers.describe(Place("kubernetes", ID)) == "kubernetes container cccccccccccc"
    (asked.parent / "answer").write_text("[]")
    with pytest.raises(ContainerError, match="no answer that can be read"):
        containers.ask(Place("docker", ID))
    (asked.parent / "docker").write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2; exit 1\n")
    with pytest.raises(ContainerError, match="Cannot connect to the Docker daemon"):
        containers.ask(Place("docker", ID))
    (asked.parent / "docker").unlink()
    (asked.parent / "podman").unlink()
    with pytest.raises(ContainerError, match="there is no podman command here"):
        containers.ask(Place("podman", ID))
