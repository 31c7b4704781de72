"""Hosts that serve the stand-in, swapped by the literal command and looked at from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labhost import ROOT, Host, Lab

HERE = Path(__file__).parent
PACKAGES = "/usr/lib/python3/dist-packages"
TRAP = "/var/lib/kernelswap-trap"
FILES = "/usr/local/lib/kernelswap-faults"
JOURNAL = "/var/lib/kernelswap/main/journal.json"
PORT = 30000
RIGHT = "2+2 is 4."


@dataclass(frozen=True)
class Choice:
    """What a host is to serve: the profile and environment that make its release."""

    profile: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """A host from outside: what snapshot.py saw there, and what another machine gets from its server."""

    state: Mapping[str, Any]
    backend: str
    answer: str

    @property
    def serving(self) -> str | None:
        """The release whose server runs alone, committed, reachable and right; fails where it is not just so."""
        state, unit = self.state, self.state["unit"]
        kinds = [process["kind"] for process in state["processes"]]
        assert kinds == ["launcher", "sglang::detokenizer", "sglang::scheduler"], kinds
        assert all("/sglang-main.service" in process["cgroup"] for process in state["processes"]), state["processes"]
        assert unit["ActiveState"] == "active"
        assert int(unit["MainPID"]) == state["processes"][0]["pid"]
        assert unit["FragmentPath"] == "/etc/systemd/system/sglang-main.service"
        assert unit["UnitFileState"] == "enabled"
        assert unit["Restart"] == "always"
        assert unit["NeedDaemonReload"] == "no"
        assert (unit["DropInPaths"], unit["IPAddressDeny"]) == ("", "")
        assert state["committed"], "/etc does not hold the known-good's unit"
        assert state["runs_known_good"], f"{state['known_good']} is not what runs, but {self.backend}"
        assert [path for path in state["leftovers"] if "/sglang-main.service" in path] == []
        assert state["journal"] == ""
        assert self.answer == RIGHT
        return str(state["known_good"])

    def who_answers(self, old: str | None) -> str:
        """In words; old: the release that was known-good before."""
        if not self.answer:
            return "nobody"
        which = "the old release" if self.state["known_good"] == old else "the new release"
        return which if self.answer == RIGHT else f"{which}, wrongly"


@dataclass(frozen=True)
class Run:
    """How a pyinfra command ended. lines: what it said of each host."""

    code: int
    lines: Mapping[str, str]
    output: str


@dataclass(frozen=True)
class Fleet:
    """A lab and an ops repository as a user has it: an inventory, and deploy.py, roles and templates beside it."""

    lab: Lab
    folder: Path
    mark: str = ""  # in every release's environment: what failed and was barred in one test file is new to the next

    def prepare(self) -> None:
        for name in ("deploy.py", "roles", "templates"):
            (self.folder / name).symlink_to(ROOT / name)
        (self.folder / "inventory").symlink_to(HERE / "inventory")
        self.each(self.lab.hosts, self._set_trap)

    def _set_trap(self, host: Host) -> None:
        host.write("/etc/nvml-sim.conf", "gpus=1\n")
        host.write(f"{PACKAGES}/kernelswap_trap.py", (HERE / "trap.py").read_text())
        host.write(f"{PACKAGES}/kernelswap_trap.pth", "import kernelswap_trap\n")
        host.run(f"mkdir -p {TRAP}")
        for name in ("thief.py", "beside.service"):
            host.write(f"{FILES}/{name}", (HERE / name).read_text())

    def each(self, hosts: Iterable[Host], work: Callable[[Host], Any]) -> dict[str, Any]:
        """The work done on all hosts at the same time; host name -> what came of it."""
        hosts = list(hosts)
        with ThreadPoolExecutor(max_workers=8) as pool:
            return dict(zip([host.name for host in hosts], pool.map(work, hosts), strict=True))

    def start(self, choices: Mapping[str, Choice], *options: str) -> Process:
        """pyinfra on these hosts, each with its own profile; it has a process group of its own."""
        number = len(list(self.folder.glob("hosts-*.py")))
        inventory = self.folder / f"hosts-{number}.py"
        hosts = [(host.name, self._data(choices[host.name])) for host in self.lab.hosts if host.name in choices]
        inventory.write_text(f"gpu = {hosts!r}\n")
        log = inventory.with_suffix(".log")
        # -v also tells of hosts on which nothing swaps.
        words = [str(Path(sys.executable).parent / "pyinfra"), inventory.name, "deploy.py", "-y", "-v", *options]
        with log.open("w") as file:
            process = subprocess.Popen(
                words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        return Process(process, log, tuple(choices))

    def deploy(self, choices: Mapping[str, Choice], *options: str) -> Run:
        return self.start(choices, *options).wait()

    def _data(self, choice: Choice) -> dict[str, Any]:
        instance = {"profile": choice.profile, "environment": {**choice.environment, "MARK": self.mark}}
        login = {"ssh_user": "root", "ssh_config_file": str(self.lab.folder / "ssh_config")}
        # Each host has its own fault and is judged by itself.
        rollout = {"waves": ["100%"], "max_failed": len(self.lab.hosts)}
        return {"model": "standin", "instances": {"main": instance}, "rollout": rollout, **login}

    # Traps: see trap.py. A host's disk is seen from here, so that waiting costs the hosts nothing.

    def arm(self, host: Host, step: str, back: bool, event: str = "", text: str = "") -> None:
        wanted = json.dumps({"step": step, "back": back, "event": event, "text": text})
        host.run(f"rm -f {TRAP}/*; cat >{TRAP}/armed", data=wanted.encode())

    def wait_sprung(self, hosts: Iterable[Host], process: Process, timeout: float) -> None:
        until = time.monotonic() + timeout
        while missing := [host.name for host in hosts if not self._disk(host, f"{TRAP}/sprung").exists()]:
            if not process.running or time.monotonic() > until:
                process.kill()
                raise AssertionError(f"not sprung on {missing}:\n{process.output}")
            time.sleep(0.1)

    def release_trap(self, host: Host) -> None:
        host.run(f"kill -CONT $(cut -d' ' -f1 {TRAP}/sprung)")

    def drop_connection(self, host: Host) -> None:
        """End the SSH session that follows the swap, as a network does that resets it."""
        host.run("/usr/bin/python3 -", data=(HERE / "drop_connection.py").read_bytes())

    def kill_agent(self, host: Host) -> None:
        """If it is at work there."""
        pid = "$(systemctl show -P MainPID kernelswap-swap-main)"
        host.run(f"test {pid} = 0 || kill -KILL {pid}", check=False)

    def look_when_settled(self, host: Host, timeout: float = 120) -> Seen:
        """The host as soon as no swap is open there any more, or as it is at the deadline."""
        until = time.monotonic() + timeout
        while (seen := self.look(host)).state["journal"] or seen.state["busy"]:
            if time.monotonic() > until:
                break
            time.sleep(0.5)
        return seen

    def wait_for(self, process: Process, words: str, timeout: float = 60) -> None:
        until = time.monotonic() + timeout
        while words not in process.output:
            assert process.running and time.monotonic() < until, process.output
            time.sleep(0.1)

    def _disk(self, host: Host, path: str) -> Path:
        return self.lab.folder / host.name / "root" / path.lstrip("/")

    def wait_begun(self, host: Host, timeout: float = 60) -> bool:
        """Whether a swap begins there in time, or is under way."""
        until = time.monotonic() + timeout
        while not (begun := self._disk(host, JOURNAL).exists()) and time.monotonic() < until:
            time.sleep(0.02)
        return begun

    def settle(self, hosts: Iterable[Host], timeout: float = 120) -> None:
        """Wait until no swap is open any more."""
        until = time.monotonic() + timeout
        while open_ := [h.name for h in hosts if self._disk(h, JOURNAL).exists()]:
            assert time.monotonic() < until, f"still open on {open_}"
            time.sleep(0.1)

    def cut_power(self, hosts: Iterable[Host]) -> None:
        """All at once; returns when they are up again."""
        hosts = list(hosts)
        for host in hosts:
            host.hang_up()
        self.lab.sh("reboot", *(host.name for host in hosts))

    def look(self, host: Host) -> Seen:
        for _ in range(50):
            state = json.loads(host.run("/usr/bin/python3 -", data=(HERE / "snapshot.py").read_bytes()).stdout)
            if not state["busy"]:
                break
            time.sleep(0.2)
        backend = ask(host, "/server_info").get("moe_runner_backend", "")
        chat = {"messages": [{"role": "user", "content": "What is 2+2?"}]}
        choices = ask(host, "/v1/chat/completions", chat).get("choices")
        return Seen(state, backend, choices[0]["message"]["content"] if choices else "")


@dataclass(frozen=True)
class Process:
    """A pyinfra command that runs."""

    process: subprocess.Popen[bytes]
    log: Path
    hosts: tuple[str, ...]

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        if self.running:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def wait(self, timeout: float = 180) -> Run:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"pyinfra did not end:\n{self.output}") from None
        output = re.sub(r"\x1b\[[0-9;]*m", "", self.output)
        lines: dict[str, str] = dict.fromkeys(self.hosts, "")
        for line in output.splitlines():
            match = re.match(r"\s*\[(\w+)\]\s?(.*)", line)
            if match and match[1] in lines:
                lines[match[1]] += match[2] + "\n"
        return Run(code, lines, output)


def ask(host: Host, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a machine other than the host gets from its server; nothing if it gets nothing."""
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{host.address}:{PORT}{path}", data=data, timeout=5) as response:
            answer = json.load(response)
    except OSError:
        return {}
    return answer if isinstance(answer, dict) else {}
