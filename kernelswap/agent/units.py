"""systemd, one function for each thing we ask of it."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from kernelswap.agent import files

ETC = "/etc/systemd/system"
PROPERTIES = (
    "ActiveState,SubState,MainPID,FragmentPath,UnitFileState,InvocationID,Result,DropInPaths,"
    "ActiveEnterTimestampMonotonic,InactiveEnterTimestampMonotonic,ExecMainStartTimestampMonotonic,NeedDaemonReload"
)
OURS = "/run/systemd/system.control/"  # outranks /etc, and a reboot empties it


class UnitError(Exception):
    """systemd refused; the text is what it said."""


@dataclass(frozen=True)
class UnitStatus:
    """A unit as systemd sees it. active: active, activating, inactive, failed, ...; since: epoch seconds.

    main_ran: the main process has run since the boot. overrides: drop-in files of other people that change the unit.
    stale: its files have changed since systemd read them.
    """

    active: str
    sub: str
    main_pid: int
    fragment: str
    enabled: bool
    invocation: str
    result: str
    since: Optional[float]
    overrides: Tuple[str, ...] = ()
    main_ran: bool = True
    stale: bool = False

    @property
    def running(self) -> bool:
        return self.active in ("active", "activating", "reloading", "deactivating")


def status(unit: str) -> UnitStatus:
    return statuses([unit])[unit]


def statuses(names: Iterable[str]) -> Dict[str, UnitStatus]:
    """Units by name, all asked for in one command."""
    shown = _show(names, PROPERTIES)
    return {name: _status(values, time.time(), time.monotonic()) for name, values in shown.items()}


def _status(values: Mapping[str, str], now: float, uptime: float) -> UnitStatus:
    """now: the host's time, epoch seconds; uptime: by its monotonic clock."""
    entered = "Active" if values["ActiveState"] == "active" else "Inactive"
    since = int(values[f"{entered}EnterTimestampMonotonic"] or 0)  # microseconds since the boot; 0: never
    return UnitStatus(
        active=values["ActiveState"],
        sub=values["SubState"],
        main_pid=int(values["MainPID"]),
        fragment=values["FragmentPath"],
        enabled=values["UnitFileState"] == "enabled",
        invocation=values["InvocationID"],
        result=values["Result"],
        since=round(now - uptime + since / 1e6, 3) if since else None,
        overrides=tuple(path for path in values["DropInPaths"].split() if OURS not in path),
        main_ran=values["ExecMainStartTimestampMonotonic"] not in ("", "0"),
        stale=values["NeedDaemonReload"] == "yes",
    )


@dataclass(frozen=True)
class Starts:
    """Whether and by what a unit is started. by: the units that want or trigger it; those that are installed for
    the boot or run, so that they really do."""

    running: bool
    enabled: bool
    by: Tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.running or self.enabled or bool(self.by)

    def __str__(self) -> str:
        words = ["enabled"] * self.enabled + ["running"] * self.running
        return ", ".join(words + [f"started by {name}" for name in self.by])


def starts(names: Iterable[str]) -> Dict[str, Starts]:
    """How each of these units is started. Raises UnitError."""
    found = _show(names, "ActiveState,UnitFileState,WantedBy,RequiredBy,UpheldBy,TriggeredBy")
    triggers = {name: values["TriggeredBy"].split() for name, values in found.items() if values.get("TriggeredBy")}
    live = _show({trigger for by in triggers.values() for trigger in by}, "ActiveState,UnitFileState")
    return {
        name: Starts(
            running=values["ActiveState"] not in ("inactive", "failed"),
            enabled=values["UnitFileState"] in ("enabled", "enabled-runtime"),
            by=(
                *(unit for key in ("WantedBy", "RequiredBy", "UpheldBy") for unit in values.get(key, "").split()),
                *(
                    trigger
                    for trigger in triggers.get(name, ())
                    if live[trigger]["ActiveState"] == "active" or live[trigger]["UnitFileState"].startswith("enabled")
                ),
            ),
        )
        for name, values in found.items()
    }


def _show(names: Iterable[str], properties: str) -> Dict[str, Dict[str, str]]:
    asked = sorted(set(names))
    # The answers stand in the order of the names, an empty line between two.
    parts = _systemctl("show", f"--property={properties}", "--", *asked).split("\n\n") if asked else []
    return {name: dict(line.partition("=")[::2] for line in part.splitlines()) for name, part in zip(asked, parts)}


def version() -> int:
    match = re.match(r"systemd (\d+)", _systemctl("--version"))
    return int(match[1]) if match else 0


def start(unit: str, timeout: float, forgiven: bool = False) -> None:
    """Start a unit whatever its past failures; returns once its main process runs. Raises UnitError.

    forgiven: `forgive` was called since its last start.
    """
    if not forgiven:
        forgive(unit)
    _systemctl("start", "--", unit, timeout=timeout)


def forgive(unit: str) -> None:
    """Let past starts and failures of a unit not count against the next start."""
    with contextlib.suppress(UnitError):
        _systemctl("reset-failed", "--", unit)


