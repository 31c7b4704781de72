"""From an inventory to what must be done on each host: read all, decide, show the plan; nothing is changed."""

from __future__ import annotations

import getpass
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import gevent  # type: ignore[import-untyped]
from gevent.event import AsyncResult  # type: ignore[import-untyped]
from gevent.pool import Pool  # type: ignore[import-untyped]
from pyinfra import logger
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.state import State
from pyinfra.context import ctx_config, ctx_host

from kernelswap import decide, rollout, root
from kernelswap.agent.redaction import hide_secrets
from kernelswap.decide import Attach, Decision, Refused, Swap, Unchanged
from kernelswap.differences import LIMITS, compare, of_plan
from kernelswap.errors import ConfigError, Fault, KernelswapError
from kernelswap.facts import agent, host_state
from kernelswap.fleet import PATIENCE, data_of, instances_of
from kernelswap.goal import ROLLBACK, Goal, goal_of
from kernelswap.host_setup import Monitoring, Setup, lacking, monitoring_of
from kernelswap.operations.swap import Turn
from kernelswap.operations.turns import Turns
from kernelswap.protocol import PLAN_FILE, HostState, InstanceState
from kernelswap.render import Hidden, Release, render, resolve_secrets, traffic_text
from kernelswap.rollout import Move, Rollout
from kernelswap.servers import ALWAYS, ServerSpec, is_router_only, needs_pins, pin


@dataclass(frozen=True)
class Step:
    """What is put on the host for one instance. stage: which of the release's files; traffic: where its users come
    from, if the host does not know that yet."""

    instance: str
    release: Release | None = None
    stage: tuple[str, ...] = ()
    traffic: Hidden | None = None


@dataclass(frozen=True)
class HostPlan:
    """Everything a deploy does on one host. Empty where nothing is to be done or the host was refused.

    monitoring: None where it is as it should be; turn: the swaps, if there are any, and when; root: arguments for all
    of it, see root.py.
    """

    setup: Setup = field(default_factory=Setup)
    monitoring: Monitoring | None = None
    steps: tuple[Step, ...] = ()
    turn: Turn | None = None
    root: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """One server as the inventory declares it, with the values of its secrets."""

    spec: ServerSpec
    secrets: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Wanted({self.spec.instance})"


@dataclass(frozen=True)
class Decided:
    """A host that could be read, and what follows from what was seen there, instance by instance."""

    host: Host
    goal: Goal
    state: HostState
    decisions: tuple[Decision, ...]
    releases: Mapping[str, Release]
    traffic: Mapping[str, Hidden]
    setup: Setup
    monitoring: Monitoring | None

    @property
    def refusals(self) -> tuple[Refused, ...]:
        return tuple(decision for decision in self.decisions if isinstance(decision, Refused))

    @property
    def swaps(self) -> tuple[Swap | Attach, ...]:
        return tuple(decision for decision in self.decisions if isinstance(decision, Swap | Attach))

    def seen(self, decision: Decision) -> InstanceState:
        return decide.instance_state(self.state, decision.instance)


_plans: dict[State, AsyncResult] = {}


def plan_host(host: Host, library: Path, templates: Path) -> HostPlan:
    """One host's part of the plan. The first that asks makes and shows it for all hosts of the run; the others wait.

    A host that cannot be read or must not be swapped is marked as failed. Raises DeployError, which ends the whole run,
    for faults in what people wrote, and where more hosts failed than the rollout allows before it begins.
    """
    made = _plans.get(host.state)
    if made is None:
        made = _plans[host.state] = AsyncResult()
        try:
            made.set(_plan(host.state, library, templates))
        except Exception as error:
            made.set(error)
    plans = made.get()
    if isinstance(plans, Exception):
        raise plans
    plan: HostPlan = plans.get(host.name, HostPlan())
    return replace(plan, root=root.arguments(host)) if plan != HostPlan() else plan


