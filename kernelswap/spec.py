"""What one server is, with every default decided: defaults < model < profile < the profile's override < host data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelswap.flags import FlagValue
from kernelswap.profile import Library
from kernelswap.protocol import Timeouts, Verify


@dataclass(frozen=True)
class Secret:
    """Where the controller finds a secret: exactly one of the two is set."""

    env: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class ServerSpec:
    """One SGLang server of a host. gpus and gpu_count as in `protocol.Plan`."""

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


def server_spec(
    library: Library,
    instance: str,
    model: str,
    profile: str,
    overrides: Mapping[str, Any] | None = None,
    where: str = "host data",
) -> ServerSpec:
    """The server that `model` and `profile` make with a host's `overrides` laid over them. Raises ConfigError."""
    raise NotImplementedError


def host_specs(
    library: Library, data: Mapping[str, Any], where: str = "host data", profile: str | None = None
) -> tuple[ServerSpec, ...]:
    """The servers of one host, from its inventory data: `model`, `profile`, `instances`. Raises ConfigError.

    profile: asked for on the command line; it then replaces the profile of every instance.
    """
    raise NotImplementedError
