"""How long users get no answer while a server is swapped, beyond what its start takes by itself.

On one host, with the real SGLang, in turn: Kernelswap (`expose: ready`), the same swap by hand, and the least that it
can be: `systemctl restart` of a unit that was changed before. Two probes ask for a token every 20 ms: from outside, as
users do, which gives the downtime; and on the host, which tells when a started server first answered at all.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import shown, spread

from labhost import Host, own_lab  # isort: skip
from project import Project  # isort: skip

HERE = Path(__file__).parent
PORT = 30000
PROFILES = ("first", "second")
HAND = "sglang-hand.service"
SETTLE = 2.0  # seconds of answers before and after


@dataclass
class Answers:
    """When answers came, in seconds of CLOCK_MONOTONIC, which this machine and its hosts share."""

    outside: list[float] = field(default_factory=list)
    on_host: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Downtime:
    """Seconds. down: nobody got an answer; start: from the new main process to its first answer on the host."""

    down: float
    start: float

    @property
    def beyond(self) -> float:
        return self.down - self.start


def measure_downtime(pairs: int) -> None:
    on = measure.machine()
    with own_lab("bench") as lab, tempfile.TemporaryDirectory() as folder:
        (host,) = lab.up(1)
        swaps = Swaps(host, project(Path(folder) / "project", host))
        swaps.prepare()
        found: dict[str, list[Downtime]] = {"kernelswap": [], "by hand": [], "restart": []}
        for turn in range(pairs):
            for name in sorted(found, reverse=bool(turn % 2)):
                found[name].append(swaps.measure(name, PROFILES[(turn + 1) % 2]))
                print(f"{turn + 1}/{pairs} {name}: {found[name][-1]}", file=sys.stderr)
    arms = {
        name: {kind: spread(getattr(each, kind) for each in values) for kind in ("down", "start", "beyond")}
        for name, values in found.items()
    }
    measure.keep(
        "swap_downtime", "Downtime of a swap", {"machine": on, "pairs": pairs, "arms": arms}, text(arms, pairs)
    )


def project(folder: Path, host: Host) -> Project:
    """The lab's model, verified shortly and exposed as early as can be; two profiles that differ in a flag."""
    folder.mkdir()
    made = Project(folder, [(host, {"profile": PROFILES[0]})]).write()
    tiny = (measure.ROOT / "inventory/models/tiny.yaml").read_text()
    lines = [line for line in tiny.splitlines() if not line.startswith("  throughput:")]
    quick = "\n".join(lines).replace("min-healthy: 2", "min-healthy: 0\n  drift: null")
    quick = quick.replace("ready: 180", "ready: 900").replace("smoke: 60", "smoke: 600")
    made.model(f"{quick}\nexpose: ready\n")
    torch = (measure.ROOT / "inventory/profiles/torch-native.yaml").read_text()
    for seed, name in enumerate(PROFILES):
        made.profile(name, f"{torch}  random-seed: {seed + 1}\n")
    return made