def _plan(state: State, library: Path, templates: Path) -> dict[str, HostPlan]:
    in_limit = [host for host in state.inventory if state.is_host_in_limit(host)]
    hosts = [host for host in in_limit if not is_router_only(data_of(host))]
    try:
        goals = {host.name: goal_of_host(host) for host in hosts}
        chosen, wanted = _declared(state.inventory, hosts, library, goals)
        decided = _decide_all(state, hosts, goals, wanted, templates)
    except KernelswapError as error:
        raise DeployError(f"\n{error}") from None
    mute = {host.name: "could not be reached or read" for host in hosts if host.name not in decided}
    refused = {name: "; ".join(r.why for r in d.refusals) for name, d in decided.items() if d.refusals}
    moves = {name: _move(d) for name, d in decided.items() if d.swaps and not d.refusals}
    waves = rollout.waves_of(chosen, moves)
    _show_all(decided, chosen, waves, moves, {**dict.fromkeys(decided, ""), **mute, **refused})
    # A server outside of the run may be a router's, too.
    if all(host in hosts or is_router_only(data_of(host)) for host in state.inventory) and "--serial" not in sys.argv:
        moving = {(name, swap.instance) for name in moves for swap in decided[name].swaps if isinstance(swap, Swap)}
        for line in rollout.outages(waves, _serving(decided, wanted), moving):
            logger.warning(f"warning: {line}")
    failed, ignored = (refused, mute) if chosen.unreachable == "skip" else ({**mute, **refused}, {})
    if moves and (why := chosen.stop(failed)):
        raise DeployError(f"\nnothing is started: {why}; {rollout.way_out(chosen, failed, mute)}")
    for name in refused:
        agent.give_up(decided[name].host)
    turns = Turns(state, chosen, hosts, waves, failed, ignored, _words())
    turns.attach()
    return {name: _host_plan(d, turns) for name, d in decided.items() if not d.refusals}


def _declared(
    inventory: Inventory, hosts: Sequence[Host], library: Path, goals: Mapping[str, Goal]
) -> tuple[Rollout, Mapping[str, tuple[Wanted, ...]]]:
    """What the inventory says of the rollout and of each host that is not only to go back. Raises ConfigError."""
    from kernelswap import rollout_file  # see _wanted

    faults: list[Fault] = []
    wanted: Mapping[str, tuple[Wanted, ...]] = {}
    try:
        # A way back must not depend on what the profiles say today.
        if forward := [goal for goal in goals.values() if goal.action != ROLLBACK]:
            wanted = _wanted(inventory, library, forward[0].profile)
    except ConfigError as error:
        faults += error.faults
    override: Mapping[str, object] = inventory.get_override_data()  # type: ignore[no-untyped-call]
    said = {"--data": override["rollout"]} if "rollout" in override else _rollouts(hosts)
    try:
        chosen = rollout_file.read(said, [host.name for host in inventory])
    except ConfigError as error:
        faults += error.faults
    if faults:
        raise ConfigError(faults)
    return chosen, {name: () if goals[name].action == ROLLBACK else wanted[name] for name in goals}


def _serving(decided: Mapping[str, Decided], wanted: Mapping[str, Sequence[Wanted]]) -> dict[str, set[tuple[str, str]]]:
    """The servers, each by host and instance, that serve the users of each router."""
    found: dict[str, set[tuple[str, str]]] = {}
    for name, each in decided.items():
        for spec in (w.spec for w in wanted[name]):
            if decide.instance_state(each.state, spec.instance).unit_state == "active":
                for router in spec.traffic.routers:
                    found.setdefault(router.url, set()).add((name, spec.instance))
    return found


def _rollouts(hosts: Sequence[Host]) -> dict[str, Any]:
    return {f"host {host.name}": host.data.get("rollout") for host in hosts}


