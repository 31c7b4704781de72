"""What can be checked before anything is touched. Every check returns its faults; all are reported at once.

What SGLang itself says takes seconds, so it is asked first and waited for last.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from kernelswap import backends
from kernelswap.agent import (
    containers,
    engine,
    environment,
    files,
    gpus,
    hardware,
    host,
    identity,
    kernel_log,
    model_files,
    moe_tuning,
    network,
    occupants,
    processes,
    units,
)
from kernelswap.agent.host import Folders
from kernelswap.agent.occupants import Occupants
from kernelswap.agent.processes import Process
from kernelswap.agent.redaction import names_secret, redact
from kernelswap.agent.verify import drift
from kernelswap.protocol import CONFIG_ROOT, STATE_ROOT, Gpu, HostFault, Plan, Request, Resolved

SYSTEMD_MIN = 247  # the first with reliable --timestamp=unix and credentials


@dataclass(frozen=True)
class Findings:
    """What a preflight found: faults stand against the swap, notes do not.

    gpus: those that the server will have. engine: digest of SGLang's files, its version where that is not known.
    """

    faults: List[HostFault]
    notes: List[str]
    resolved: Optional[Resolved] = None
    gpus: Sequence[Gpu] = ()
    engine: str = ""


def look(folders: Folders, request: Request, plan: Plan, found: Occupants) -> Findings:
    nobody = user(plan)
    if nobody:  # nothing can be asked as nobody
        return Findings([*nobody, *host_faults(folders, request, plan, found)], [])
    present, broken = _gpus(plan)
    usable = [] if plan.flags.get("device") == "cpu" else gpus.assigned(present, plan.gpus)
    with engine.asked(folders, plan, usable) as answer:
        cheap = [*host_faults(folders, request, plan, found), *broken, *gpu(plan, found, present, broken)]
        model = model_files.look(plan)
        said = answer()
    unusable = model_files.faults(plan, model)
    faults = [*cheap, *unusable]
    faults += engine_faults(plan, said, bool(faults), bool(unusable))
    lines = [*notes(plan, said, usable), *host_notes(plan, present, model)]
    return Findings(faults, lines, _resolved(plan, said), usable, said.engine or said.version)


def host_faults(folders: Folders, request: Request, plan: Plan, found: Occupants) -> List[HostFault]:
    return [
        *system(),
        *environment.faults(plan),
        *masked(folders),
        *torn(folders, plan),
        *disk(folders, plan),
        *unwritable(folders),
        *port(plan, found),
        *strays(request, plan, found),
        *stuck(found),
        *drift.faults(plan),
        *way_back(folders, request),
    ]


def system() -> List[HostFault]:
    found = []
    if units.version() < SYSTEMD_MIN:
        found.append(HostFault(f"systemd {units.version()} is too old", f"upgrade it to {SYSTEMD_MIN} or newer"))
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        found.append(HostFault("no cgroup v2 on this host", "boot with systemd.unified_cgroup_hierarchy=1"))
    elif not network.can_quarantine():
        what = "systemd cannot shut a unit off from the network here (IPAddressDeny=)"
        found.append(HostFault(what, "enable BPF in the kernel"))
    return found


def masked(folders: Folders) -> List[HostFault]:
    """Whether somebody has forbidden the unit to start; a commit would silently allow it again."""
    places = [folders.committed_unit, folders.root / "run/systemd/system" / folders.unit]
    return [
        HostFault(f"{path} is masked: somebody wants {folders.unit} not to start", "ask who, then remove that link")
        for path in places
        if path.is_symlink() and str(path.readlink()) == "/dev/null"
    ]


def way_back(folders: Folders, request: Request) -> List[HostFault]:
    """Whether the known-good could be brought back; with --force that is the user's risk."""
    release = host.known_good(folders)
    if release is None or request.force:
        return []
    what = f"the known-good {release} cannot be brought back"
    todo = "deploy it again, or go on without a way back by --force"
    try:
        plan = host.read_plan(folders, release)
    except (OSError, ValueError) as error:
        return [HostFault(f"{what}, its plan cannot be read ({error})", todo)]
    return [HostFault(f"{what}, its {name} is gone or torn", todo) for name in host.torn_files(folders, plan)]


