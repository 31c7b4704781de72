"""What the inventory declares against what hosts say of themselves, and the same finding of many hosts in one. Pure,
except for reading secrets and templates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelswap import bundle, decide
from kernelswap.differences import LIMITS, compare, of_plan
from kernelswap.errors import ConfigError
from kernelswap.fleet import Seen
from kernelswap.host_setup import MEMBER_UNIT, RECOVER_UNIT, lacking, monitoring_of
from kernelswap.protocol import (
    AGENT_PATH,
    CONFIG_ROOT,
    KEY_PATH,
    METRICS_LINK,
    PLAN_FILE,
    TRAFFIC_FILE,
    Finding,
    HostDrift,
    HostState,
)
from kernelswap.render import Hidden, Release, preview, render, resolve_secrets, traffic_text
from kernelswap.seal import UNNAMED
from kernelswap.servers import ServerSpec, pin

DEPLOY = "run the deploy"
SHOWN = 300  # characters of a value


def findings(
    seen: Seen[HostDrift], specs: Sequence[ServerSpec], templates: Path, environ: Mapping[str, str]
) -> tuple[Finding, ...]:
    """All in which a host is not what is declared and was committed. specs: its servers; environ: for their secrets."""
    if seen.state is None:
        why = f"unreachable: {seen.problem or 'no answer'}"
        return (Finding("unreachable", "the host", "an answer", why, "see whether SSH reaches it", unknown=True),)
    found = list(seen.state.findings)
    told = {(finding.instance, finding.where) for finding in found}
    # While a swap is at an instance, what is declared is not to be found there.
    swapping = {finding.instance for finding in found if finding.kind == "swap"}
    for spec in specs:
        if spec.instance not in swapping:
            own = _declared(spec, seen.host, seen.state.state, templates, environ)
            found += [finding for finding in own if (finding.instance, finding.where) not in told]
    found += _setup(seen, specs, templates)
    return tuple(sorted(found, key=lambda finding: (finding.unknown, finding.instance, finding.kind, finding.where)))


def _declared(
    spec: ServerSpec, host: str, state: HostState, templates: Path, environ: Mapping[str, str]
) -> Iterator[Finding]:
    where = f"{CONFIG_ROOT}/{spec.instance}/known-good"
    if refused := decide.unpinned(spec, state):
        yield _unknown("release", where, f"{spec.model} with {spec.profile}", refused.why, refused.todo, spec.instance)
        return
    pinned = pin(spec, state.gpus)
    try:
        secrets = resolve_secrets(spec, environ, f"host {host}: ")
        why = f"{KEY_PATH} is not there" if secrets and not state.key else ""
    except ConfigError as error:
        secrets, why = {}, "; ".join(fault.what for fault in error.faults)
    if why:
        release = preview(pinned, templates)
        what = f"the declared values of {', '.join((*spec.secrets, *spec.traffic_secrets))}"
        todo = "give this command the secrets as the deploy"
        yield _unknown("secrets", f"{where}: secrets", what, why, todo, spec.instance)
    else:
        release = render(pinned, secrets, state.key, templates)
        if decide.is_news(traffic_text(spec, secrets), decide.instance_state(state, spec.instance), state.key):
            place, todo = f"{CONFIG_ROOT}/{spec.instance}/{TRAFFIC_FILE}", f"{DEPLOY}: it renews them without a restart"
            yield Finding("staged", place, "the declared routers, drain and hooks", "others", todo, spec.instance)
    yield from _release(release, state, where)


def _release(release: Release, state: HostState, where: str) -> Iterator[Finding]:
    """The declared release against the committed one. One that lacks its secrets is compared by all else."""
    instance = release.plan.instance
    known = decide.instance_state(state, instance)
    nameless = release.name == UNNAMED
    # Two hosts have other digests where they have other GPUs or secrets, and the same drift all the same.
    declared = f"{release.plan.model} with {release.plan.profile}"
    if known.known_good is None:
        yield Finding("release", where, declared, "nothing committed", DEPLOY, instance)
        return
    if known.plan is None:  # the host says so itself
        return
    changes = compare(of_plan(known.plan), of_plan(release.plan))
    server = [change.line for change in changes if change.section != LIMITS]
    if server if nameless else release.name != known.known_good:
        text = "; ".join(server) or "the unit's text or a secret's value"
        found = f"{known.plan.model} with {known.plan.profile}; to the declared one: {decide.shorten(text, SHOWN)}"
        detail = f"{known.known_good} -> {'?' if nameless else release.name}"
        yield Finding("release", where, declared, found, f"{DEPLOY}: it swaps", instance, detail)
        return
    staged = () if nameless else decide.missing_files(release, known)
    for file in staged:
        place = f"{CONFIG_ROOT}/{instance}/known-good/{file}"
        limits = "; ".join(change.line for change in changes if change.section == LIMITS) if file == PLAN_FILE else ""
        found = decide.shorten(limits, SHOWN) or "another text"
        expected = "as it is rendered today" if not limits else "the declared limits"
        yield Finding("staged", place, expected, found, f"{DEPLOY}: it renews the file without a restart", instance)


def _unknown(kind: str, where: str, expected: str, found: str, todo: str, instance: str) -> Finding:
    return Finding(kind, where, expected, found, todo, instance, unknown=True)


def _setup(seen: Seen[HostDrift], specs: Sequence[ServerSpec], templates: Path) -> Iterator[Finding]:
    """What of Kernelswap's own is missing on the host, or another's."""
    if seen.state is None:
        return
    state = seen.state.state
    names, users = [spec.instance for spec in specs], {spec.user for spec in specs}
    joined = {spec.instance for spec in specs if spec.traffic.routers}
    lacks = lacking(names, users, state, Hidden(""), templates, joined)
    for user in lacks.users:
        yield Finding("setup", f"user {user}", "there", "missing", DEPLOY)
    if lacks.key:
        yield Finding("setup", KEY_PATH, "the host's key", "missing", DEPLOY)
    if lacks.agent:
        found = "another version, or edited" if state.agent else "missing"
        yield Finding("setup", AGENT_PATH, f"the agent {bundle.build().digest[:12]}", found, DEPLOY)
    if lacks.recover_unit:
        found = "another text" if state.recover_unit else "missing"
        yield Finding("setup", f"/etc/systemd/system/{RECOVER_UNIT}", "as it is rendered today", found, DEPLOY)
    for name in lacks.recover:
        unit = RECOVER_UNIT.replace("@", f"@{name}")
        yield Finding("setup", unit, "enabled, to close a swap that a reboot cut short", "not enabled", DEPLOY, name)
    if lacks.member_unit:
        found = "another text" if state.member_unit else "missing"
        yield Finding("setup", f"/etc/systemd/system/{MEMBER_UNIT}", "as it is rendered today", found, DEPLOY)
    for name in lacks.members:
        unit, found = MEMBER_UNIT.replace("@", f"@{name}"), decide.instance_state(state, name).member or "missing"
        yield Finding("setup", unit, "active, to keep the instance in its routers", found, DEPLOY, name)
    if wanted := monitoring_of(seen.data, state, templates):
        expected = f"metrics go to {wanted.folder}, and the drift timer runs" if wanted.folder else "no metrics"
        found = f"they go to {state.metrics or 'nowhere'}" + ("" if state.drift_units else ", without the timer")
        yield Finding("setup", METRICS_LINK, expected, found, DEPLOY)


# Many hosts.


@dataclass(frozen=True)
class Group:
    """One finding and the hosts that have it; what differs from host to host is told of a single one only."""

    hosts: tuple[str, ...]
    finding: Finding


def grouped(found: Mapping[str, Sequence[Finding]]) -> tuple[Group, ...]:
    """Each finding once, the ones of most hosts first; else in the order of the hosts."""
    hosts: dict[Finding, list[str]] = {}
    details: dict[Finding, Finding] = {}
    for host, each in found.items():
        for finding in each:
            bare = dataclasses.replace(finding, detail="")
            details[bare] = finding
            if host not in hosts.setdefault(bare, []):
                hosts[bare].append(host)
    groups = (Group(tuple(names), details[bare] if len(names) == 1 else bare) for bare, names in hosts.items())
    return tuple(sorted(groups, key=lambda group: (group.finding.unknown, -len(group.hosts))))
