"""What of Kernelswap's own a host needs, and what of it is missing there. Pure, except for reading templates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kernelswap import bundle, decide
from kernelswap.protocol import AGENT_PATH, DRIFT_UNITS, METRICS_LINK, PYTHON, STATE_ROOT, HostState
from kernelswap.render import Hidden, fill

RECOVER_UNIT = "kernelswap-recover@.service"
MEMBER_UNIT = "kernelswap-member@.service"


@dataclass(frozen=True)
class Setup:
    """What a host lacks before it can swap anything; for roles/host.py. members: instances that are to be kept in their
    routers and are not yet."""

    users: tuple[str, ...] = ()
    key: Hidden | None = None
    agent: bytes | None = None
    recover_unit: str | None = None
    recover: tuple[str, ...] = ()
    member_unit: str | None = None
    members: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != Setup()


@dataclass(frozen=True)
class Monitoring:
    """What is to become of a host's metrics; for roles/monitoring.py. folder: where they go, "" for nowhere; left:
    where they went, if that is another folder; units: the texts of the units that look for drift, by name."""

    folder: str = ""
    left: str = ""
    units: Mapping[str, str] = field(default_factory=dict)


def lacking(
    instances: Collection[str],
    users: Collection[str],
    state: HostState,
    key: Hidden,
    templates: Path,
    joined: Collection[str] = (),
) -> Setup:
    """What a host needs before it can swap and does not have. joined: instances that have routers."""
    agent = bundle.build()
    recover_unit, member_unit = unit_text(templates, RECOVER_UNIT), unit_text(templates, MEMBER_UNIT)
    # An agent at work keeps its file until the swap is over; the next run replaces it.
    at_work = any(item.running and item.running.active for item in state.instances)
    return Setup(
        users=tuple(sorted(set(users) - set(state.users))),
        key=None if state.key else key,
        agent=None if at_work or state.agent == agent.digest else agent.content,
        recover_unit=None if state.recover_unit == decide.digest(recover_unit) else recover_unit,
        recover=tuple(name for name in instances if name not in state.recover_enabled),
        member_unit=member_unit if joined and state.member_unit != decide.digest(member_unit) else None,
        members=tuple(n for n in instances if n in joined and decide.instance_state(state, n).member != "active"),
    )


def monitoring_of(data: Mapping[str, Any], state: HostState, templates: Path) -> Monitoring | None:
    """What is to be done about a host's metrics; None if nothing."""
    folder = str(data.get("metrics") or "")
    units = {name: unit_text(templates, name) for name in DRIFT_UNITS} if folder else {}
    wanted = decide.digest("".join(units.values())) if units else ""
    left = state.metrics if state.metrics != folder else ""
    return None if (state.metrics, state.drift_units) == (folder, wanted) else Monitoring(folder, left, units)


@cache
def unit_text(templates: Path, name: str) -> str:
    values = {"python": PYTHON, "agent": AGENT_PATH, "state_root": STATE_ROOT, "metrics_link": METRICS_LINK}
    return fill(templates, f"{name}.j2", values)
