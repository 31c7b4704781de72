"""Whether a host still is what was committed: its files, its unit, its server, and what else could start one.

What is seen is gathered first, secrets included, and never leaves the host; the judges are pure and take secrets out.
Nothing is changed. Another thing is agent/verify/drift.py, which compares answers.
"""

from __future__ import annotations

import contextlib
import difflib
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from kernelswap import seal
from kernelswap.agent import (
    client,
    clock,
    engine,
    files,
    gpus,
    host,
    inspection,
    processes,
    releases,
    start_paths,
    units,
)
from kernelswap.agent.client import Client, Unanswered
from kernelswap.agent.host import Folders
from kernelswap.agent.redaction import hide_secrets, redact
from kernelswap.agent.running import running
from kernelswap.agent.served import DRAWN, served
from kernelswap.agent.start_paths import StartPath
from kernelswap.agent.units import UnitStatus
from kernelswap.measured import INSTALLED_FILE, Installed
from kernelswap.protocol import (
    CONFIG_ROOT,
    KEY_PATH,
    PLAN_FILE,
    Finding,
    Gpu,
    HostDrift,
    Plan,
    Resolved,
    Server,
    unit_name,
)
from kernelswap.seal import SECRETS_FILE

SHOWN = 300  # characters of a value
DEPLOY = "run the deploy again"
VENDOR = ("/usr/lib/systemd/", "/lib/systemd/")
SETTLED = 2.0  # seconds by which the times of files and reports of one commit may differ


def look(instances: Sequence[str], users: Sequence[str]) -> HostDrift:
    """All that is to be seen of a host. instances: those that the inventory has."""
    state = inspection.inspect(instances, users, health=False, with_gpus=True)
    there = sorted({*instances, *on_host()})
    findings = [found for name in there for found in _instance(Folders(name), state.gpus, state.gpu_error)]
    findings += [undeclared(name) for name in there if name not in instances and host.known_good(Folders(name))]
    ports = {plan.port: name for name in there if (plan := _committed(Folders(name)))}
    ours = {unit_name(name) for name in there}
    findings += servers([server for server in state.servers if server.unit not in ours], ports)
    ways = start_paths.look(ours)
    findings += [way(path, ports) for path in ways.paths]
    findings += [blind("start-paths", place, why) for place, why in ways.unknown]
    return HostDrift(state, tuple(findings), ways.looked)


def on_host() -> List[str]:
    """The instances that a host has ever had a release of."""
    return sorted(path.parent.name for path in Path(CONFIG_ROOT).glob("*/releases") if path.is_dir())


def _committed(folders: Folders) -> Optional[Plan]:
    return host.plan_or_none(folders, host.known_good(folders))


def blind(kind: str, where: str, why: str, instance: str = "", todo: str = "look at it by hand") -> Finding:
    """What could not be told."""
    return Finding(kind, where, "to be told", why, todo, instance, unknown=True)


def undeclared(instance: str) -> Finding:
    where = f"{CONFIG_ROOT}/{instance}"
    todo = f"declare it, or disable {unit_name(instance)} and remove {where}"
    return Finding("undeclared", where, "no such instance in the inventory", "a committed release", todo, instance)


# One instance.


@dataclass(frozen=True)
class Staged:
    """A release's files as they lie there. texts: those that decide how the server runs; None is missing or unreadable.
    plan: None where plan.json cannot be read. open: its secrets may be read by others than root."""

    name: str
    folder: str
    texts: Mapping[str, Optional[str]]
    plan: Optional[Plan]
    digests: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    open: bool = False


@dataclass(frozen=True)
class UnitFiles:
    """A unit as it lies on the disk and as systemd has it. text: of its file, None where there is none. masks: links to
    nothing that keep it from starting. dropins: files laid over it, path -> text; changed: path -> when, epoch seconds.
    """

    path: str
    text: Optional[str]
    status: UnitStatus
    masks: Tuple[str, ...] = ()
    dropins: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Live:
    """The main process of an instance's unit. environment: less what systemd adds, and GPUs by UUID as in the plan."""

    pid: int
    started: float
    argv: Tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


