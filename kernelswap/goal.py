"""What a person asked for, from pyinfra's data: `--profile`, `--rollback` or neither, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernelswap.errors import ConfigError, Fault

CONVERGE = "converge"
ROLLBACK = "rollback"
VERIFY = ("quick", "full")


@dataclass(frozen=True)
class Goal:
    """profile: asked for on the command line; None leaves each host its declared one. verify: see protocol.Request."""

    action: str = CONVERGE
    profile: str | None = None
    reason: str = ""
    force: bool = False
    adopt: bool = False
    verify: str = ""


def goal_of(asked: Mapping[str, Any]) -> Goal:
    """The goal in `--data` as pyinfra parsed it. Raises ConfigError."""
    faults = [
        Fault(f"--data {name}", f"expected true or false, got {asked[name]!r}", f"write --{name}, or leave it out")
        for name in ("rollback", "force", "adopt")
        if not isinstance(asked.get(name, False), bool)
    ]
    profile = asked.get("profile")
    if asked.get("rollback") is True and profile is not None:
        faults.append(Fault("--profile, --rollback", "these are two goals", "give one"))
    verify = asked.get("verify", "")
    if isinstance(verify, Mapping):  # a model's key beside a host, which spec.py tells
        verify = ""
    if verify not in ("", *VERIFY):
        faults.append(Fault("--verify", f"there is no {verify!r}", f"give {' or '.join(VERIFY)}, or leave it out"))
    if faults:
        raise ConfigError(faults)
    return Goal(
        action=ROLLBACK if asked.get("rollback") else CONVERGE,
        profile=None if profile is None else str(profile),
        reason=str(asked.get("reason", "")),
        force=asked.get("force", False),
        adopt=asked.get("adopt", False),
        verify=verify,
    )
