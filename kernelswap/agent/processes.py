"""The processes of the host, read from /proc: which are SGLang servers, whose they are, and how they end.

A process is known by what it is (the words of its command line, its title), never by a pattern over a whole command
line: `tail -f sglang.log` is no server. A process id counts only together with its start time.
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

from kernelswap.protocol import ENGINE_MODULE, Server

PROC = Path("/proc")
TITLE = re.compile(r"^sglang::\w+")  # setproctitle of SGLang's schedulers, detokenizer and controllers
PYTHON = re.compile(r"^python[\d.]*$")


@dataclass(frozen=True)
class Process:
    """One line of the process table. started: clock ticks since boot, as in /proc/PID/stat; state: R, S, D, Z, ..."""

    pid: int
    parent: int
    started: int
    state: str
    uid: int
    argv: Tuple[str, ...]
    cgroup: str

    @property
    def unit(self) -> Optional[str]:
        """The system service that owns it; None for a login session, a user's own service or a container."""
        parts = [part for part in self.cgroup.split("/") if part]
        if not parts or any(part.startswith("user-") or part.startswith("user@") for part in parts):
            return None
        services = [part for part in parts if part.endswith(".service")]
        return services[-1] if services else None

    @property
    def is_launcher(self) -> bool:
        """Whether it is the main process of an SGLang server."""
        words = list(self.argv)
        if words and Path(words[0]).name == "env":
            words = [word for word in words[1:] if "=" not in word.split("/", 1)[0]]
        if not words:
            return False
        if Path(words[0]).name == "sglang" and words[1:2] == ["serve"]:
            return True
        if not PYTHON.match(Path(words[0]).name):
            return False
        return self._runs_engine(words[1:])

    @staticmethod
    def _runs_engine(words: List[str]) -> bool:
        for index, word in enumerate(words):
            if word == "-m":
                return words[index + 1 : index + 2] in ([ENGINE_MODULE], ["sglang"])
            if word in ("-W", "-X"):
                continue
            if word.startswith("-"):
                continue
            if index and words[index - 1] in ("-W", "-X"):
                continue
            script = Path(word)
            return (script.name == "sglang" and words[index + 1 : index + 2] == ["serve"]) or (
                script.name == "launch_server.py" and script.parent.name == "sglang"
            )
        return False

    @property
    def is_worker(self) -> bool:
        """Whether it is a process that an SGLang server starts for itself."""
        return bool(self.argv and TITLE.match(self.argv[0]))

    @property
    def port(self) -> Optional[int]:
        """The port that its command line asks for; SGLang's default is 30000."""
        if not self.is_launcher:
            return None
        for index, word in enumerate(self.argv):
            value = word[7:] if word.startswith("--port=") else None
            if word == "--port" and index + 1 < len(self.argv):
                value = self.argv[index + 1]
            if value is not None:
                return int(value) if value.isdigit() else None
        return 30000