def _instance(folders: Folders, present: Sequence[Gpu], gpu_error: str) -> Iterator[Finding]:
    swap = running(folders)
    name, release = folders.instance, host.known_good(folders)
    if swap:
        yield swapping(name, swap.request.swap, swap.request.who, swap.step, swap.active)
        return
    if release is None:
        return
    key = (files.read(folders.root / KEY_PATH.lstrip("/")) or "").strip()
    for each in host.staged(folders):
        # By the link's name, which is the same on every host.
        place = folders.known_good if each == release else folders.release(each)
        yield from staged(_staged(folders, each, place), name, key)
    plan = _committed(folders)
    if plan is None:
        where = str(folders.known_good / PLAN_FILE)
        yield Finding("staged", where, "the plan of the known-good", "cannot be read", DEPLOY, name)
        return
    secrets = host.secrets(folders, release)
    status = units.status(folders.unit)
    live = _live(folders, plan, status)
    ended = max((report.ended for report in host.history(folders)), default=0.0)
    wanted = files.read(folders.release(release) / folders.unit)
    seen = _unit(folders, status)
    yield from unit(seen, wanted, live, ended, name, list(secrets.values()))
    yield from port(plan, _strangers(plan), name)
    if live is None:
        return
    yield from process(live, plan, name, list(secrets.values()))
    yield from _answers(folders, plan, secrets)
    yield from _installed(folders, plan, present, gpu_error)


def _staged(folders: Folders, name: str, folder: Path) -> Staged:
    plan = host.plan_or_none(folders, name)
    names = sorted({folders.unit, *(plan.digests if plan else ())})
    secret = folder / SECRETS_FILE
    return Staged(
        name=name,
        folder=str(folder),
        texts={each: _text(folder / each) for each in names},
        plan=plan,
        digests={each: host.digest(folder / each) for each in names},
        secrets=host.secrets(folders, name),
        open=secret.exists() and bool(secret.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) or secret.stat().st_uid),
    )


def _text(path: Path) -> Optional[str]:
    try:
        return files.read(path)
    except OSError:
        return None


def _unit(folders: Folders, status: UnitStatus) -> UnitFiles:
    places = start_paths.known()["units"]["system"]
    found = [folders.root / place / folders.unit for place in places]
    over = {path for place in places for path in (folders.root / place / f"{folders.unit}.d").glob("*.conf")}
    over |= {Path(path) for path in status.overrides if not path.startswith(VENDOR)}
    paths = [path for path in (folders.committed_unit, *over) if path.exists()]
    return UnitFiles(
        path=str(folders.committed_unit),
        text=None if folders.committed_unit.is_symlink() else _text(folders.committed_unit),
        status=status,
        masks=tuple(str(path) for path in found if path.is_symlink() and str(path.readlink()) == "/dev/null"),
        dropins={str(path): _text(path) or "" for path in sorted(over)},
        changed={str(path): path.stat().st_mtime for path in paths},
    )


def _live(folders: Folders, plan: Plan, status: UnitStatus) -> Optional[Live]:
    found = processes.table().get(status.main_pid)
    if found is None or found.ended:
        return None
    environment: Dict[str, str] = {}
    with contextlib.suppress(OSError):
        environment = releases.own_environment(processes.environment(found.pid), folders, plan)
    return Live(found.pid, processes.started_at(found), found.argv, environment)


def _strangers(plan: Plan) -> List[str]:
    """Who else listens on an instance's port."""
    table = processes.table()
    own = processes.cgroup_pids(table, plan.unit)
    return [
        processes.describe(table[pid]) if pid in table else "a process that is not to be seen from here"
        for pid in processes.listeners(plan.port)
        if pid not in own
    ]


