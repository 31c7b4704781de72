"""Where things are on the host, and the values that are kept there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pwd
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple, Type, TypeVar

from kernelswap import ledger
from kernelswap.agent import files
from kernelswap.agent.containers import FoundContainer
from kernelswap.protocol import (
    CONFIG_ROOT,
    PLAN_FILE,
    STATE_ROOT,
    TRAFFIC_FILE,
    Plan,
    Report,
    Request,
    Resolved,
    StepResult,
    Traffic,
    decode,
    encode,
    gpu_indices,
    unit_name,
)
from kernelswap.seal import SECRETS_FILE

T = TypeVar("T")
RESERVE = 1024 * 1024  # bytes: a journal, a line of the history and the last events are a hundredth of it


@dataclass(frozen=True)
class Folders:
    """The places of one instance; root is another folder in tests only."""

    instance: str
    root: Path = Path("/")

    @property
    def unit(self) -> str:
        return unit_name(self.instance)

    @property
    def config(self) -> Path:
        return self.root / CONFIG_ROOT.lstrip("/") / self.instance

    @property
    def state(self) -> Path:
        return self.root / STATE_ROOT.lstrip("/") / self.instance

    @property
    def releases(self) -> Path:
        return self.config / "releases"

    @property
    def known_good(self) -> Path:
        return self.config / "known-good"

    @property
    def traffic(self) -> Path:
        """Where the instance's users come from, see protocol.Traffic."""
        return self.config / TRAFFIC_FILE

    @property
    def journal(self) -> Path:
        return self.state / "journal.json"

    @property
    def gpu_indices(self) -> Path:
        return self.root / gpu_indices(self.instance).lstrip("/")

    @property
    def request(self) -> Path:
        return self.state / "request.json"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def start_lock(self) -> Path:
        return self.state / "start.lock"

    @property
    def history(self) -> Path:
        return self.state / "history.jsonl"

    @property
    def tally(self) -> Path:
        """What the history has told, also of what is pruned from it, see ledger.Tally."""
        return self.state / "tally.json"

    @property
    def reserve(self) -> Path:
        """Space that is given up when the disk is full, so that the end of a swap can still be told."""
        return self.state / "reserve"

    @property
    def unrecorded(self) -> Path:
        """The report of a swap that could not be written into the history, as on a disk that became read-only."""
        return self.root / "run/kernelswap" / self.instance / "report.json"

    @property
    def idle_memory(self) -> Path:
        return self.state / "idle_memory.json"

    @property
    def committed_unit(self) -> Path:
        return self.root / "etc/systemd/system" / self.unit

    @property
    def candidate_unit(self) -> Path:
        """Outranks /etc and is gone after a reboot."""
        return self.root / "run/systemd/system.control" / self.unit

    @property
    def candidate_settings(self) -> Path:
        return self.candidate_unit.with_name(self.unit + ".d")

    def resolved(self, release: str) -> Path:
        """What SGLang made of a release's command line, see protocol.Resolved."""
        return self.state / "resolved" / f"{release}.json"

    @property
    def answers(self) -> Path:
        """What SGLang answered in preflights, see engine.py."""
        return self.state / "answers"

    def measured(self, release: str) -> Path:
        """The folder of what was measured of a committed release, see measured.py."""
        return self.state / "measured" / release

    def evidence(self, swap: str) -> Path:
        return self.state / "swaps" / swap

    def release(self, name: str) -> Path:
        return self.releases / name


@dataclass(frozen=True)
class FoundUnit:
    """A hand-written unit on this instance's GPUs or port. enabled: it starts at boot; serves: SGLang ran in it."""

    name: str
    enabled: bool
    serves: bool = True


@dataclass(frozen=True)
class FoundProcess:
    """An SGLang server that no unit owned, with all that is needed to start it again."""

    argv: Tuple[str, ...]
    environment: Dict[str, str]
    folder: str
    uid: int
    gid: int


@dataclass(frozen=True)
class ReleaseZero:
    """What was found serving at the first adoption; brought back when the first swap fails."""

    units: Tuple[FoundUnit, ...] = ()
    processes: Tuple[FoundProcess, ...] = ()
    containers: Tuple[FoundContainer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.units or self.processes or self.containers)


