"""What to do about one instance of a host: the goal, the release and what was seen go in, a decision comes out."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime

from kernelswap import ledger
from kernelswap.goal import CONVERGE, ROLLBACK, Goal
from kernelswap.protocol import HostState, InstanceState, Plan, Report, Request, Running, Server, keyed_digest
from kernelswap.render import NO_TRAFFIC, Hidden, Release
from kernelswap.seal import SECRETS_FILE
from kernelswap.servers import ServerSpec, needs_pins


@dataclass(frozen=True)
class Unchanged:
    """Nothing to swap. stage: files of the release to put back or renew, without a restart."""

    instance: str
    why: str
    stage: tuple[str, ...] = ()


@dataclass(frozen=True)
class Swap:
    """A swap to `release`. stage: what of it the host lacks."""

    instance: str
    action: str
    release: str
    why: str
    stage: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attach:
    """The same swap is running already: follow it."""

    instance: str
    action: str
    release: str
    why: str


@dataclass(frozen=True)
class Refused:
    """Not done, and nothing was touched. todo: what to type or do next."""

    instance: str
    why: str
    todo: str


Decision = Unchanged | Swap | Attach | Refused


def instance_state(state: HostState, instance: str) -> InstanceState:
    """What is known of an instance; an empty state if the host has never heard of it."""
    return next((item for item in state.instances if item.instance == instance), InstanceState(instance))


def converge(goal: Goal, release: Release, state: HostState) -> Decision:
    """How to get from what a host serves to `release`."""
    seen = instance_state(state, release.plan.instance)
    stage = missing_files(release, seen)
    swap = Swap(seen.instance, CONVERGE, release.name, _why(seen, release.name), stage)
    if seen.running:
        return _beside(seen.instance, seen.running, CONVERGE, release.name) if seen.running.active else swap
    if serves(seen, release.name):
        why = f"{release.name} serves since {when(seen.unit_since)}{_committed_by(seen, release.name)}"
        return Unchanged(seen.instance, why, stage)
    strays = [server for server in state.servers if _in_the_way(server, release.plan)]
    if strays and not goal.adopt:
        return Refused(seen.instance, "servers that no systemd unit owns run here: " + _list(strays), STRAYS_TODO)
    if release.name in seen.barred and not goal.force:
        return _barred(seen, release.name)
    return swap


def unpinned(spec: ServerSpec, state: HostState) -> Refused | None:
    """Why the GPUs that a server names by index cannot be pinned by UUID; None if they can, or need not be."""
    if not needs_pins(spec):
        return None
    if state.gpu_error:
        todo = "repair the driver; UUIDs in `gpus:` need no look at it"
        return Refused(spec.instance, f"which GPUs {', '.join(spec.gpus)} are is unknown: {state.gpu_error}", todo)
    from kernelswap.agent import gpus  # few need it, and it loads much of the agent

    # Whether they can be used is for the agent to say; here it is enough to know them.
    seen = [dataclasses.replace(gpu, error="" if gpu.uuid else gpu.error) for gpu in state.gpus]
    faults = gpus.faults(seen, spec.gpus)
    if not faults:
        return None
    return Refused(spec.instance, "; ".join(fault.what for fault in faults), "; ".join(fault.todo for fault in faults))


def roll_back(seen: InstanceState) -> Decision:
    """How to get to the commit before the current one; out of a swap that was cut short, to the current one."""
    if seen.running and not seen.running.active and seen.known_good:
        return Swap(seen.instance, ROLLBACK, seen.known_good, _why(seen, seen.known_good))
    if seen.running and seen.running.active:
        return _beside(seen.instance, seen.running, ROLLBACK, seen.rollback_target)
    if seen.rollback_target is None:
        return Refused(seen.instance, _no_target(seen), "name a profile instead: --profile NAME")
    return Swap(seen.instance, ROLLBACK, seen.rollback_target, _why(seen, seen.rollback_target))


def serves(seen: InstanceState, release: str) -> bool:
    """Whether the committed release is this one, and its unit is up and just as it was committed."""
    return seen.known_good == release and seen.unit_state == "active" and seen.unit_intact


def missing_files(release: Release, seen: InstanceState) -> tuple[str, ...]:
    """Names of the release's files that the host lacks or has with another content."""
    there = seen.releases.get(release.name, {})
    names = [name for name, text in release.files.items() if there.get(name) != digest(text)]
    if release.secrets is not None and SECRETS_FILE not in there:
        names.append(SECRETS_FILE)
    return tuple(sorted(names))