def _decide_all(
    state: State,
    hosts: Sequence[Host],
    goals: Mapping[str, Goal],
    wanted: Mapping[str, tuple[Wanted, ...]],
    templates: Path,
) -> dict[str, Decided]:
    """All hosts that could be read, as many at a time as pyinfra may. Raises ConfigError."""
    config = ctx_config.get()  # type: ignore[no-untyped-call]
    states: dict[str, HostState | None] = {}

    def visit(host: Host) -> Exception | None:
        try:
            with ctx_config.use(config), ctx_host.use(host):
                states[host.name] = _read(host, wanted[host.name])
        except Exception as error:  # PyinfraError where no host is left
            return error
        return None

    pool = Pool(state.config.PARALLEL)
    visits = [pool.spawn(visit, host) for host in hosts if host.connected]
    gevent.joinall(visits)
    for error in filter(None, (each.value for each in visits)):
        raise error
    read = [(host, seen) for host in hosts if (seen := states.get(host.name))]
    return {h.name: _decide(h, goals[h.name], wanted[h.name], seen, templates) for h, seen in read}


def _read(host: Host, wanted: Sequence[Wanted]) -> HostState | None:
    users = sorted({w.spec.user for w in wanted})
    with_gpus = any(needs_pins(w.spec) for w in wanted)
    return host_state.read(host, _instances(host, wanted), users, gpus=with_gpus, timeout=PATIENCE)


def _instances(host: Host, wanted: Sequence[Wanted]) -> list[str]:
    return [w.spec.instance for w in wanted] or list(instances_of(data_of(host)))


def _decide(host: Host, goal: Goal, wanted: Sequence[Wanted], state: HostState, templates: Path) -> Decided:
    key = Hidden(state.key or secrets.token_hex(32))
    refused = {w.spec.instance: decide.unpinned(w.spec, state) for w in wanted}
    specs = [(w, pin(w.spec, state.gpus)) for w in wanted if not refused.get(w.spec.instance)]
    releases = {spec.instance: render(spec, w.secrets, key.reveal(), templates) for w, spec in specs}
    instances = _instances(host, wanted)
    decisions = [refused.get(name) or _decision(goal, name, releases.get(name), state) for name in instances]
    joined = {w.spec.instance for w in wanted if w.spec.traffic.routers}
    setup = lacking(instances, {w.spec.user for w in wanted}, state, key, templates, joined)
    monitoring = monitoring_of(data_of(host), state, templates)
    traffic = dict(_renewed_traffic(wanted, state, key))
    return Decided(host, goal, state, tuple(decisions), releases, traffic, setup, monitoring)


def _host_plan(decided: Decided, turns: Turns) -> HostPlan:
    steps = []
    for decision in decided.decisions:
        traffic = decided.traffic.get(decision.instance)
        if isinstance(decision, Swap | Unchanged) and (decision.stage or traffic):
            steps.append(Step(decision.instance, decided.releases.get(decision.instance), decision.stage, traffic))
    turn = _turn(decided, turns) if decided.swaps else None
    return HostPlan(decided.setup, decided.monitoring, tuple(steps), turn)


def _renewed_traffic(wanted: Sequence[Wanted], state: HostState, key: Hidden) -> Iterator[tuple[str, Hidden]]:
    """What the host does not know yet of where its users come from, by instance."""
    for each in wanted:
        text = traffic_text(each.spec, each.secrets)
        if decide.is_news(text, decide.instance_state(state, each.spec.instance), key.reveal()):
            yield each.spec.instance, text


def _turn(decided: Decided, turns: Turns) -> Turn:
    goal, name, command = decided.goal, decided.host.name, shlex.join(_words())
    requests = [decide.request_of(swap, goal, _who(), name, command) for swap in decided.swaps]
    pairs = zip(requests, decided.swaps, strict=True)
    back = [decide.way_back(request, decided.seen(swap)) for request, swap in pairs]
    return Turn(turns, tuple(requests), tuple(request for request in reversed(back) if request))


def goal_of_host(host: Host) -> Goal:
    """--profile stands above every host's declared profile, so it is looked for in what the command line gave only."""
    asked = {name: host.data.get(name) for name in ("rollback", "reason", "force", "adopt", "verify")}
    override: Mapping[str, object] = host.state.inventory.get_override_data()  # type: ignore[no-untyped-call]
    asked["profile"] = override.get("profile")
    return goal_of({name: value for name, value in asked.items() if value is not None})


