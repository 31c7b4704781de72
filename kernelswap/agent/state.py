"""What was read of a host by glance.py, judged: by the agent itself, and by the controller where there is no more to
it, which therefore loads nothing else of the agent's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Sequence

from kernelswap import ledger
from kernelswap.agent import glance
from kernelswap.protocol import HostState, InstanceState, Plan, Report, decode

HISTORY_SHOWN = glance.WHOLE  # the newest reports; older ones stay in the host's file


@dataclass(frozen=True)
class Unit:
    """A unit. active: as systemd says it, or `absent`; main_pid: 0 where there is none, or nobody asked; since: epoch
    seconds; enabled: whether the boot starts it."""

    active: str
    main_pid: int
    since: Optional[float]
    enabled: bool


ABSENT = Unit("absent", 0, None, False)


def glanced(seen: Mapping[str, Any]) -> HostState:
    """The state of a host, from what `glance` printed there."""
    units = dict.fromkeys(glance.unit_names(seen["instances"]), ABSENT)
    for name, since in seen["units"].items():
        units[name] = Unit("active", 0, since, True)
    return state_of(seen, units)


def state_of(seen: Mapping[str, Any], units: Mapping[str, Unit]) -> HostState:
    """units: by name, see glance.unit_names."""
    return HostState(
        agent=seen["agent"],
        key=(seen["key"] or "").strip(),
        users=tuple(seen["users"]),
        recover_unit=seen["recover_unit"],
        recover_enabled=tuple(seen["recover_enabled"]),
        instances=tuple(_instance(name, each, units) for name, each in seen["instances"].items()),
        metrics=seen["metrics"],
        drift_units=seen["drift_units"],
        member_unit=seen["member_unit"],
    )


def _instance(name: str, seen: Mapping[str, Any], units: Mapping[str, Unit]) -> InstanceState:
    server, _, keeper = (units[unit] for unit in glance.unit_names([name]))
    known_good = seen["known_good"]
    history = _reports(seen["history"])
    return InstanceState(
        instance=name,
        known_good=known_good,
        unit_state=server.active,
        unit_since=server.since,
        main_pid=server.main_pid or None,
        unit_intact=known_good is not None and server.enabled and seen["intact"],
        releases={release: dict(files) for release, files in seen["releases"].items()},
        plan=_plan(seen["plan"]),
        history=tuple(history[-HISTORY_SHOWN:]),
        barred=tuple(sorted(ledger.barred(history))),
        rollback_target=ledger.rollback_target(history, set(seen["releases"])),
        traffic=seen["traffic"],
        member=keeper.active if keeper.enabled else "disabled",
    )


def _reports(lines: Sequence[str]) -> List[Report]:
    """A line torn by a power cut is skipped."""
    reports = []
    for line in lines:
        try:
            reports.append(decode(Report, line))
        except ValueError:
            continue
    return reports


def _plan(text: Optional[str]) -> Optional[Plan]:
    try:
        return decode(Plan, text) if text else None
    except ValueError:
        return None
