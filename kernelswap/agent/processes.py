"""The processes of the host, read from /proc: which are SGLang servers, whose they are, and how they end.

identity.py says what a process is. A process id counts only together with its start time. Every reader takes the folder
that stands for /proc, so that a recorded one can be judged.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Set, Tuple

from kernelswap.agent import clock, containers, identity
from kernelswap.agent.redaction import hide_secrets
from kernelswap.protocol import Server

PROC = Path("/proc")
ENDED = ("Z", "X", "x")
TOLD = ("CUDA_", "SGLANG_")  # variables of an engine's environment that tell whose it is


@dataclass(frozen=True)
class Process:
    """One line of the process table. started: clock ticks since boot, as in /proc/PID/stat; state: R, S, D, Z, ...

    comm: the name that the kernel keeps, cut to 15 characters. exe: the program's file, "" if it cannot be read.
    group: of processes that a shell started together; 0 if unknown.
    variables: of an engine's environment, those that tell whose it is.
    """

    pid: int
    parent: int
    started: int
    state: str
    uid: int
    argv: Tuple[str, ...]
    cgroup: str
    comm: str = ""
    exe: str = ""
    threads: int = 1
    group: int = 0
    variables: Tuple[Tuple[str, str], ...] = ()

    @property
    def ended(self) -> bool:
        """A zombie has ended, unless threads of it still run: those hold what it held."""
        return self.state in ENDED and self.threads <= 1

    @property
    def unit(self) -> Optional[str]:
        """The system service that owns it; None for a login session, a user's own service or a container."""
        parts = [part for part in self.cgroup.split("/") if part]
        if self.container or any(re.fullmatch(r"user-\d+\.slice|user@\d+\.service", part) for part in parts):
            return None
        services = [part for part in parts if part.endswith(".service")]
        return services[-1] if services else None

    @property
    def user_unit(self) -> Optional[str]:
        """The service of a user's own systemd that owns it."""
        match = re.search(r"/user@\d+\.service/.*?([^/]+\.service)(?:/|$)", self.cgroup)
        return match[1] if match and not self.container else None

    @property
    def container(self) -> Optional[containers.Place]:
        return containers.of_cgroup(self.cgroup)

    @property
    def is_launcher(self) -> bool:
        """Whether it is the main process of an SGLang server."""
        return identity.is_server(self.argv, self.exe)

    @property
    def is_worker(self) -> bool:
        """Whether it is a process that an SGLang server starts for itself."""
        if identity.is_worker(self.argv, self.comm):
            return True
        return identity.is_python_child(self.argv) and bool(self.run)

    @property
    def run(self) -> str:
        """What SGLang calls the start that an engine's process belongs to."""
        return dict(self.variables).get("SGLANG_RUN_ID", "")

    @property
    def engine(self) -> str:
        """What else it is, if another engine: `vLLM engine`."""
        return identity.engine(self.argv, self.comm, self.exe)

    @property
    def port(self) -> Optional[int]:
        """The port that its command line asks for; SGLang's default is 30000."""
        return self.number("--port", "30000") if self.is_launcher else None

    def flag(self, name: str, default: str = "") -> str:
        """The value that its command line gives a flag."""
        for index, word in enumerate(self.argv):
            if word == name and index + 1 < len(self.argv):
                return self.argv[index + 1]
            if word.startswith(f"{name}="):
                return word[len(name) + 1 :]
        return default

    def number(self, name: str, default: str = "") -> Optional[int]:
        """The port number that its command line gives a flag; None for whatever else it says: anybody may write it."""
        text = self.flag(name, default)
        return int(text) if re.fullmatch(r"[0-9]{1,5}", text) else None


def table(proc: Path = PROC) -> Dict[int, Process]:
    """Every process of the host by its id."""
    found = {}
    for pid in _ids_in(proc):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[pid] = _read(proc / str(pid))
    return found


def _ids_in(proc: Path) -> List[int]:
    return sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())


def _read(entry: Path) -> Process:
    """Without `stat` there is no process; every other file may be missing or closed to us."""
    text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
    # The name in parentheses may itself hold spaces and parentheses: what follows the last one is fixed.
    stat = text.rpartition(")")[2].split()
    argv, comm = _words(_text(entry / "cmdline")), text.partition("(")[2].rpartition(")")[0]
    if not any(argv):
        argv = ()  # of a zombie, a kernel thread, or of one that emptied it
    exe = _link(entry / "exe").replace(" (deleted)", "")
    tells = identity.is_server(argv, exe) or identity.is_worker(argv, comm) or identity.is_python_child(argv)
    return Process(
        pid=int(entry.name),
        parent=int(stat[1]),
        started=int(stat[19]),
        state=stat[0],
        uid=_uid(entry),
        argv=argv,
        cgroup=_cgroup(_text(entry / "cgroup")),
        comm=comm,
        exe=exe,
        threads=int(stat[17]),
        group=int(stat[2]),
        variables=_variables(entry) if tells else (),
    )