def ask_to_stop(unit: str) -> bool:
    """Let a unit begin to stop; whether it ran. Raises UnitError."""
    running = status(unit).running
    if running:
        _systemctl("stop", "--no-block", "--", unit)
    return running


def stop(unit: str, timeout: float) -> None:
    """Stop a unit if it runs; what has not ended in time is killed, the whole of its cgroup. Raises UnitError."""
    if not status(unit).running:
        return
    try:
        _systemctl("stop", "--", unit, timeout=timeout)
    except UnitError:
        with contextlib.suppress(UnitError):
            _systemctl("kill", "--signal=KILL", "--", unit)
        _systemctl("stop", "--", unit, timeout=30)


def reload() -> None:
    _systemctl("daemon-reload", timeout=120)


def enable(unit: str) -> None:
    _systemctl("enable", "--quiet", "--", unit)
    _sync_links()


def disable(unit: str) -> None:
    """Also where we keep it from starting: systemctl ignores a masked unit, and says that all went well."""
    masked = unmask(unit)
    try:
        _systemctl("disable", "--quiet", "--", unit)
    finally:
        if masked:
            mask_until_reboot(unit)
    _sync_links()


def _sync_links() -> None:
    """What is started at boot must be so after a power cut too, and systemd leaves that to chance."""
    for folder in (Path(ETC), *Path(ETC).glob("*.wants"), *Path(ETC).glob("*.requires")):
        files.sync_folder(folder)


def mask_until_reboot(unit: str) -> None:
    """Keep a unit from starting, wherever its file lies: this folder outranks /etc and is empty after a reboot."""
    folder = Path(OURS)
    folder.mkdir(parents=True, exist_ok=True)
    files.link(folder / unit, "/dev/null")
    reload()


def unmask(unit: str) -> bool:
    """Undo `mask_until_reboot`; whether there was anything to undo."""
    path = Path(OURS) / unit
    masked = path.is_symlink()
    if masked:
        path.unlink()
        reload()
    return masked


def write_candidate(unit_file: Path, settings: Path, text: str) -> None:
    """Put a candidate's unit where a reboot forgets it, never restarted by systemd, and read at its next reload."""
    # Named to come last, after whatever an administrator laid over the unit.
    files.write(settings / "zz-candidate.conf", "[Service]\nRestart=no\n")
    files.write(unit_file, text)


def drop_candidate(unit_file: Path, settings: Path) -> None:
    """Forget the candidate's unit and every setting laid over it; what runs goes on running."""
    shutil.rmtree(settings, ignore_errors=True)
    files.remove(unit_file)
    reload()


def quarantine(unit: str, allowed: Sequence[str]) -> None:
    """Let only these addresses reach the unit, from now on and without a restart."""
    _systemctl(*_quarantine(unit, allowed))


@contextlib.contextmanager
def quarantined(unit: str, allowed: Sequence[str]) -> Iterator[None]:
    """The same while something else is done; it holds when that has ended. Raises UnitError."""
    end = _begin(*_quarantine(unit, allowed))
    try:
        yield
    finally:
        end(60)


def _quarantine(unit: str, allowed: Sequence[str]) -> List[str]:
    settings = ["IPAddressAllow=", f"IPAddressAllow={' '.join(allowed)}", "IPAddressDeny=any"]
    return ["set-property", "--runtime", "--", unit, *settings]


def lift_quarantine(unit: str) -> None:
    _systemctl("set-property", "--runtime", "--", unit, "IPAddressAllow=", "IPAddressDeny=")


def set_apart(pid: int, scope: str) -> None:
    """Move a process out of the unit that it is in, into a scope of its own; that ends with it."""
    manager = ["org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"]
    words = ["StartTransientUnit", "ssa(sv)a(sa(sv))", scope, "fail", "1", "PIDs", "au", "1", str(pid), "0"]
    done = subprocess.run(["busctl", "call", *manager, *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise UnitError(f"{scope}: {done.stderr.strip()}")


def log(invocation: str) -> List[str]:
    """What one start of a unit logged, oldest line first."""
    if not invocation:
        return []
    command = ["journalctl", "--output=cat", "--no-pager", "--quiet", "--lines=all"]
    command += [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []  # a log tells why; it decides nothing
    return done.stdout.decode("utf-8", "replace").splitlines()


def _systemctl(*words: str, timeout: float = 60) -> str:
    return _begin(*words)(timeout)


def _begin(*words: str) -> Callable[[float], str]:
    """Ask systemctl; what is returned waits so many seconds for the answer. Raises UnitError."""
    process = subprocess.Popen(["systemctl", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(timeout: float) -> str:
        with process:
            try:
                answer, fault = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise UnitError(f"systemctl {' '.join(words)}: no answer within {timeout:g} s") from None
        if process.returncode:
            raise UnitError(f"systemctl {' '.join(words)}: {fault.strip() or f'exit {process.returncode}'}")
        return answer

    return end