def _answers(folders: Folders, plan: Plan, secrets: Mapping[str, str]) -> Iterator[Finding]:
    """What the server says of itself, against what it said when it was committed."""
    url, name = client.base_url(plan), folders.instance
    where = f"{url}/server_info"
    known = host.resolved(folders, plan.release)
    if known is None:
        yield blind("resolved", where, "what SGLang had resolved at the commit was not kept", name, "swap once more")
        return
    try:
        info = Client(url, plan.served_name, secrets.get("api-key", "")).server_info()
    except Unanswered as error:
        yield blind("resolved", where, redact(str(error), list(secrets.values())), name, "see `kernelswap status`")
        return
    yield from resolved(known, served(info, plan.release, list(secrets.values()), known), where, name)


def _installed(folders: Folders, plan: Plan, present: Sequence[Gpu], gpu_error: str) -> Iterator[Finding]:
    name = folders.instance
    needs = plan.flags.get("device") != "cpu"
    if needs and gpu_error:
        yield blind("gpus", "NVML", gpu_error, name, "repair the driver")
        return
    then = host.measured(folders, plan.release, INSTALLED_FILE, Installed)
    if then is None:
        why = "what the release was verified on was not kept"
        yield blind("engine", plan.python, why, name, "swap once more")
        return
    now = engine.installed(plan, gpus.assigned(present, plan.gpus) if needs else ())
    yield from installed(then, now, plan, name)


# The judges.


def swapping(instance: str, swap: str, who: str, step: str, active: bool) -> Finding:
    where = f"swap {swap} of {who}"
    if active:
        return blind("swap", where, f"it runs, at {step}", instance, "look again when it has ended")
    return Finding("swap", where, "ended", f"cut short at {step}", f"{DEPLOY}: it is closed first", instance)


def staged(seen: Staged, instance: str, key: str) -> Iterator[Finding]:
    """Whether a staged release is as it was rendered: by its plan, and by its name, which is a digest of it all."""
    if seen.plan is None:
        where = f"{seen.folder}/{PLAN_FILE}"
        yield Finding("staged", where, "the plan of the release", "cannot be read", _renew(where), instance, seen.name)
        return
    faults = [
        Finding("staged", f"{seen.folder}/{each}", "as it was rendered for the release",
                "gone" if seen.texts[each] is None else "edited", _renew(f"{seen.folder}/{each}"), instance, seen.name)
        for each, digest in sorted(seen.plan.digests.items()) if seen.digests.get(each) != digest
    ]  # fmt: skip
    yield from faults
    where = f"{seen.folder}/{SECRETS_FILE}"
    missing = sorted(set(seen.plan.secret_flags) - set(seen.secrets))
    if missing:
        yield Finding("secrets", where, f"the secrets {', '.join(missing)}", "gone", _renew(where), instance)
    if seen.open:
        yield Finding("secrets", where, "mode 0600 and owner root", "open to others", f"chmod 600 {where}", instance)
    texts = {name: text for name, text in seen.texts.items() if text is not None}
    if faults or missing or len(texts) < len(seen.texts) or seal.is_whole(seen.name, texts, seen.secrets, key):
        return
    if seen.plan.secret_flags or seen.secrets:
        found = "other secrets, or another host's key"
        todo = _renew(where)
        yield Finding("secrets", where, "those that the release was made with", found, todo, instance, seen.name)
    else:
        found = "a unit and a plan that were edited together"
        yield Finding(
            "staged", seen.folder, "as it was rendered", found, _renew(f"{seen.folder}/*"), instance, seen.name
        )


def _renew(path: str) -> str:
    return f"remove {path} and {DEPLOY}"