def torn(folders: Folders, plan: Plan) -> List[HostFault]:
    where = folders.release(plan.release)
    todo = "remove that file and run the deploy again"
    names = host.torn_files(folders, plan)
    return [HostFault(f"{where / name} is gone or torn, as after a power cut", todo) for name in names]


def user(plan: Plan) -> List[HostFault]:
    try:
        host.user_ids(plan.user)
    except KeyError:
        return [HostFault(f"no user {plan.user!r} on this host", f"create it, or set `user:` in model {plan.model}")]
    return []


INODES_MIN = 64


def disk(folders: Folders, plan: Plan) -> List[HostFault]:
    """Room for what we write, and for the caches that the engine fills at its first start."""
    found = []
    for path, need in ((CONFIG_ROOT, 16), (STATE_ROOT, 64), ("/var/cache", plan.disk_free), ("/run", 4)):
        folder = folders.root / path.lstrip("/")
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free // (1024 * 1024)
        if free < need:
            found.append(HostFault(f"{path} has {free} MiB free, {need} MiB are needed", "free disk space"))
        inodes = os.statvfs(folder)
        if inodes.f_files and inodes.f_favail < INODES_MIN:
            what = f"{path} has {inodes.f_favail} inodes free, {INODES_MIN} are needed"
            found.append(HostFault(what, "remove small files"))
    return found


def unwritable(folders: Folders) -> List[HostFault]:
    """What a swap would have to write and cannot, tried on the spot."""
    units_folder = folders.committed_unit.parent
    changed = [folders.config, folders.state, units_folder, folders.candidate_unit.parent]
    changed += [folder for folder in units_folder.glob("multi-user.target.wants") if folder.is_dir()]
    why = {str(path): files.why_unwritable(path) for path in changed}
    kept = [folders.committed_unit, folders.journal, folders.history]
    why.update({str(path): files.why_unchangeable(path) for path in kept})
    return [HostFault(f"{path} cannot be written ({text})", _way_out(path, text)) for path, text in why.items() if text]


def _way_out(path: str, why: str) -> str:
    if "Read-only" in why:
        return f"see `findmnt --target {path}`, repair its file system or remount it writable"
    if "not permitted" in why:
        return f"see `lsattr -d {path}`, and `chattr -i` it"
    return "free disk space, or raise root's quota"


def port(plan: Plan, found: Occupants) -> List[HostFault]:
    table = processes.table()
    ours = processes.descendants(table, [process.pid for process in found.all])
    foreign = [pid for pid in processes.listeners(plan.port) if pid not in ours]
    return [
        HostFault(
            f"port {plan.port} is taken by {processes.describe(table[pid]) if pid in table else 'an unknown process'}",
            f"stop it, {_end_foreign(plan)}or set another `port:`",
        )
        for pid in foreign
        if not occupants.may_end(table, plan, found, pid)
    ]


def _gpus(plan: Plan) -> Tuple[Tuple[Gpu, ...], List[HostFault]]:
    """The host's GPUs, or why they cannot be read."""
    try:
        return gpus.of_host(plan), []
    except gpus.GpuError as error:
        return (), [HostFault(str(error), "repair the driver, or reboot the host")]


def gpu(plan: Plan, found: Occupants, present: Sequence[Gpu], broken: Sequence[HostFault] = ()) -> List[HostFault]:
    if broken:
        return []
    usable = gpus.assigned(present, plan.gpus)
    errors = kernel_log.xids() if any(gpu.error for gpu in present) else []
    wrong = gpus.faults(present, plan.gpus, errors) if gpus.needs(plan) else []
    if not wrong and len(usable) < plan.gpu_count:
        what = f"{plan.gpu_count} GPUs are needed, {len(usable)} are there"
        wrong.append(HostFault(what, "lower the parallelism, or repair the host"))
    wrong += hardware.faults(plan, present)
    table = processes.table()
    todo = f"end it, {_end_foreign(plan)}or give the instance other GPUs"
    holders = occupants.foreign_holders(table, found, usable).items()
    return wrong + [HostFault(line, todo) for pid, line in holders if not occupants.may_end(table, plan, found, pid)]


