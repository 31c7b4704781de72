"""From a pyinfra host to what must be done there: read the fact, decide, show it; nothing is changed."""

from __future__ import annotations

import getpass
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from pyinfra import logger
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory

from kernelswap import bundle, decide, root
from kernelswap.agent.processes import hide_secrets
from kernelswap.decide import Attach, Decision, Refused, Swap, Unchanged
from kernelswap.differences import LIMITS, compare, of_plan
from kernelswap.errors import ConfigError, Fault, KernelswapError
from kernelswap.facts import agent, host_state
from kernelswap.fleet import instances_of
from kernelswap.goal import ROLLBACK, Goal, goal_of
from kernelswap.profile import load_library, nearest
from kernelswap.protocol import AGENT_PATH, DRIFT_UNITS, METRICS_LINK, STATE_ROOT, HostState, Request
from kernelswap.render import PLAN_FILE, Hidden, Release, render, resolve_secrets
from kernelswap.spec import ALWAYS, ServerSpec, host_specs, needs_pins, pin

RECOVER_UNIT = "kernelswap-recover@.service"


@dataclass(frozen=True)
class Setup:
    """What a host lacks before it can swap anything; for roles/host.py."""

    users: tuple[str, ...] = ()
    key: Hidden | None = None
    agent: bytes | None = None
    recover_unit: str | None = None
    recover: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != Setup()


@dataclass(frozen=True)
class Monitoring:
    """What is to become of a host's metrics; for roles/monitoring.py. folder: where they go, "" for nowhere; left:
    where they went, if that is another folder; units: the texts of the units that look for drift, by name."""

    folder: str = ""
    left: str = ""
    units: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What is done about one instance. stage: the release's files to put; request: the swap, if there is one."""

    instance: str
    release: Release | None = None
    stage: tuple[str, ...] = ()
    request: Request | None = None


@dataclass(frozen=True)
class HostPlan:
    """Everything a deploy does on one host. Empty where nothing is to be done or the host was refused.

    monitoring: None where it is as it should be. root: arguments for all of it, see root.py.
    """

    setup: Setup = Setup()
    monitoring: Monitoring | None = None
    steps: tuple[Step, ...] = ()
    root: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """One server as the inventory declares it, with the values of its secrets."""

    spec: ServerSpec
    secrets: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Wanted({self.spec.instance})"


def plan_host(host: Host, library: Path, templates: Path) -> HostPlan:
    """Read the host, decide, and show what would change. A refused host is marked as failed; the others go on.

    Raises DeployError, which ends the whole run, for faults in what people wrote.
    """
    try:
        goal = _goal(host)
        wanted = () if goal.action == ROLLBACK else _wanted(host.state.inventory, library, goal.profile)[host.name]
    except KernelswapError as error:
        raise DeployError(f"\n{error}") from None
    # A way back must not depend on what the profiles say today.
    instances = [w.spec.instance for w in wanted] or list(instances_of(_data(host)))
    users = {w.spec.user for w in wanted}
    state = host_state.read(host, instances, sorted(users), gpus=any(needs_pins(w.spec) for w in wanted))
    if state is None:
        return HostPlan()
    key = Hidden(state.key or secrets.token_hex(32))
    refused = {w.spec.instance: decide.unpinned(w.spec, state) for w in wanted}
    try:
        specs = [(w, pin(w.spec, state.gpus)) for w in wanted if not refused.get(w.spec.instance)]
        releases = {spec.instance: render(spec, w.secrets, key.reveal(), templates) for w, spec in specs}
        setup = lacking(instances, users, state, key, templates)
        monitoring = monitoring_of(_data(host), state, templates)
    except KernelswapError as error:
        raise DeployError(f"\n{error}") from None
    decisions = [refused.get(name) or _decide(goal, name, releases.get(name), state) for name in instances]
    for decision in decisions:
        _show(host, decision, releases.get(decision.instance), state)
    if any(isinstance(decision, Refused) for decision in decisions):
        agent.give_up(host)
        return HostPlan()
    return HostPlan(
        setup,
        monitoring,
        tuple(_step(host.name, goal, decision, releases.get(decision.instance)) for decision in decisions),
        root.arguments(host),
    )


def _goal(host: Host) -> Goal:
    """--profile stands above every host's declared profile, so it is looked for in what the command line gave only."""
    asked = {name: host.data.get(name) for name in ("rollback", "reason", "force", "adopt", "verify")}
    override: Mapping[str, object] = host.state.inventory.get_override_data()  # type: ignore[no-untyped-call]
    asked["profile"] = override.get("profile")
    return goal_of({name: value for name, value in asked.items() if value is not None})