def unit(
    seen: UnitFiles,
    wanted: Optional[str],
    live: Optional[Live],
    ended: float,
    instance: str,
    secrets: Sequence[str] = (),
) -> Iterator[Finding]:
    """Whether a unit is as it was committed and in force. ended: when the last swap did, epoch seconds."""
    status, name = seen.status, Path(seen.path).name
    for path in seen.masks:
        yield Finding("masked", path, f"{name} may start", "masked", f"ask who did it, then remove {path}", instance)
    if seen.text is None and seen.path not in seen.masks:
        yield Finding("unit", seen.path, "the committed unit", "no file", DEPLOY, instance)
    elif wanted is not None and seen.text is not None and seen.text != wanted:
        expected, found = _lines(wanted, seen.text, secrets)
        yield Finding("unit", seen.path, expected, found, DEPLOY, instance, _force(seen, seen.path, live))
    elif live and seen.changed.get(seen.path, 0.0) > max(live.started, ended) + SETTLED:
        found = "written again after the server had started"
        todo = "see whether the server still is what the unit says: restart it, or swap once more"
        yield Finding("restart-pending", seen.path, "a server younger than its unit", found, todo, instance)
    for path, text in seen.dropins.items():
        found = _short("; ".join(line.strip() for line in text.splitlines() if _says(line)), secrets) or "an empty file"
        todo = f"put it into the model or the profile, then remove {path}, `systemctl daemon-reload` and {DEPLOY}"
        yield Finding("drop-in", path, "nothing laid over the unit", found, todo, instance, _force(seen, path, live))
    if not seen.masks and status.fragment not in ("", seen.path):
        found = f"systemd takes {status.fragment}"
        yield Finding("unit", status.fragment, f"{seen.path} in force", found, f"remove it, then {DEPLOY}", instance)
    if status.stale:
        todo = "systemctl daemon-reload, once the files are in order"
        yield Finding("not-reloaded", name, "systemd has read the unit", "its files have changed since", todo, instance)
    if not status.enabled and not seen.masks:
        yield Finding("not-enabled", name, "enabled, so that it starts at boot", "not enabled", DEPLOY, instance)
    if live is None:
        found = f"{status.active} ({status.sub}, {status.result})"
        yield Finding("not-running", name, "active", found, f"see `journalctl -u {name}`, then {DEPLOY}", instance)


def _force(seen: UnitFiles, path: str, live: Optional[Live]) -> str:
    changed = seen.changed.get(path)
    if changed is None or live is None:
        return ""
    state = "before" if live.started >= changed else "after"
    since = "with it" if live.started >= changed else "without it"
    return f"changed {clock.shown(changed)}, {state} the server started ({clock.shown(live.started)}): it runs {since}"


def _says(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(("#", ";"))


def _lines(wanted: str, found: str, secrets: Sequence[str]) -> Tuple[str, str]:
    """The lines in which two texts differ."""
    words = list(difflib.ndiff(wanted.splitlines(), found.splitlines()))
    gone, new = ("; ".join(word[2:].strip() for word in words if word.startswith(mark)) for mark in "-+")
    return _pair(gone, new, secrets)


def _pair(expected: str, found: str, secrets: Sequence[str] = ()) -> Tuple[str, str]:
    """Both for people; where taking secrets out leaves no difference, that is said."""
    before, after = _short(expected, secrets), _short(found, secrets)
    if before == after:
        after = f"{after} (another value)" if after else "differs in blanks only"
    return before or "nothing there", after or "gone"


def _short(text: str, secrets: Sequence[str] = ()) -> str:
    shown = redact(text, secrets)
    return shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 3]}..."


def process(live: Live, plan: Plan, instance: str, secrets: Sequence[str] = ()) -> Iterator[Finding]:
    """Whether what runs was started as the plan says: its words and its variables."""
    todo = f"restart {plan.unit} once its unit is in order, or {DEPLOY}"
    wanted, found = Counter(groups(words_of(plan))), Counter(groups(live.argv))
    if wanted != found:
        gone, new = (
            " ".join(" ".join(hide_secrets(g)) for g in (a - b).elements())
            for a, b in ((wanted, found), (found, wanted))
        )
        yield Finding("argv", plan.unit, *_pair(gone, new, secrets), todo, instance, f"pid {live.pid}")
    before, after = plan.environment, live.environment
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if names:
        gone, new = (" ".join(hide_secrets(f"{n}={side[n]}" for n in names if n in side)) for side in (before, after))
        yield Finding("environment", plan.unit, *_pair(gone, new, secrets), todo, instance, f"pid {live.pid}")


