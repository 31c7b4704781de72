"""One SGLang server of a host, as values; spec.py makes them out of models, profiles and host data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelswap.errors import Fault
from kernelswap.flags import FlagValue
from kernelswap.protocol import Gpu, Requires, Retention, Timeouts, Traffic, Verify

DEFAULT_INSTANCE = "main"


@dataclass(frozen=True)
class Secret:
    """Where the controller finds a secret: exactly one of the two is set."""

    env: str | None = None
    file: str | None = None


ALWAYS, CHECK, NEVER = "always", "check", "never"


@dataclass(frozen=True)
class Note:
    """What is known of SGLang's releases about a server.

    blocks: `always`; in a `check` only, where the host's own SGLang decides since its release is not declared; `never`.
    combined: what is right in itself goes wrong together with something else.
    """

    fault: Fault
    blocks: str
    combined: bool = False


@dataclass(frozen=True)
class ServerSpec:
    """One SGLang server of a host. gpus and gpu_count as in `protocol.Plan`. traffic: without its secrets, which are in
    traffic_secrets by their place, `routers/0/key`."""

    instance: str
    model: str
    profile: str
    path: str
    served_name: str
    host: str
    port: int
    user: str
    python: str
    gpus: tuple[str, ...] = ()
    gpu_count: int = 0
    schedulers: int = 1
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    expose: str = "verified"
    verify: Verify = field(default_factory=Verify)
    timeouts: Timeouts = field(default_factory=Timeouts)
    memory_margin: int = 1024
    disk_free: int = 1024
    end_foreign: bool = False
    retention: Retention = field(default_factory=Retention)
    engine_version: str = ""
    requires: Requires = field(default_factory=Requires)
    traffic: Traffic = field(default_factory=Traffic)
    traffic_secrets: Mapping[str, Secret] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def needs_pins(spec: ServerSpec) -> bool:
    """Whether it names GPUs by index: these move when a GPU is gone, and NVML's and CUDA's orders differ."""
    return any(name.isdigit() for name in spec.gpus)


def pin(spec: ServerSpec, gpus: Sequence[Gpu]) -> ServerSpec:
    """The server with its GPUs by UUID."""
    uuids = {str(gpu.index): gpu.uuid for gpu in gpus if not gpu.parent}
    return replace(spec, gpus=tuple(uuids[name] if name.isdigit() else name for name in spec.gpus))


def is_router_only(data: Mapping[str, Any]) -> bool:
    """Whether a host has a router and serves nothing."""
    return "router" in data and not {"model", "instances"} & set(data)
