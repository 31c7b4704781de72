"""systemd, one function for each thing we ask of it."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence

from kernelswap.agent import files


class UnitError(Exception):
    """systemd refused; the text is what it said."""


@dataclass(frozen=True)
class UnitStatus:
    """A unit as systemd sees it. active: active, activating, inactive, failed, ...; since: epoch seconds."""

    active: str
    sub: str
    main_pid: int
    fragment: str
    enabled: bool
    invocation: str
    result: str
    since: Optional[float]

    @property
    def running(self) -> bool:
        return self.active in ("active", "activating", "reloading", "deactivating")


_PROPERTIES = (
    "ActiveState,SubState,MainPID,FragmentPath,UnitFileState,InvocationID,Result,ActiveEnterTimestamp,"
    "InactiveEnterTimestamp"
)


def status(unit: str) -> UnitStatus:
    text = _systemctl("show", "--timestamp=unix", f"--property={_PROPERTIES}", "--", unit)
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    since = values["ActiveEnterTimestamp"] if values["ActiveState"] == "active" else values["InactiveEnterTimestamp"]
    return UnitStatus(
        active=values["ActiveState"],
        sub=values["SubState"],
        main_pid=int(values["MainPID"]),
        fragment=values["FragmentPath"],
        enabled=values["UnitFileState"] == "enabled",
        invocation=values["InvocationID"],
        result=values["Result"],
        since=float(since.lstrip("@")) if since.startswith("@") else None,
    )


def version() -> int:
    match = re.match(r"systemd (\d+)", _systemctl("--version"))
    return int(match[1]) if match else 0


def start(unit: str, timeout: float) -> None:
    """Start a unit whatever its past failures; returns once its main process runs. Raises UnitError."""
    with contextlib.suppress(UnitError):
        _systemctl("reset-failed", "--", unit)
    _systemctl("start", "--", unit, timeout=timeout)


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


def disable(unit: str) -> None:
    _systemctl("disable", "--quiet", "--", unit)


def mask_until_reboot(unit: str) -> None:
    """Keep a unit from starting, wherever its file lies: this folder outranks /etc and is empty after a reboot."""
    folder = Path("/run/systemd/system.control")
    folder.mkdir(parents=True, exist_ok=True)
    files.link(folder / unit, "/dev/null")
    reload()


def unmask(unit: str) -> None:
    path = Path("/run/systemd/system.control") / unit
    if path.is_symlink():
        path.unlink()
        reload()


def activate_candidate(unit_file: Path, settings: Path, text: str) -> None:
    """Put a candidate's unit where a reboot forgets it, never restarted by systemd."""
    files.write(settings / "candidate.conf", "[Service]\nRestart=no\n")
    files.write(unit_file, text)
    reload()


def drop_candidate(unit_file: Path, settings: Path) -> None:
    """Forget the candidate's unit and every setting laid over it; what runs goes on running."""
    shutil.rmtree(settings, ignore_errors=True)
    files.remove(unit_file)
    reload()


def quarantine(unit: str, allowed: Sequence[str]) -> None:
    """Let only these addresses reach the unit, from now on and without a restart."""
    _systemctl("set-property", "--runtime", "--", unit, f"IPAddressAllow={' '.join(allowed)}", "IPAddressDeny=any")


def lift_quarantine(unit: str) -> None:
    _systemctl("set-property", "--runtime", "--", unit, "IPAddressAllow=", "IPAddressDeny=")


def log(invocation: str, lines: Optional[int] = None) -> List[str]:
    """What one start of a unit logged, oldest line first; the last `lines` of it."""
    if not invocation:
        return []
    command = ["journalctl", "--output=cat", "--no-pager", "--quiet", f"--lines={lines if lines else 'all'}"]
    command += [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    return done.stdout.decode("utf-8", "replace").splitlines()


def _systemctl(*words: str, timeout: float = 60) -> str:
    try:
        done = subprocess.run(["systemctl", *words], capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise UnitError(f"systemctl {' '.join(words)}: no answer within {timeout:g} s") from None
    if done.returncode:
        raise UnitError(f"systemctl {' '.join(words)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
