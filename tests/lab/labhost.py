"""A lab of the tests' own and its hosts: `from labhost import Host, Lab`; conftest.py has the fixtures."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LAB_SH = ROOT / "lab" / "lab.sh"
FOLDER = ROOT / ".lab-tests"


@dataclass(frozen=True)
class Host:
    """One host. Commands go over SSH, through one connection that is kept open for speed."""

    name: str
    address: str
    lab: Lab

    def run(
        self, command: str, *, user: str = "root", data: bytes | None = None, check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command; what it wrote is in .stdout and .stderr. A failure raises unless check is off."""
        done = subprocess.run([*self.ssh(user), command], input=data or b"", capture_output=True, timeout=timeout)
        result = subprocess.CompletedProcess(
            command, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        )
        if check and result.returncode:
            raise AssertionError(
                f"{self.name}: {command!r} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
            )
        return result

    def output(self, command: str, **options: float) -> str:
        """What a command that must succeed printed, without the last newline."""
        return self.run(command, timeout=options.get("timeout", 120)).stdout.rstrip("\n")

    def write(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.run(f"mkdir -p '{path.rpartition('/')[0]}' && cat >'{path}' && chmod {mode:o} '{path}'", data=data)

    def read(self, path: str) -> str:
        return self.run(f"cat '{path}'").stdout

    def reboot(self) -> None:
        """A power cut; returns when the host is up again."""
        self.hang_up()
        self.lab.sh("reboot", self.name)

    def hang_up(self) -> None:
        """End the kept connections."""
        for socket in self.lab.sockets.glob(f"{self.name}.*"):
            user = socket.suffix.removeprefix(".")
            quietly([*self._ssh(user), "-O", "exit", self.name])
            socket.unlink(missing_ok=True)

    def ssh(self, user: str = "root") -> list[str]:
        """The beginning of a command line that runs what follows on the host."""
        socket = self.lab.sockets / f"{self.name}.{user}"
        if not socket.exists():  # started apart, as the process that stays would otherwise keep a command's pipes open
            quietly([*self._ssh(user), "-M", "-N", "-f", self.name])
        return [*self._ssh(user), self.name]

    def _ssh(self, user: str) -> list[str]:
        config = ["-F", str(self.lab.folder / "ssh_config"), "-o", f"ControlPath={self.lab.sockets / self.name}.{user}"]
        return ["ssh", *config, "-o", "ServerAliveInterval=5", "-l", user]


@dataclass(frozen=True)
class Lab:
    """A lab folder of its own, so that it runs beside all others."""

    folder: Path
    sockets: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="lab")))

    @property
    def environment(self) -> dict[str, str]:
        """For what reads inventory/lab.py."""
        return {**os.environ, "KERNELSWAP_LAB": str(self.folder)}

    @property
    def hosts(self) -> list[Host]:
        lines = (self.folder / "hosts").read_text().splitlines()
        return [Host(name, address, self) for name, address in map(str.split, lines)]

    def up(self, count: int) -> list[Host]:
        """Boot the hosts that are missing up to this count; the first ever builds what they boot from (minutes)."""
        self.sh("up", str(count), timeout=1800)
        return self.hosts

    def down(self) -> None:
        if (self.folder / "hosts").exists():
            for host in self.hosts:
                host.hang_up()
        self.sh("down")
        for left in self.sockets.iterdir():
            left.unlink()
        self.sockets.rmdir()

    def sh(self, *words: str, timeout: float = 300) -> str:
        done = subprocess.run(
            [LAB_SH, *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"lab.sh {' '.join(words)} ended with {done.returncode}:\n{done.stderr}"
        return done.stdout


def quietly(command: list[str]) -> None:
    quiet = subprocess.DEVNULL
    subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=60)


@contextmanager
def own_lab(kind: str = "") -> Iterator[Lab]:
    """This process's lab, not up yet, and gone afterwards. kind: tells its labs apart."""
    FOLDER.mkdir(exist_ok=True)
    keep = os.environ.get("KERNELSWAP_KEEP_LAB") == "1"
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    name = f"keep{worker}{kind}" if keep else f"{os.getpid()}{kind}"
    # The lock lives as long as this process: whoever gets it later knows that the lab was left behind.
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep()
        lab = Lab(FOLDER / name)
        try:
            yield lab
        finally:
            if not keep:
                lab.down()
                (FOLDER / f"{name}.lock").unlink()


def sweep() -> None:
    """End the labs of sessions that were killed."""
    for path in FOLDER.glob("[0-9]*.lock"):
        with path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            Lab(path.with_suffix("")).down()
            path.unlink(missing_ok=True)