def cpu_ticks(stat: Path) -> int:
    """The CPU time that a process (or a thread, by its own `stat`) has had, in clock ticks; 0 where it has ended."""
    try:
        cells = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(cells[11]) + int(cells[12])
    except (OSError, ValueError, IndexError):
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def _link(path: Path) -> str:
    """Where a link points; a recorded tree may hold the target as a file's text."""
    try:
        return str(path.readlink()) if path.is_symlink() else path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _words(text: str) -> Tuple[str, ...]:
    """The words of a command line. Where a title was laid over them (setproctitle), spaces are all that divides it."""
    return tuple(text.rstrip("\0").split("\0") if "\0" in text else text.split())


def _uid(entry: Path) -> int:
    match = re.search(r"^Uid:\s+\d+\s+(\d+)", _text(entry / "status"), re.MULTILINE)
    return int(match[1]) if match else entry.stat().st_uid


def _variables(entry: Path) -> Tuple[Tuple[str, str], ...]:
    try:
        values = environment(int(entry.name), entry.parent)
    except OSError:
        return ()
    return tuple((name, value) for name, value in sorted(values.items()) if name.startswith(TOLD))


def _cgroup(text: str) -> str:
    """The path in systemd's hierarchy: of cgroup v2 ("0::"), or of v1's `name=systemd` where that is in use.

    A container's path counts wherever it stands: on hybrid hosts the others may still name its runtime's service.
    """
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2}
    contained = next((path for path in paths.values() if containers.of_cgroup(path)), None)
    v2 = paths.get("", "/")
    return contained or (v2 if v2 != "/" else paths.get("name=systemd", "/"))


def alive(process: Process, proc: Path = PROC) -> bool:
    """Whether this very process still runs (its id may belong to another one by now). A zombie has ended."""
    try:
        now = _read(proc / str(process.pid))
    except (OSError, ValueError, IndexError):
        return False
    return now.started == process.started and not now.ended