@dataclass(frozen=True)
class Journal:
    """The open swap, written before each step is taken.

    started: epoch seconds, for people; uptime: the same moment in seconds since the boot `boot`, which no change of the
    clock moves. touched: something that ran may have been stopped. back: the rollback has begun, because of `cause`.
    away: the users may have been sent away; port: of the server that they were sent away from;
    left: the routers that sent them here until then. entered: they may have been let in to the candidate.
    steps: those that have ended. notes: see protocol.Report.
    """

    request: Request
    started: float
    boot: str
    step: str = "preflight"
    touched: bool = False
    back: bool = False
    previous: Optional[str] = None
    zero: ReleaseZero = field(default_factory=ReleaseZero)
    cause: str = ""
    uptime: Optional[float] = None
    steps: Tuple[StepResult, ...] = ()
    notes: Tuple[str, ...] = ()
    away: bool = False
    port: int = 0
    left: Tuple[str, ...] = ()
    entered: bool = False


class JournalLost(Exception):
    """There is an open swap, and nothing tells which."""


def read_journal(folders: Folders) -> Optional[Journal]:
    """The open swap, if there is one. One that cannot be read any more is taken for cut short at a step unknown.

    Raises JournalLost if not even the request for it is left.
    """
    text = files.read(folders.journal)
    if text is None:
        return None
    try:
        return decode(Journal, text)
    except ValueError as error:
        try:
            request = decode(Request, files.read(folders.request) or "")
        except ValueError:
            todo = f"see whether {folders.unit} serves as it should, then remove that file"
            raise JournalLost(f"{folders.journal} cannot be read ({error}): {todo}") from None
        return Journal(request, time.time(), boot_id(), "unknown", touched=True, previous=known_good(folders))


def write_journal(folders: Folders, journal: Journal) -> None:
    # 0600: an adopted process's environment may hold secrets.
    files.write(folders.journal, encode(journal), mode=0o600)


def spare(folders: Folders, do: Callable[[], None]) -> None:
    """Write what must not be lost: where the disk is full, the reserve is given up for it. Raises OSError."""
    try:
        do()
    except OSError as error:
        if error.errno not in files.FULL:
            raise
        files.remove(folders.reserve)
        do()


def read_plan(folders: Folders, release: str) -> Plan:
    """The plan of a staged release. Raises FileNotFoundError or ValueError if it is missing or broken."""
    return decode(Plan, (folders.release(release) / PLAN_FILE).read_text(encoding="utf-8"))


def plan_or_none(folders: Folders, release: Optional[str]) -> Optional[Plan]:
    """The plan of a staged release; None if there is none that can be read."""
    try:
        return read_plan(folders, release) if release else None
    except (OSError, ValueError):
        return None


def resolved(folders: Folders, release: str) -> Optional[Resolved]:
    """What SGLang made of a release's command line; None if that was not kept, or cannot be read."""
    try:
        return decode(Resolved, files.read(folders.resolved(release)) or "")
    except (OSError, ValueError):
        return None


def torn_files(folders: Folders, plan: Plan) -> List[str]:
    """The files of a staged release that are gone or not as they were rendered, as after a power cut."""
    folder = folders.release(plan.release)
    torn = [name for name, wanted in sorted(plan.digests.items()) if digest(folder / name) != wanted]
    torn += [] if (folder / plan.unit).is_file() or plan.unit in torn else [plan.unit]
    return torn + ([SECRETS_FILE] if set(plan.secret_flags) - set(secrets(folders, plan.release)) else [])


