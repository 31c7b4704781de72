"""A small systemd in memory: unit files by precedence, what is enabled, what runs, and what a boot makes of it.

Like the real one it does not sync what `enable` writes, and it knows a unit file only as of the last reload. A server
is started only where no other runs, as the guard of every unit sees to.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

from kernelswap.agent.processes import Process
from kernelswap.agent.units import UnitError

PORT = 30000
PLACES = ("run/systemd/system.control", "etc/systemd/system")
WANTS = "etc/systemd/system/multi-user.target.wants"


class Systemd:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.loaded: dict[str, Path] = {}
        self.running: dict[str, str] = {}  # unit -> the text that it was started from

    def at(self, root: Path) -> Systemd:
        """The same state over another folder."""
        other = copy.copy(self)
        other.root, other.loaded, other.running = root, dict(self.loaded), dict(self.running)
        return other

    def boot(self) -> None:
        self.loaded, self.running = {}, {}
        wants = self.root / WANTS
        for name in sorted(entry.name for entry in wants.iterdir()) if wants.is_dir() else []:
            with contextlib.suppress(UnitError):
                self.start(name)

    def start(self, unit: str) -> None:
        path = self._file(unit)
        if path is None or path.is_symlink():
            raise UnitError(f"{unit} not found or masked")
        others = set(self.running) - {unit}
        if others:
            raise UnitError(f"the host is not clean: {others}")
        self.running.setdefault(unit, path.read_text())

    def processes(self) -> dict[int, Process]:
        words = ("/usr/bin/python3", "-m", "sglang.launch_server", "--port", str(PORT))
        return {
            self.pid(unit): Process(self.pid(unit), 1, 1, "S", 0, words, f"/system.slice/{unit}")
            for unit in self.running
        }

    def pid(self, unit: str) -> int:
        return 100000 + sum(unit.encode()) if unit in self.running else 0

    def __call__(self, *words: str, timeout: float = 60) -> str:
        try:
            return self._answer(*words)
        except OSError as error:
            raise UnitError(f"systemctl {' '.join(words)}: {error.strerror}") from None

    def begin(self, *words: str) -> Callable[[float], str]:
        return lambda timeout: self(*words, timeout=timeout)

    def _answer(self, *words: str) -> str:
        command, names = words[0], words[words.index("--") + 1 :] if "--" in words else ("",)
        if command == "show":
            return "\n\n".join(map(self._show, names))
        unit = names[0]
        wants = self.root / WANTS / unit
        if command == "daemon-reload":
            self.loaded = {}
        elif command == "start":
            self.start(unit)
        elif command == "stop":
            self.running.pop(unit, None)
        elif command == "enable":
            assert not self._masked(unit), f"{unit} is masked"
            wants.parent.mkdir(exist_ok=True)
            if not wants.is_symlink():
                wants.symlink_to(f"/etc/systemd/system/{unit}")
        elif command == "disable":
            if wants.is_symlink() and not self._masked(unit):  # measured: "is masked, ignoring", and it ends well
                wants.unlink()
        elif command == "set-property":
            if self._file(unit) is None:
                raise UnitError(f"Unit {unit} not found.")
            settings = self.root / PLACES[0] / f"{unit}.d"
            settings.mkdir(parents=True, exist_ok=True)
            (settings / "50-IPAddressDeny.conf").write_text(" ".join(words))
        else:
            assert command in ("reset-failed", "--version"), words
        return ""

    def _masked(self, unit: str) -> bool:
        return any(
            str(path.readlink()) == "/dev/null" for place in PLACES if (path := self.root / place / unit).is_symlink()
        )

    def _file(self, unit: str) -> Path | None:
        if unit not in self.loaded:
            found = [self.root / place / unit for place in PLACES]
            there = [path for path in found if path.exists() or path.is_symlink()]
            if not there:
                return None
            self.loaded[unit] = there[0]
        return self.loaded[unit]

    def _show(self, unit: str) -> str:
        path = self._file(unit)
        return "\n".join(
            f"{name}={value}"
            for name, value in {
                "ActiveState": "active" if unit in self.running else "inactive",
                "SubState": "running" if unit in self.running else "dead",
                "MainPID": self.pid(unit),
                "FragmentPath": path or "",
                "UnitFileState": "enabled" if (self.root / WANTS / unit).is_symlink() else "disabled",
                "InvocationID": "",
                "Result": "success",
                "DropInPaths": "",
                "ActiveEnterTimestampMonotonic": 1,
                "InactiveEnterTimestampMonotonic": 1,
                "ExecMainStartTimestampMonotonic": 1,
                "NeedDaemonReload": "no",
            }.items()
        )