def is_news(traffic: Hidden, seen: InstanceState, key: str) -> bool:
    """Whether a host does not know where an instance's users come from. key: the host's, see protocol.KEY_PATH."""
    return bool(seen.traffic or traffic != NO_TRAFFIC) and seen.traffic != keyed_digest(key, traffic.reveal())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _why(seen: InstanceState, release: str) -> str:
    if seen.running:
        return f"swap {seen.running.request.swap} was cut short at {seen.running.step}; it is closed first"
    if seen.known_good is None:
        return f"nothing committed yet -> {release}"
    if seen.known_good != release:
        return f"{seen.known_good} -> {release}"
    if seen.unit_state != "active":
        return f"{release} is committed, but its unit is {seen.unit_state}"
    return f"{release} is committed, but its unit is not as it was committed"


def _beside(instance: str, running: Running, action: str, release: str | None) -> Decision:
    request = running.request
    text = f"{request.action} to {request.release} by {request.who} since {when(running.since)}, at {running.step}"
    if release is not None and (request.action, request.release) == (action, release):
        return Attach(instance, action, release, f"already running: {text}")
    return Refused(instance, f"another swap is running: {text}", "wait for its end, see `kernelswap status`")


def _barred(seen: InstanceState, release: str) -> Refused:
    report = next((r for r in reversed(seen.history) if r.request.release == release and r.bars), None)
    if report is None:
        return Refused(seen.instance, f"{release} is barred: it failed long ago", "try it again all the same: --force")
    todo = _advice(report) + "try it again all the same: --force"
    return Refused(seen.instance, f"{release} is barred: {_end(report)}", todo)


def last_failure(seen: InstanceState) -> str:
    """How the newest swap ended if it was no success: who asked for it may not have seen that. Else ""."""
    report = seen.history[-1] if seen.history else None
    if report is None or report.outcome in ("committed", "unchanged") or seen.running:
        return ""
    return f"last time, to {report.request.release}: {_end(report)}"


def _committed_by(seen: InstanceState, release: str) -> str:
    report = next((r for r in reversed(seen.history) if r.outcome == "committed"), None)
    if report is None or report.request.release != release:
        return ""
    return f", committed by swap {report.request.swap} of {report.request.who}"


def _end(report: Report) -> str:
    request = report.request
    return f"swap {request.swap} by {request.who} ended {when(report.ended)} as {report.outcome}: {_cause(report)}"


def _cause(report: Report) -> str:
    return report.cause.what if report.cause else report.detail or "no cause was found"


def _advice(report: Report) -> str:
    return f"{report.cause.todo}; or " if report.cause and report.cause.todo else ""


def _no_target(seen: InstanceState) -> str:
    below = list(dict.fromkeys(name for name in ledger.commits(seen.history) if name != seen.known_good))
    if not below:
        return f"nothing to go back to: {seen.known_good or 'nothing'} is the only commit of this host"
    verb = "is" if len(below) == 1 else "are"
    return f"nothing to go back to: {', '.join(below)} {verb} barred or no longer on the host"


STRAYS_TODO = "stop them, or let this swap take them over and bring them back if it fails: --adopt"


def _in_the_way(server: Server, plan: Plan) -> bool:
    """A server of no unit on the instance's port. Which of the others are on its GPUs, the agent finds out."""
    return server.unit is None and server.port == plan.port


def _list(servers: list[Server]) -> str:
    return "; ".join(
        f"pid {s.pid} of {s.user}{f' in {s.container}' if s.container else ''} since {when(s.started)}: "
        f"{shorten(shlex.join(s.argv), 120)}"
        for s in servers
    )


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def when(at: float | None) -> str:
    return "?" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def way_back(request: Request, seen: InstanceState) -> Request | None:
    """What undoes a request once it was committed; None where nothing else was committed before."""
    if seen.known_good in (None, request.release):
        return None
    return dataclasses.replace(request, action=ROLLBACK, release=seen.known_good, force=False, adopt=False, verify="")


def expected(seen: InstanceState, release: str) -> float | None:
    """Seconds that a swap to `release` may take: as the last one to it took, else as the last one to any."""
    commits = [report for report in seen.history if report.outcome == "committed"]
    same = [report for report in commits if report.request.release == release]
    last = (same or commits)[-1:]
    return last[0].ended - last[0].started if last else None


def request_of(decision: Swap | Attach, goal: Goal, who: str, host: str, command: str) -> Request:
    """The wire form of a decision. It gets its id when it begins."""
    return Request(
        swap="",
        instance=decision.instance,
        action=decision.action,
        release=decision.release,
        who=who,
        reason=goal.reason,
        force=goal.force,
        adopt=goal.adopt,
        host=host,
        command=command,
        verify=goal.verify,
    )