def _end_foreign(plan: Plan) -> str:
    return "" if plan.end_foreign else "set `end-foreign: true` to have it ended, "


def strays(request: Request, plan: Plan, found: Occupants) -> List[HostFault]:
    """Servers that no unit owns: taken over only when asked, and only where they can be brought back.

    What is foreign and to be ended needs no asking, but it must be endable.
    """
    wrong = [fault for process in found.strays if (fault := _stray(request, process))]
    for process in found.foreign if plan.end_foreign else ():
        if process.container and (fault := container(process)):
            wrong.append(fault)
        elif process.user_unit:
            wrong.append(HostFault(processes.describe(process), _user_stop(process)))
    return wrong


def _stray(request: Request, process: Process) -> Optional[HostFault]:
    shown = processes.describe(process)
    if process.container:
        return container(process, request.adopt)
    if process.user_unit:
        return HostFault(f"SGLang runs in a unit of its user: {shown}", _user_stop(process))
    if processes.is_contained(process.pid):
        return HostFault(f"SGLang runs in a container: {shown}", "stop that container")
    if processes.changed_user(process.pid):
        return HostFault(f"SGLang runs with the rights of another user than started it: {shown}", "stop it by hand")
    if not request.adopt:
        return HostFault(f"SGLang runs outside any unit: {shown}", "stop it, or take it over with --adopt")
    return None


def _user_stop(process: Process) -> str:
    user = processes.user_name(process.uid)
    return f"systemctl --user --machine={user}@ disable --now {process.user_unit}"


def container(process: Process, adopt: bool = True) -> Optional[HostFault]:
    """Why the container of a process cannot be stopped and brought back; None if it can."""
    shown, where = processes.describe(process), process.container
    if where is None:
        return None
    try:
        answer = containers.ask(where)
    except containers.ContainerError as error:
        return HostFault(f"a container that cannot be taken over: {shown} ({error})", "stop it")
    known = containers.found(where, answer)
    if obstacle := _starting_unit(known.name) or containers.obstacle(known, answer):
        what = f"a container that cannot be taken over: {known}: {shown}: {obstacle.what}"
        return HostFault(what, obstacle.todo)
    return None if adopt else HostFault(f"SGLang runs in {known}: {shown}", "stop it, or take it over with --adopt")


def _starting_unit(name: str) -> Optional[HostFault]:
    clients = [
        p for p in processes.table().values() if identity.name(p.argv) in ("docker", "podman") and name in p.argv
    ]
    unit = next((p.unit for p in clients if p.unit), None)
    return HostFault(f"unit {unit} starts it", f"systemctl disable --now {unit}") if unit else None


def stuck(found: Occupants, patience: float = 3.0) -> List[HostFault]:
    """What no signal would end: a process that waits in the kernel for longer than disks and networks take.

    patience: seconds for which such a state must last.
    """
    until = time.monotonic() + patience
    waiting = None
    while waiting != set() and time.monotonic() < until:
        table = processes.table()
        tree = processes.descendants(table, [process.pid for process in [*found.all, *found.all_foreign]])
        now = {pid for pid in tree if pid in table and table[pid].state == "D"}
        waiting = now if waiting is None else waiting & now
        time.sleep(0.1 if waiting else 0)
    todo = "reset its GPU if that hangs, else reboot the host"
    return [HostFault(processes.stuck(table[pid]), todo) for pid in waiting or ()]


