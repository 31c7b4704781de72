"""Where things are on the host, and the values that are kept there."""

from __future__ import annotations

import json
import pwd
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from kernelswap import ledger
from kernelswap.agent import files
from kernelswap.agent.containers import FoundContainer
from kernelswap.protocol import CONFIG_ROOT, STATE_ROOT, Plan, Report, Request, decode, encode, gpu_indices, unit_name


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

    touched: something that ran may have been stopped. back: the rollback has begun, because of `cause`.
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


def read_journal(folders: Folders) -> Optional[Journal]:
    text = files.read(folders.journal)
    return decode(Journal, text) if text else None


def write_journal(folders: Folders, journal: Journal) -> None:
    # 0600: an adopted process's environment may hold secrets.
    files.write(folders.journal, encode(journal), mode=0o600)


def read_plan(folders: Folders, release: str) -> Plan:
    """The plan of a staged release. Raises FileNotFoundError or ValueError if it is missing or broken."""
    return decode(Plan, (folders.release(release) / "plan.json").read_text(encoding="utf-8"))


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
    if not folders.releases.is_dir():
        return []
    return sorted(entry.name for entry in folders.releases.iterdir() if (entry / "plan.json").is_file())


def rollback_target(folders: Folders) -> Optional[str]:
    return ledger.rollback_target(history(folders), set(staged(folders)))


def secrets(folders: Folders, release: str) -> Dict[str, str]:
    """The secrets of a release by flag, from the file that SGLang itself reads: a line `flag: "value"` for each."""
    found = {}
    for line in files.read_lines(folders.release(release) / "secrets.yaml"):
        flag, _, value = line.partition(": ")
        if value:
            found[flag] = str(json.loads(value))
    return found


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def user_ids(user: str) -> Tuple[int, int]:
    entry = pwd.getpwnam(user)
    return entry.pw_uid, entry.pw_gid