def descendants(processes: Dict[int, Process], roots: Iterable[int]) -> Set[int]:
    """The given ids and everything below them."""
    children: Dict[int, List[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: Set[int] = set()
    queue = list(roots)
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += children.get(pid, [])
    return found


def ancestors(processes: Dict[int, Process], pid: int) -> Set[int]:
    """The given id and everything above it: what we must never end."""
    found = set()
    while pid in processes and pid not in found:
        found.add(pid)
        pid = processes[pid].parent
    return found


def servers(processes: Dict[int, Process]) -> List[Process]:
    """The head of every SGLang server: its launcher, the program that embeds it, or a worker that lost both."""
    heads = {p.pid for p in processes.values() if p.is_launcher and not p.ended}
    # A wrapper (`env`, `timeout`) and its child may both look like launchers: the outermost one counts.
    heads = {pid for pid in heads if not (ancestors(processes, processes[pid].parent) & heads)}
    owned = descendants(processes, heads)
    lost = {p.pid for p in processes.values() if p.is_worker and not p.ended and p.pid not in owned}
    heads |= {_embedding(processes, pid) for pid in lost}
    heads = {pid for pid in heads if not (ancestors(processes, processes[pid].parent) & heads)}
    return [processes[pid] for pid in sorted(heads)]


def _embedding(processes: Dict[int, Process], pid: int) -> int:
    """The Python program that runs the engine of a worker inside itself; the worker where there is none."""
    while (above := processes.get(processes[pid].parent)) and above.is_worker and not above.ended:
        pid = above.pid
    if above is None or above.pid <= 1 or above.ended or identity.is_spawner(above.argv, above.comm):
        return pid
    return above.pid if identity.is_python(above.argv, above.exe) else pid


def main_launcher(processes: Dict[int, Process], head: Process) -> Process:
    """The process of a server's tree that drains it when asked: the launcher below all wrappers."""
    # What a launcher forks has the same words; so only wrappers are looked below.
    while identity.is_wrapper(head.argv):
        below = [p for p in processes.values() if p.parent == head.pid and p.is_launcher and not p.ended]
        if not below:
            break
        head = below[0]
    return head


def cgroup_pids(processes: Dict[int, Process], unit: str) -> Set[int]:
    return {p.pid for p in processes.values() if p.unit == unit and not p.ended}


def schedulers(processes: Dict[int, Process], unit: str) -> int:
    """How many of SGLang's schedulers live in a unit."""
    mine = [processes[pid].argv for pid in cgroup_pids(processes, unit)]
    return sum(bool(argv) and argv[0].startswith("sglang::scheduler") for argv in mine)


def zombies(processes: Dict[int, Process]) -> List[str]:
    """What has ended as an engine, each with the parent that has not taken note of it."""
    return [
        f"pid {p.pid} ({p.comm}) is a zombie of pid {p.parent}"
        + (f" ({processes[p.parent].comm})" if p.parent in processes else "")
        + ", which never reaped it"
        for p in processes.values()
        if p.ended and (p.is_worker or p.engine)
    ]


def listeners(port: int, proc: Path = PROC) -> List[Optional[int]]:
    """Who listens on a TCP port: the processes that hold a socket of it; None for one that no visible process holds."""
    inodes = set()
    for name in ("net/tcp", "net/tcp6"):
        for line in _text(proc / name).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return []
    holders = open_files(inodes, proc)
    unheld: List[Optional[int]] = [None for _ in inodes - set().union(*holders.values(), set())]
    return unheld + sorted(holders)


def open_files(names: Iterable[str], proc: Path = PROC) -> Dict[int, Set[str]]:
    """Which of these files (`/dev/nvidia0`, `socket:[77]`) each process has open; those with none are left out."""
    wanted, found = set(names), {}
    for pid in _ids_in(proc):
        with contextlib.suppress(OSError):
            held = {_link(handle) for handle in (proc / str(pid) / "fd").iterdir()} & wanted
            if held:
                found[pid] = held
    return found


def gpu_nodes(proc: Path = PROC) -> Dict[str, str]:
    """GPU UUID -> its device node, as the driver tells; indices are no minor numbers."""
    nodes = {}
    for path in sorted((proc / "driver/nvidia/gpus").glob("*/information")):
        values = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", _text(path), re.MULTILINE))
        if "GPU UUID" in values and "Device Minor" in values:
            nodes[values["GPU UUID"]] = f"/dev/nvidia{values['Device Minor']}"
    return nodes


def started_at(process: Process, proc: Path = PROC) -> float:
    """When it started, in seconds since the epoch."""
    match = re.search(r"^btime (\d+)", _text(proc / "stat"), re.MULTILINE)
    return (int(match[1]) if match else 0) + process.started / os.sysconf("SC_CLK_TCK")


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def describe(process: Process) -> str:
    """What, whose and since when, in one line. Words after the first twelve are cut."""
    words = " ".join(hide_secrets(process.argv)[:12]) or f"[{process.comm}]"
    since = clock.shown(started_at(process))
    unit = f", unit {process.unit}" if process.unit else ""
    if process.user_unit:
        unit = f", its user's unit {process.user_unit}"
    if process.container:
        unit = f", {process.container.runtime} container {process.container.id[:12]}"
    what = f"{process.engine}, " if process.engine else ""
    return f"{what}pid {process.pid} of {user_name(process.uid)}{unit}, since {since}: {words[:160]}"


def stuck(process: Process, proc: Path = PROC) -> str:
    """Why no signal ends a process, with what helps."""
    where = _text(proc / str(process.pid) / "wchan").strip() or "an unknown place"
    try:
        state = _read(proc / str(process.pid)).state
    except (OSError, ValueError, IndexError):
        state = process.state
    if state == "D":
        return f"{describe(process)}: it waits in the kernel (state D, in {where}), where no signal reaches it"
    if state in ENDED:
        return f"{describe(process)}: its main thread has ended (state {state}), others of its threads have not"
    return f"{describe(process)}: state {state}"


def origin(processes: Dict[int, Process], process: Process) -> str:
    """Who started a process, as far as can be told."""
    above = processes.get(process.parent)
    if process.container:
        return f"{process.container.runtime} (container {process.container.id[:12]})"
    if process.user_unit:
        return f"the systemd of {user_name(process.uid)} (unit {process.user_unit})"
    if above and above.pid > 1:
        return f"pid {above.pid}: {' '.join(hide_secrets(above.argv))[:80] or above.comm}"
    return f"unit {process.unit}" if process.unit else f"something in {process.cgroup}"


def as_server(process: Process, unit: Optional[str]) -> Server:
    return Server(
        pid=process.pid,
        started=started_at(process),
        user=user_name(process.uid),
        argv=tuple(hide_secrets(process.argv)),
        unit=unit,
        port=process.port,
        container=containers.describe(process.container) if process.container else "",
    )


def end(heads: Iterable[Process], deadline: float, spare: Iterable[int] = ()) -> List[Process]:
    """End servers with all that is below them, what is left at the deadline (seconds) by SIGKILL.

    Each server's launcher alone is asked, so that it drains: asked all at once its workers would die under its
    requests. What its tree was once seen to hold is followed, whatever becomes its parent. Ourselves, our ancestors and
    `spare` with all below are never touched, whatever the caller says. Returns what would not end.
    """
    heads = list(heads)
    if not heads:
        return []
    mine = ancestors(table(), os.getpid()) | {0, 1}
    roots = [head for head in heads if head.pid not in mine]
    tree: Dict[Tuple[int, int], _Target] = {}

    def follow() -> Dict[int, Process]:
        now = table()
        spared = mine | descendants(now, spare)
        seen = [*roots, *(target.process for target in tree.values())]
        for pid in descendants(now, [p.pid for p in seen if _same(now, p)]) - spared:
            if (pid, now[pid].started) not in tree and not now[pid].ended:
                tree[pid, now[pid].started] = _Target(now[pid], handles)
        return now

    def left() -> List[Process]:
        return [target.process for target in tree.values() if alive(target.process)]

    with contextlib.ExitStack() as handles:
        now = follow()
        for root in roots:
            asked = main_launcher(now, root)
            if target := tree.get((asked.pid, asked.started)):
                target.signal(drain_signal(asked))
        until = time.monotonic() + deadline
        while left() and time.monotonic() < until:
            time.sleep(0.2)
            follow()
        until = time.monotonic() + 10.0
        while left() and time.monotonic() < until:
            for target in tree.values():
                target.signal(signal.SIGKILL)
            time.sleep(0.1)
            follow()
        return left()


def _same(processes: Dict[int, Process], process: Process) -> bool:
    return process.pid in processes and processes[process.pid].started == process.started


class _Target:
    """A process to be ended. Its handle stays with this very process, so that no later owner of its id is ever hit."""

    def __init__(self, process: Process, handles: contextlib.ExitStack) -> None:
        self.process = process
        self.handle: Optional[int] = None
        with contextlib.suppress(OSError, AttributeError):  # before Linux 5.3, or a Python that was built before it
            self.handle = os.pidfd_open(process.pid)
            handles.callback(os.close, self.handle)

    def signal(self, number: int) -> None:
        # After the handle was opened: so it is the handle of the process that was meant.
        if alive(self.process):
            with contextlib.suppress(ProcessLookupError):
                if self.handle is None:
                    os.kill(self.process.pid, number)
                else:
                    signal.pidfd_send_signal(self.handle, number)


def drain_signal(process: Process, proc: Path = PROC) -> int:
    """The signal on which it ends in order.

    SGLang's launcher takes SIGINT: it closes its port, lets requests finish and ends its workers; on SIGTERM it goes on
    taking requests without an end. What was started in the background of a script may ignore SIGINT.
    """
    if not process.is_launcher:
        return signal.SIGTERM
    match = re.search(r"^SigIgn:\s*([0-9a-f]+)", _text(proc / str(process.pid) / "status"), re.MULTILINE)
    ignored = bool(match and int(match[1], 16) >> (signal.SIGINT - 1) & 1)
    return signal.SIGTERM if ignored else signal.SIGINT


def environment(pid: int, proc: Path = PROC) -> Dict[str, str]:
    words = (proc / str(pid) / "environ").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    return {name: value for name, _, value in (word.partition("=") for word in words if "=" in word)}


def is_contained(pid: int, proc: Path = PROC) -> bool:
    """Whether it sees other files than the host does, as in a container: what starts it again is not ours to guess."""
    return _link(proc / str(pid) / "ns/mnt") != _link(proc / "1/ns/mnt")


def working_folder(pid: int) -> str:
    return str((PROC / str(pid) / "cwd").readlink())


def changed_user(pid: int) -> bool:
    """Whether it has other rights than its user, as by sudo: to start it again would hand these to whoever made it."""
    return len(set(_ids(pid, "Uid:"))) > 1 or len(set(_ids(pid, "Gid:"))) > 1


def group_id(pid: int) -> int:
    return _ids(pid, "Gid:")[0]


def _ids(pid: int, kind: str) -> List[int]:
    """The real, effective, saved and file-system id of a process."""
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    return [int(word) for word in next(line for line in lines if line.startswith(kind)).split()[1:]]