def digest(path: Path) -> str:
    """SHA-256 of a file; "" if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def measured(folders: Folders, release: Optional[str], name: str, kind: Type[T]) -> Optional[T]:
    """What was kept of a committed release; None where that is not known. Raises OSError."""
    text = files.read(folders.measured(release) / name) if release else None
    with contextlib.suppress(ValueError):
        return decode(kind, text) if text else None
    return None


def keep_measured(folders: Folders, request: Request) -> None:
    """Keep what the next release is compared to; a quick look replaces no measurement. A full disk loses it, nothing
    else."""
    from kernelswap.measured import INSTALLED_FILE, KEPT  # not to be loaded for each question, see __main__.py

    for name in (*KEPT, INSTALLED_FILE):
        kept = folders.measured(request.release) / name
        with contextlib.suppress(OSError):
            text = files.read(folders.evidence(request.swap) / name)
            if text and not (request.verify == "quick" and name in KEPT and kept.exists()):
                files.write(kept, text)


def traffic(folders: Folders) -> Traffic:
    """Where the instance's users come from. Raises ValueError where that cannot be read."""
    text = files.read(folders.traffic)
    return decode(Traffic, text) if text is not None else Traffic()


def known_good(folders: Folders) -> Optional[str]:
    try:
        return folders.known_good.readlink().name
    except OSError:
        return None


def is_intact(folders: Folders, release: str) -> bool:
    """Whether a release is the known-good, /etc holds exactly its unit, and nothing of a candidate is laid over it."""
    text = files.read(folders.release(release) / folders.unit)
    over = folders.candidate_unit.exists() or folders.candidate_settings.exists()
    committed = known_good(folders) == release and files.read(folders.committed_unit) == text
    return text is not None and committed and not over


def tally(folders: Folders, history: Sequence[Report]) -> ledger.Tally:
    """All swaps that have ended. history: of the instance."""
    try:
        before = decode(ledger.Tally, files.read(folders.tally) or "{}")
    except ValueError:
        before = ledger.Tally()
    return ledger.tally(before, history)


def history(folders: Folders) -> List[Report]:
    """All reports, oldest first; a line torn by a power cut is skipped."""
    reports = []
    for line in files.read_lines(folders.history):
        try:
            reports.append(decode(Report, line))
        except ValueError:
            continue
    return reports


def staged(folders: Folders) -> List[str]:
    """Names of the releases here; one that begins with a dot is being deleted."""
    if not folders.releases.is_dir():
        return []
    entries = (entry for entry in folders.releases.iterdir() if not entry.name.startswith("."))
    return sorted(entry.name for entry in entries if (entry / PLAN_FILE).is_file())


def report(folders: Folders, swap: str) -> Optional[Report]:
    """How a swap ended; None if it has not."""
    found = [report for report in history(folders) if report.request.swap == swap]
    last = unrecorded(folders)
    found += [last] if last and last.request.swap == swap else []
    return found[0] if found else None


def unrecorded(folders: Folders) -> Optional[Report]:
    """The end that could not be written into the history; None if there is none."""
    try:
        return decode(Report, files.read(folders.unrecorded) or "")
    except ValueError:
        return None


def record(folders: Folders, report: Report) -> None:
    """Put an end into the history, once, and close its journal; where that cannot be, keep it under /run.

    Then the journal stays, and whoever opens it next records the end.
    """
    try:
        if all(known.request.swap != report.request.swap for known in history(folders)):
            spare(folders, lambda: files.append(folders.history, encode(report)))
        for path in (folders.journal, folders.reserve, folders.unrecorded):
            files.remove(path)
    except OSError as error:
        print(f"kernelswap: {folders.history} cannot be written ({error.strerror}): make it writable", file=sys.stderr)
        files.keep(folders.unrecorded, encode(report), mode=0o600)


def rollback_target(folders: Folders) -> Optional[str]:
    return ledger.rollback_target(history(folders), set(staged(folders)))


def secrets(folders: Folders, release: str) -> Dict[str, str]:
    """The secrets of a release by flag, from the file that SGLang itself reads: a line `flag: "value"` for each.

    One that a power cut has torn is not there.
    """
    found = {}
    for line in files.read_lines(folders.release(release) / SECRETS_FILE):
        flag, _, value = line.partition(": ")
        with contextlib.suppress(ValueError):
            found[flag] = str(json.loads(value))
    return found


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def uptime() -> float:
    """Seconds since the boot; no change of the clock moves them, and a suspended host counts on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def user_ids(user: str) -> Tuple[int, int]:
    entry = pwd.getpwnam(user)
    return entry.pw_uid, entry.pw_gid