@cache
def _wanted(inventory: Inventory, library: Path, profile: str | None) -> dict[str, tuple[Wanted, ...]]:
    """Every host's servers. Raises ConfigError with the faults of all of them, so that people see them at once."""
    models_and_profiles = load_library(library)
    if profile is not None and profile not in models_and_profiles.profiles:
        todo = nearest(profile, models_and_profiles.profiles)
        raise ConfigError([Fault("--profile", f"there is no profile `{profile}`", todo)])
    servers: dict[str, tuple[Wanted, ...]] = {}
    faults: list[Fault] = []
    for host in inventory:
        if not inventory.state.is_host_in_limit(host):
            continue
        try:
            specs = host_specs(models_and_profiles, _data(host), f"host {host.name}", profile)
            servers[host.name] = tuple(
                Wanted(spec, resolve_secrets(spec, os.environ, f"host {host.name}: ")) for spec in specs
            )
        except ConfigError as error:
            faults += error.faults
    notes = dict.fromkeys(note for wanted in servers.values() for each in wanted for note in each.spec.notes)
    faults += [note.fault for note in notes if note.blocks == ALWAYS]
    if faults:
        raise ConfigError(faults)
    for note in notes:
        logger.warning(f"warning: {note.fault}")
    return servers


def _data(host: Host) -> dict[str, Any]:
    data: dict[str, Any] = host.data.dict()  # type: ignore[no-untyped-call]
    return data


def _decide(goal: Goal, instance: str, release: Release | None, state: HostState) -> Decision:
    if release is None:
        return decide.roll_back(decide.instance_state(state, instance))
    return decide.converge(goal, release, state)


def _step(host: str, goal: Goal, decision: Decision, release: Release | None) -> Step:
    stage = decision.stage if isinstance(decision, Swap | Unchanged) else ()
    request = None
    if isinstance(decision, Swap | Attach):
        request = decide.request_of(decision, goal, _new_swap_id(), _who(), host, _command())
    return Step(decision.instance, release, stage, request)


def _new_swap_id() -> str:
    """Sorts by time, and is unique: 20261130T023000Z-ab12."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def _who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _command() -> str:
    """What was typed, for people to type again."""
    return shlex.join(hide_secrets([Path(sys.argv[0]).name, *sys.argv[1:]]))


def lacking(
    instances: Collection[str], users: Collection[str], state: HostState, key: Hidden, templates: Path
) -> Setup:
    """What a host needs before it can swap and does not have."""
    agent, recover_unit = bundle.build(), _unit_text(templates, RECOVER_UNIT)
    # An agent at work keeps its file until the swap is over; the next run replaces it.
    at_work = any(item.running and item.running.active for item in state.instances)
    return Setup(
        users=tuple(sorted(set(users) - set(state.users))),
        key=None if state.key else key,
        agent=None if at_work or state.agent == agent.sha256 else agent.content,
        recover_unit=None if state.recover_unit == decide.digest(recover_unit) else recover_unit,
        recover=tuple(name for name in instances if name not in state.recover_enabled),
    )


def monitoring_of(data: Mapping[str, Any], state: HostState, templates: Path) -> Monitoring | None:
    """What is to be done about a host's metrics; None if nothing."""
    folder = str(data.get("metrics") or "")
    units = {name: _unit_text(templates, name) for name in DRIFT_UNITS} if folder else {}
    wanted = decide.digest("".join(units.values())) if units else ""
    left = state.metrics if state.metrics != folder else ""
    return None if (state.metrics, state.drift_units) == (folder, wanted) else Monitoring(folder, left, units)


def _unit_text(templates: Path, name: str) -> str:
    template = (templates / f"{name}.j2").read_text(encoding="utf-8")
    values = {"python": agent.PYTHON, "agent": AGENT_PATH, "state_root": STATE_ROOT, "metrics_link": METRICS_LINK}
    text: str = jinja2.Template(template, undefined=jinja2.StrictUndefined, keep_trailing_newline=True).render(values)
    return text


def _show(host: Host, decision: Decision, release: Release | None, state: HostState) -> None:
    if isinstance(decision, Refused):
        host.log_styled(f"{decision.instance}: refused: {decision.why}", fg="red", log_func=logger.error)
        host.log(f"{decision.instance}: {decision.todo}", log_func=logger.error)
        return
    host.log(f"{decision.instance}: {_verb(decision)}: {decision.why}")
    if failure := decide.last_failure(decide.instance_state(state, decision.instance)):
        host.log(f"{decision.instance}:   {failure}")
    for line in _details(decision, release, state) if release else ():
        host.log(f"{decision.instance}:   {line}")


def _verb(decision: Swap | Attach | Unchanged) -> str:
    if isinstance(decision, Unchanged):
        return "unchanged"
    if isinstance(decision, Attach):
        return "follow"
    return "roll back" if decision.action == ROLLBACK else "swap"


def _details(decision: Swap | Attach | Unchanged, release: Release, state: HostState) -> Iterator[str]:
    current = decide.instance_state(state, decision.instance)
    changes = compare(of_plan(current.plan), of_plan(release.plan)) if current.plan else ()
    limits = [change.line for change in changes if change.section == LIMITS]
    if isinstance(decision, Swap):
        others = [change.line for change in changes if change.section != LIMITS]
        yield from others
        if not others and current.plan and current.known_good != release.name:
            yield "the unit's text or a secret's value"
        yield from limits
    if isinstance(decision, Unchanged):
        for name in decision.stage:
            yield f"{name} is renewed without a restart"
        if PLAN_FILE in decision.stage:
            yield from limits