def words_of(plan: Plan) -> List[str]:
    """The command line that a release's unit gives its server."""
    secret = ["--config", f"/run/credentials/{plan.unit}/{SECRETS_FILE}"] if plan.secret_flags else []
    return [plan.python, *plan.argv, *secret]


def groups(words: Sequence[str]) -> List[Tuple[str, ...]]:
    """Each flag with its words; their order means nothing."""
    found: List[List[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return [tuple(group) for group in found if group]


def resolved(known: Resolved, now: Resolved, where: str, instance: str) -> Iterator[Finding]:
    """Whether the server's arguments are what SGLang had made of them when the release was committed."""
    names = [n for n, value in now.values.items() if n not in DRAWN and value != known.values.get(n)]
    if names:
        sides = ("; ".join(f"{name} {side.values.get(name)}" for name in names) for side in (known, now))
        todo = "see who changed the server while it runs; a restart takes it back"
        yield Finding("resolved", where, *_pair(*sides), todo, instance)
    if known.version and now.version and known.version != now.version:
        todo = f"verify the release on it: {DEPLOY} with another profile and back, or install {known.version} again"
        yield Finding("engine", where, f"SGLang {known.version}", f"SGLang {now.version} runs", todo, instance)


def installed(then: Installed, now: Installed, plan: Plan, instance: str) -> Iterator[Finding]:
    """Whether a release runs, and would start again, on what it was verified on."""
    todo = "go back to that, or verify the release on it: swap to another profile and back"
    version = plan.python, f"SGLang {then.engine}", f"SGLang {now.engine} is installed"
    if not then.files or not now.files:
        yield blind("engine", plan.python, "its SGLang could not be read", instance)
    elif then.engine != now.engine:
        yield Finding("engine", *version, todo, instance)
    elif then.files != now.files:
        found = "files of SGLang, or the packages beside it, have changed"
        yield Finding("engine", plan.python, f"SGLang {then.engine} as it was at the commit", found, todo, instance)
    if plan.flags.get("device") == "cpu":
        return
    if then.driver != now.driver:
        sides = f"driver {then.driver or 'unknown'}", f"driver {now.driver or 'unknown'}"
        yield Finding("driver", "NVML", *sides, todo, instance)
    if then.gpus != now.gpus:
        sides = "; ".join(then.gpus) or "none", "; ".join(now.gpus) or "none"
        yield Finding("gpus", "NVML", *sides, todo, instance)


def port(plan: Plan, strangers: Sequence[str], instance: str) -> Iterator[Finding]:
    for line in strangers:
        todo = "stop it: two servers on one port share its requests"
        what = f"only {plan.unit} listens"
        yield Finding("port", f"port {plan.port}", what, "somebody else listens too", todo, instance, _short(line))


def servers(seen: Sequence[Server], ports: Mapping[int, str]) -> Iterator[Finding]:
    """SGLang that runs outside our units. ports: of the instances."""
    for server in seen:
        owner = ports.get(server.port or 0, "")
        place = server.container or server.unit or "no unit"
        shared = f", which is instance {owner}'s" if owner else ""
        found = f"SGLang of {server.user} in {place} on port {server.port or 'unknown'}{shared}"
        todo = "stop it and what starts it, or take it over: `--adopt`"
        detail = f"pid {server.pid}, since {clock.shown(server.started)}: {_short(' '.join(server.argv))}"
        kind, where = ("port", f"port {server.port}") if owner else ("server", place)
        yield Finding(kind, where, "no SGLang but that of the instances", found, todo, owner, detail)


def way(path: StartPath, ports: Mapping[int, str]) -> Finding:
    """Another way to a server."""
    owner = ports.get(path.port or 0, "")
    shared = f"; its port {path.port} is instance {owner}'s" if owner else ""
    todo = "remove or disable it: the instance's unit alone starts SGLang"
    return Finding(path.kind, path.where, "no other way to a server", f"{path.how}: {path.text}{shared}", todo, owner)
