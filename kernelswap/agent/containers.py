"""Containers: which one a process is in, and how it is stopped so that its runtime does not start it again."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from kernelswap.protocol import HostFault

ID = "([0-9a-f]{64})"
# Runtime by what it calls a container's cgroup; under cgroup v1 too, and inside a user's slice (rootless).
CGROUPS = (
    ("kubernetes", re.compile(rf"/kubepods.*?{ID}")),
    ("podman", re.compile(rf"/libpod-{ID}")),
    ("docker", re.compile(rf"/docker(?:-|/|/buildkit/){ID}")),
    ("containerd", re.compile(rf"/(?:nerdctl-|cri-containerd-|containerd-){ID}")),
    ("cri-o", re.compile(rf"/crio-{ID}")),
    ("lxc", re.compile(r"/lxc(?:\.payload\.|/)([^/]+)")),
    ("systemd-nspawn", re.compile(r"/systemd-nspawn@([^/]+)\.service/payload")),
    ("machined", re.compile(r"/machine\.slice/machine-([^/]+)\.scope")),
    ("container", re.compile(rf"/{ID}(?:/|$)")),
)
GLANCE = 5.0  # seconds that a question may take whose answer only people read
NO = ("", "no")  # restart policies that restart nothing


class ContainerError(Exception):
    """The runtime cannot be asked, or refused; the text says what it said."""


@dataclass(frozen=True)
class Place:
    """The container that a process is in, as its cgroup tells it."""

    runtime: str
    id: str


@dataclass(frozen=True)
class FoundContainer:
    """A container that was running, with what is needed to bring it back.

    restart: its policy, `no`, `on-failure:3`, ... serves: whether SGLang ran in it. ports: port inside -> of the host.
    """

    runtime: str
    id: str
    name: str
    image: str
    restart: str
    since: str
    serves: bool = True
    ports: Dict[str, int] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        return Place(self.runtime, self.id)

    def __str__(self) -> str:
        return f"{self.runtime} container {self.name} ({self.id[:12]}, image {self.image}, since {self.since})"


def of_cgroup(cgroup: str) -> Optional[Place]:
    """The container of a cgroup path; None outside of any."""
    for runtime, pattern in CGROUPS:
        match = pattern.search(cgroup)
        if match:
            return Place(runtime, match[1])
    return None


def ask(where: Place, timeout: float = 60) -> Dict[str, Any]:
    """What the runtime says of a container. timeout: seconds. Raises ContainerError."""
    if where.runtime not in ("docker", "podman"):
        raise ContainerError(f"a {where.runtime} container ({where.id[:12]})")
    text = _run(where.runtime, "inspect", "--type=container", where.id, timeout=timeout)
    try:
        answer = json.loads(text)
        return dict(answer[0])
    except (ValueError, LookupError, TypeError):
        raise ContainerError(f"{where.runtime} inspect {where.id[:12]}: no answer that can be read") from None


def all_of(runtime: str) -> List[Dict[str, Any]]:
    """What a runtime says of each of its containers, stopped ones too. Raises ContainerError."""
    ids = _run(runtime, "ps", "--all", "--quiet", "--no-trunc", timeout=GLANCE).split()
    if not ids:
        return []
    try:
        return [
            dict(answer) for answer in json.loads(_run(runtime, "inspect", "--type=container", *ids, timeout=GLANCE))
        ]
    except (ValueError, TypeError):
        raise ContainerError(f"{runtime} inspect: no answer that can be read") from None


def describe(where: Place) -> str:
    """A container for people, with what its runtime tells where that answers at once."""
    try:
        return str(found(where, ask(where, timeout=GLANCE)))
    except ContainerError:
        return f"{where.runtime} container {where.id[:12]}"


def found(where: Place, answer: Dict[str, Any], serves: bool = True) -> FoundContainer:
    """A container as its runtime describes it."""
    config, host = answer.get("Config") or {}, answer.get("HostConfig") or {}
    policy = host.get("RestartPolicy") or {}
    count = policy.get("MaximumRetryCount") or 0
    name = policy.get("Name") or "no"
    return FoundContainer(
        runtime=where.runtime,
        id=where.id,
        name=str(answer.get("Name", "")).lstrip("/"),
        image=str(answer.get("ImageName") or config.get("Image", "")),
        restart=f"{name}:{count}" if count and name == "on-failure" else name,
        since=str((answer.get("State") or {}).get("StartedAt", ""))[:19],
        serves=serves,
        ports={
            inside.partition("/")[0]: int(bound[0]["HostPort"])
            for inside, bound in (host.get("PortBindings") or {}).items()
            if bound and str(bound[0].get("HostPort", "")).isdigit()
        },
    )


def obstacle(container: FoundContainer, answer: Dict[str, Any]) -> Optional[HostFault]:
    """Why a container cannot be taken over; None if it can."""
    labels = (answer.get("Config") or {}).get("Labels") or {}
    stop = f"{container.runtime} stop {container.name}"
    if labels.get("com.docker.swarm.service.name"):
        service = labels["com.docker.swarm.service.name"]
        return HostFault("swarm would start it again", f"docker service scale {service}=0")
    if labels.get("PODMAN_SYSTEMD_UNIT"):
        return HostFault("a unit starts it", f"systemctl stop {labels['PODMAN_SYSTEMD_UNIT']}")
    if (answer.get("HostConfig") or {}).get("AutoRemove"):
        return HostFault("it is removed when it ends (--rm) and could not come back", stop)
    if container.runtime == "podman" and container.restart not in NO:
        return HostFault(f"podman cannot change its restart policy ({container.restart})", stop)
    return None


def stop(container: FoundContainer, timeout: float) -> None:
    """Stop a container for good: its runtime starts it neither at once nor at its own next start.

    timeout: seconds after which it is killed. Raises ContainerError.
    """
    if container.restart not in NO:
        _run(container.runtime, "update", "--restart=no", container.id)
    _run(container.runtime, "stop", f"--time={timeout:.0f}", container.id, timeout=timeout + 60)


def start(container: FoundContainer) -> None:
    """Undo `stop`; of a container that runs already, too. Raises ContainerError."""
    if container.restart not in NO:
        _run(container.runtime, "update", f"--restart={container.restart}", container.id)
    _run(container.runtime, "start", container.id)


def _run(*command: str, timeout: float = 60) -> str:
    said = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        raise ContainerError(f"{said}: there is no {command[0]} command here") from None
    except subprocess.TimeoutExpired:
        raise ContainerError(f"{said}: no answer within {timeout:g} s") from None
    if done.returncode:
        raise ContainerError(f"{said}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