@cache
def _wanted(inventory: Inventory, library: Path, profile: str | None) -> dict[str, tuple[Wanted, ...]]:
    """Every host's servers. Raises ConfigError with the faults of all of them, so that people see them at once."""
    # pydantic takes longer to load than all else of ours: only what reads people's files imports it, when it does.
    from kernelswap.library import load_library
    from kernelswap.spec import host_specs
    from kernelswap.wording import nearest

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
            specs = host_specs(models_and_profiles, data_of(host), f"host {host.name}", profile, host.name)
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


def _decision(goal: Goal, instance: str, release: Release | None, state: HostState) -> Decision:
    if release is None:
        return decide.roll_back(decide.instance_state(state, instance))
    return decide.converge(goal, release, state)


def _who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _words() -> list[str]:
    """What was typed, for people to type again."""
    return hide_secrets([Path(sys.argv[0]).name, *sys.argv[1:]])


def _move(decided: Decided) -> Move:
    times = [decide.expected(decided.seen(swap), swap.release) for swap in decided.swaps]
    return Move(
        what=tuple(_line(swap) for swap in decided.swaps),
        details=tuple(line for swap in decided.swaps for line in _details(decided, swap)),
        seconds=None if None in times else sum(filter(None, times)),
        follows=all(isinstance(swap, Attach) for swap in decided.swaps),
    )


def _show_all(
    decided: Mapping[str, Decided],
    chosen: Rollout,
    waves: Sequence[Sequence[str]],
    moves: Mapping[str, Move],
    hosts: Mapping[str, str],
) -> None:
    """Host by host what is refused or failed last time, and all of it where the run has one host; else by wave.

    hosts: all of the run, and why one of them cannot swap.
    """
    alone = len(hosts) == 1
    for each in decided.values():
        for decision in each.decisions:
            _show(each, decision, alone)
    if alone:
        return
    still = {name: _still(each) for name, each in decided.items() if name not in moves and not each.refusals}
    lines = [*rollout.plan_text(chosen, waves, moves, hosts), *rollout.still_text(still)]
    for line in lines:
        logger.info(line)


def _show(decided: Decided, decision: Decision, alone: bool) -> None:
    host, name = decided.host, decision.instance
    if isinstance(decision, Refused):
        host.log_styled(f"{name}: refused: {decision.why}", fg="red", log_func=logger.error)
        host.log(f"{name}: {decision.todo}", log_func=logger.error)
        return
    if alone:
        host.log(_line(decision))
    elif isinstance(decision, Unchanged):
        host.noop(_line(decision))
    if failure := decide.last_failure(decided.seen(decision)):
        host.log(f"{name}:   {failure}")
    for line in _details(decided, decision) if alone else ():
        host.log(line)
    if alone and not isinstance(decision, Unchanged):
        host.log(f"{name}:   expected: {rollout.about(decide.expected(decided.seen(decision), decision.release))}")


def _still(decided: Decided) -> Move:
    """A host on which nothing swaps. Since when and by whom its release serves would make each a line of its own."""
    known_good = [(d.instance, decided.seen(d).known_good) for d in decided.decisions]
    what = tuple(f"{instance}: unchanged: {release}" for instance, release in known_good)
    return Move(what, tuple(line for decision in decided.decisions for line in _details(decided, decision)))


def _line(decision: Swap | Attach | Unchanged) -> str:
    return f"{decision.instance}: {_verb(decision)}: {decision.why}"


def _verb(decision: Swap | Attach | Unchanged) -> str:
    if isinstance(decision, Unchanged):
        return "unchanged"
    if isinstance(decision, Attach):
        return "follow"
    return "roll back" if decision.action == ROLLBACK else "swap"


def _details(decided: Decided, decision: Decision) -> Iterator[str]:
    release = decided.releases.get(decision.instance)
    for line in _changes(decision, release, decided.seen(decision)) if release else ():
        yield f"{decision.instance}:   {line}"
    if decision.instance in decided.traffic:
        yield f"{decision.instance}:   routers, drain and hooks are renewed without a restart"


def _changes(decision: Decision, release: Release, current: InstanceState) -> Iterator[str]:
    if isinstance(decision, Unchanged) and not decision.stage:
        return
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