@dataclass
class Swaps:
    host: Host
    project: Project

    def prepare(self) -> None:
        """Both releases were served once; each kind of hand-written unit is there for both."""
        self.host.write("/root/by_hand.sh", (HERE / "by_hand.sh").read_bytes(), 0o755)
        self.host.write("/root/probe.py", (HERE / "probe.py").read_bytes())
        for profile in (*PROFILES, PROFILES[0]):
            self.by_kernelswap(profile)
            unit = self.host.read("/etc/systemd/system/sglang-main.service")
            self.host.write(self.unit(profile), unguarded(unit))

    @staticmethod
    def unit(profile: str) -> str:
        return f"/root/{profile}.service"

    def by_kernelswap(self, profile: str) -> None:
        measure.run(self.project.words("--profile", profile, "-y"), self.project.folder)

    def measure(self, name: str, profile: str) -> Downtime:
        """Swap from the other profile to this one, with the same server before it whoever swaps."""
        if name == "kernelswap":
            return self.watched("sglang-main.service", lambda: self.by_kernelswap(profile))
        other = next(each for each in PROFILES if each != profile)
        with self.served_by_hand(self.unit(other)):
            script = f"/root/by_hand.sh {self.unit(profile)} {'restart' if name == 'restart' else ''}"
            return self.watched(HAND, lambda: self.host.run(script, timeout=900))

    @contextmanager
    def served_by_hand(self, unit: str) -> Iterator[None]:
        self.host.run(f"systemctl stop sglang-main; cp {unit} /etc/systemd/system/{HAND}; systemctl daemon-reload")
        self.start(HAND)
        try:
            yield
        finally:
            self.host.run(f"systemctl stop {HAND}; rm /etc/systemd/system/{HAND}; systemctl daemon-reload")
            self.start("sglang-main.service")

    def start(self, unit: str) -> None:
        health = f"curl -fs --max-time 30 -o /dev/null http://127.0.0.1:{PORT}/health"
        self.host.run(f"systemctl start {unit}; until {health}; do sleep 0.5; done", timeout=900)

    def watched(self, unit: str, swap: Callable[[], Any]) -> Downtime:
        with self.probes() as answers:
            time.sleep(SETTLE)
            swap()
            time.sleep(SETTLE)
        last, first = widest_gap(answers.outside)
        property_ = "ExecMainStartTimestampMonotonic"
        started = int(self.host.output(f"systemctl show --property={property_} --value {unit}")) / 1e6
        return Downtime(first - last, min(at for at in answers.on_host if at > started) - started)

    @contextmanager
    def probes(self) -> Iterator[Answers]:
        """Ask from both places while the block runs; the answers are there when it has ended."""
        answers = Answers()
        outside = [sys.executable, str(HERE / "probe.py"), self.host.address, str(PORT), "600"]
        inside = [*self.host.ssh(), f"echo $$; exec python3 /root/probe.py 127.0.0.1 {PORT} 600"]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        with (
            subprocess.Popen(outside, stdin=null, stdout=pipe, text=True) as here,
            subprocess.Popen(inside, stdin=null, stdout=pipe, text=True) as there,
        ):
            pid = int(there.stdout.readline() if there.stdout else "")
            try:
                yield answers
            finally:
                here.terminate()
                self.host.run(f"kill {pid}")
                answers.on_host += map(float, there.communicate()[0].split())
                answers.outside += map(float, here.communicate()[0].split())


def unguarded(unit: str) -> str:
    """A unit as people write it who know how SGLang stops fastest, from ours: without the guard."""
    return "".join(line for line in unit.splitlines(keepends=True) if not line.startswith("ExecStartPre="))


def widest_gap(times: Sequence[float]) -> tuple[float, float]:
    """The last answer before the longest silence, and the first after it."""
    return max(pairwise(sorted(times)), key=lambda pair: pair[1] - pair[0])


def text(arms: Mapping[str, Mapping[str, Mapping[str, float]]], pairs: int) -> str:
    named = {
        "kernelswap": "Kernelswap, `expose: ready`",
        "by hand": "by hand: stop, wait and see that nothing is left, start",
        "restart": "`systemctl restart`, nothing looked at",
    }
    rows = [
        (named[name], *(shown(kinds[kind]) for kind in ("down", "start", "beyond"))) for name, kinds in arms.items()
    ]
    heads = ("swap", "no answer, seconds", "of that the start itself", "beyond the start")
    return f"""
Medians of {pairs} swaps (lowest to highest), in turn on one host: SGLang with the lab's model on CPU, asked for a token
every 20 ms from outside and on the host. The start counts from the new main process to its first answer on the host.
The units by hand stop SGLang as ours do; `benchmarks/by_hand.sh` is what was done. By hand nothing is verified, and
users reach the server as soon as it listens.

{measure.table(heads, rows)}
"""