def engine_faults(plan: Plan, said: engine.Answer, others: bool = False, unusable: bool = False) -> List[HostFault]:
    """What SGLang has against the command line.

    others: there are other faults, of which it may only feel the consequences when it cannot even be asked; unusable:
    so are the interpreter or the model's files, and then only its parser's word counts.
    """
    wrong = []
    wanted = plan.engine_version
    if wanted and said.version and said.version != wanted:
        what = f"SGLang {said.version} is installed for {plan.python}, {plan.release} wants {wanted}"
        wrong.append(HostFault(what, f"install {wanted}, or change `engine: {{version: ...}}`"))
    consequence = (others and said.phase == "start") or (unusable and said.phase != "parse")
    if said.refusal and not consequence and said.phase in ("start", "import"):
        todo = f"see what `{plan.python} -m sglang.launch_server --help` says as user {plan.user}"
        wrong.append(HostFault(f"SGLang cannot be asked about {plan.release}: {said.refusal}", todo))
    elif said.refusal and not consequence:
        shown = said.refusal if said.phase == "parse" else f"{said.refusal}{_meant(plan, said.refusal)}"
        wrong.append(HostFault(f"SGLang refuses the flags of {plan.release}: {shown}", "correct the profile"))
    for key, why in said.missing.items():
        todo = f"install it for {plan.python}, or leave out verify.{key}"
        wrong.append(HostFault(f"what verify.{key} needs of SGLang cannot be imported: {why}", todo))
    return wrong


def _meant(plan: Plan, text: str) -> str:
    """The declared flags that an error speaks of, which seldom names them as they are typed."""

    def bare(words: str) -> str:
        return "".join(letter for letter in words.lower() if letter.isalnum())

    said = bare(text)
    flags = [
        f"--{name} {value}"
        for name, value in plan.flags.items()
        if (len(bare(value)) > 3 and value != "true" and bare(value) in said) or bare(name) in said
    ]
    return f" ({', '.join(flags)})" if flags else ""


def notes(plan: Plan, said: engine.Answer, usable: Sequence[Gpu]) -> List[str]:
    """What stands in no way of the swap and is worth knowing; the one place where such lines come together."""
    return [
        *sglang_notes(said),
        *backend_notes(plan, said, usable),
        *moe_tuning.notes(said.moe),
    ]


def host_notes(plan: Plan, present: Sequence[Gpu], model: model_files.ModelFiles) -> List[str]:
    lines = [*hardware.notes(plan, present, model.weights), *model_files.notes(plan, model)]
    return [*lines, *environment.notes(plan, model)]


NOTES_OF_SGLANG = 20  # of one command line; more would hide the others


def sglang_notes(said: engine.Answer) -> List[str]:
    lines = [f"SGLang warns: {line[:400]}" for line in said.warnings[:NOTES_OF_SGLANG]]
    lines += [
        f"SGLang changes {name} from {value} to {said.values[name]}"
        for name, value in said.given.items()
        if said.resolved and value != '"auto"' and value != said.values.get(name, value) and not names_secret(name)
    ]
    if said.unknown:
        lines.append(f"SGLang's rules could not be asked here: {said.unknown}; see whether it starts")
    elif not said.refusal and not said.resolved:
        lines.append(f"SGLang {said.version} decides only when it starts: its parser was asked, its rules were not")
    return lines


def backend_notes(plan: Plan, said: engine.Answer, usable: Sequence[Gpu]) -> List[str]:
    """What is known of these backends. SGLang's own word goes before: where it has refused, it has said it."""
    architectures = {hardware.architecture(gpu) for gpu in usable if gpu.capability}
    architecture = architectures.pop() if len(architectures) == 1 else ""
    method = json.loads(said.values.get("quantization", "null")) or ""
    known = backends.advice(plan.flags, plan.environment, architecture, str(method), said.version)
    judged = bool(said.refusal) or said.resolved
    return [
        f"{advice.place[1]}: {advice.what}: {advice.todo} ({advice.source})"
        for advice in known
        if advice.severity == backends.WARN or not judged
    ]


def _resolved(plan: Plan, said: engine.Answer) -> Optional[Resolved]:
    if not said.resolved or said.refusal:
        return None
    return Resolved(plan.release, said.version, {k: redact(v) for k, v in said.values.items() if not names_secret(k)})