def table() -> Dict[int, Process]:
    """Every process of the host by its id."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                process = _read(entry)
                found[process.pid] = process
    return found


def _read(entry: Path) -> Process:
    # The name in parentheses may itself hold spaces and parentheses: what follows the last one is fixed.
    stat = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return Process(
        pid=int(entry.name),
        parent=int(stat[1]),
        started=int(stat[19]),
        state=stat[0],
        uid=entry.stat().st_uid,
        argv=tuple((entry / "cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")),
        cgroup=_cgroup((entry / "cgroup").read_text()),
    )


def _cgroup(text: str) -> str:
    """The path in systemd's hierarchy: of cgroup v2 ("0::"), or of v1's `name=systemd` where that is in use."""
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2}
    v2 = paths.get("", "/")
    return v2 if v2 != "/" else paths.get("name=systemd", "/")


def alive(process: Process) -> bool:
    """Whether this very process still runs (its id may belong to another one by now). A zombie has ended."""
    try:
        now = _read(PROC / str(process.pid))
    except (OSError, ValueError, IndexError):
        return False
    return now.started == process.started and now.state != "Z"


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
    """The head of every SGLang server: its launcher, or a worker that lost its launcher."""
    heads = [p for p in processes.values() if p.is_launcher and p.state != "Z"]
    # A wrapper (`env`, `bash -c`) and its child may both look like launchers: the outermost one counts.
    heads = [p for p in heads if not (ancestors(processes, p.parent) & {h.pid for h in heads})]
    owned = descendants(processes, [p.pid for p in heads])
    lost = [p for p in processes.values() if p.is_worker and p.state != "Z" and p.pid not in owned]
    return sorted(heads + lost, key=lambda p: p.pid)


def cgroup_pids(processes: Dict[int, Process], unit: str) -> Set[int]:
    return {p.pid for p in processes.values() if p.unit == unit and p.state != "Z"}


def listeners(port: int) -> Dict[int, Optional[int]]:
    """Listening TCP sockets of a port: inode -> process id, None where no process of the host holds it."""
    inodes = set()
    for table_name in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in (PROC / "self" / table_name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(int(fields[9]))
    owners: Dict[int, Optional[int]] = dict.fromkeys(inodes)
    if inodes:
        for entry in PROC.iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    for handle in (entry / "fd").iterdir():
                        match = re.fullmatch(r"socket:\[(\d+)\]", str(handle.readlink()))
                        if match and int(match[1]) in owners:
                            owners[int(match[1])] = int(entry.name)
    return owners


def started_at(process: Process) -> float:
    """When it started, in seconds since the epoch."""
    boot = next(int(line.split()[1]) for line in (PROC / "stat").read_text().splitlines() if line.startswith("btime"))
    return boot + process.started / os.sysconf("SC_CLK_TCK")


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def describe(process: Process) -> str:
    """What, whose and since when, in one line. Words after the first twelve are cut."""
    words = " ".join(hide_secrets(process.argv)[:12])
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started_at(process)))
    unit = f", unit {process.unit}" if process.unit else ""
    return f"pid {process.pid} of {user_name(process.uid)}{unit}, since {since}: {words[:160]}"


def as_server(process: Process, unit: Optional[str]) -> Server:
    return Server(
        pid=process.pid,
        started=started_at(process),
        user=user_name(process.uid),
        argv=tuple(hide_secrets(process.argv)),
        unit=unit,
        port=process.port,
    )


SECRET_FLAG = re.compile(r"^--(?:[\w-]*(?:api[-_]key|token|password|secret))(=.*)?$")


def hide_secrets(argv: Iterable[str]) -> List[str]:
    """The words with the value of every flag that names a secret replaced."""
    words: List[str] = []
    hide = False
    for word in argv:
        match = SECRET_FLAG.match(word)
        if hide and not word.startswith("--"):
            word = "[redacted]"
        elif match and match[1]:
            word = word.split("=", 1)[0] + "=[redacted]"
        hide = bool(match and not match[1])
        words.append(word)
    return words


def end(targets: Iterable[Process], deadline: float) -> List[Process]:
    """End processes by SIGTERM, and by SIGKILL what is left at the deadline (seconds). Returns what would not end.

    Ourselves and our ancestors are never touched, whatever the caller says.
    """
    mine = ancestors(table(), os.getpid())
    left = [process for process in targets if process.pid not in mine and process.pid > 1]
    for number, wait in ((signal.SIGTERM, deadline), (signal.SIGKILL, 10.0)):
        for process in left:
            if alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        until = time.monotonic() + wait
        while (left := [process for process in left if alive(process)]) and time.monotonic() < until:
            time.sleep(0.1)
        if not left:
            break
    return left


def environment(pid: int) -> Dict[str, str]:
    words = (PROC / str(pid) / "environ").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    return {name: value for name, _, value in (word.partition("=") for word in words if "=" in word)}


def is_contained(pid: int) -> bool:
    """Whether it sees other files than the host does, as in a container: what starts it again is not ours to guess."""
    return (PROC / str(pid) / "ns/mnt").readlink() != (PROC / "1/ns/mnt").readlink()


def working_folder(pid: int) -> str:
    return str((PROC / str(pid) / "cwd").readlink())


def changed_user(pid: int) -> bool:
    """Whether it has other rights than its user, as by sudo: to start it again would hand these to whoever made it."""
    return len(set(_ids(pid, "Uid:"))) > 1 or len(set(_ids(pid, "Gid:"))) > 1


def group(pid: int) -> int:
    return _ids(pid, "Gid:")[0]


def _ids(pid: int, kind: str) -> List[int]:
    """The real, effective, saved and file-system id of a process."""
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    return [int(word) for word in next(line for line in lines if line.startswith(kind)).split()[1:]]
