"""What a fleet costs: a converge that changes nothing, and a push of a changed flag.

Side by side, in turn, on the same hosts: pyinfra's own floor (connect and run `true`), Kernelswap, and an Ansible
playbook that keeps the same unit (ansible/site.yml). The server is the stand-in, since a hundred real ones do not fit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import Cost, shown, spread

from labhost import Host, own_lab  # isort: skip
from project import MODEL, Project, asking, count_sessions  # isort: skip

ANSIBLE = Path(__file__).parent / "ansible"
VENV = measure.ROOT / ".venv-ansible"
PROFILE, OTHER = "plain", "triton"
PUSHED = 10  # hosts to which a push is measured; to a hundred it takes most of an hour on two cores
UNIT = "/etc/systemd/system/sglang-main.service"
# A hundred servers that start at once on two cores take their time.
PATIENT = MODEL.replace("timeouts: {ready: 60, clean: 20}", "timeouts: {ready: 900, clean: 600, smoke: 900}")


@dataclass(frozen=True)
class Fleet:
    """Hosts that all serve PROFILE, and the two ways to keep them so."""

    project: Project
    hosts: Sequence[Host]
    folder: Path

    def floor(self) -> Cost:
        words = [str(measure.BIN / "pyinfra"), "inventory/hosts.py", "exec", "-y", "--", "true"]
        return measure.run(words, self.project.folder)

    def converge(self) -> Cost:
        cost = measure.run(self.project.words("-y"), self.project.folder)
        if "Starting operation" in cost.output:
            raise SystemExit(f"a host did not serve its profile:\n{cost.output[-4000:]}")
        return cost

    def push(self, profile: str) -> Cost:
        return measure.run(self.project.words("--profile", profile, "-y"), self.project.folder)

    def playbook(self, profile: str = PROFILE) -> Cost:
        words = [
            str(VENV / "bin/ansible-playbook"),
            str(ANSIBLE / "site.yml"),
            "--inventory",
            str(self.folder / "inventory.ini"),
        ]
        environment = {"ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"), "ANSIBLE_HOME": str(self.folder)}
        return measure.run([*words, "--extra-vars", f"unit={self.unit(profile)}"], self.folder, environment)

    def unit(self, profile: str) -> Path:
        return self.folder / f"{profile}.service"

    @property
    def pushes(self) -> bool:
        """Whether pushes are measured, too."""
        return len(self.hosts) <= PUSHED

    def prepare(self) -> Cost:
        """The hosts serve PROFILE and have served what is pushed; its units are here. What the first deploy took."""
        first = self.push(PROFILE)
        self._keep_unit(PROFILE)
        if self.pushes:
            self.push(OTHER)
            self._keep_unit(OTHER)
            self.push(PROFILE)
        lines = [f"{host.name} ansible_host={host.address}" for host in self.hosts]
        config = f"-F {self.hosts[0].lab.folder / 'ssh_config'}"
        text = "\n".join([*lines, "[all:vars]", "ansible_user=root", f"ansible_ssh_common_args='{config}'"])
        (self.folder / "inventory.ini").write_text(text + "\n")
        return first

    def _keep_unit(self, profile: str) -> None:
        self.unit(profile).write_text(self.hosts[0].read(UNIT))


def measure_fleet(sizes: Sequence[int], repeat: int) -> None:
    on = {**measure.machine(), "ansible-core": install_ansible()}
    found = []
    with own_lab("bench") as lab, tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            place = Path(folder, str(size))
            (place / "project").mkdir(parents=True)
            hosts = lab.up(size)[:size]
            project = Project(place / "project", [(host, {}) for host in hosts]).write()
            project.model(PATIENT)
            found.append(of_size(Fleet(project, hosts, place), repeat))
            result = {"machine": on, "repeat": repeat, "sizes": found}
            measure.keep("fleet", "A fleet", result, text(found, on["ansible-core"]))


def of_size(fleet: Fleet, repeat: int) -> dict[str, Any]:
    first = fleet.prepare()
    arms: dict[str, Callable[[], Cost]] = {
        "floor": fleet.floor,
        "converge": fleet.converge,
        "ansible": fleet.playbook,
    }
    pushes: dict[str, Callable[[str], Cost]] = {}
    if fleet.pushes:
        pushes = {"push": fleet.push, "ansible push": fleet.playbook}
    count_sessions(fleet.hosts[0])
    commands = {name: asking(fleet.hosts[0], arm)[1] for name, arm in arms.items()}  # and a warm-up
    costs: dict[str, list[Cost]] = {name: [] for name in (*arms, *pushes)}
    for turn in range(repeat):
        for name in sorted(arms, reverse=bool(turn % 2)):
            costs[name].append(arms[name]())
    for turn in range(max(2, repeat // 2)):
        for name in sorted(pushes, reverse=bool(turn % 2)):
            for profile in (OTHER, PROFILE):  # there and back, so that both leave the hosts as they were
                cost, asked = asking(fleet.hosts[0], lambda name=name, to=profile: pushes[name](to))
                costs[name].append(cost)
                commands[name] = asked
    ratio = {
        "converge / floor": ratios(costs["converge"], costs["floor"]),
        "ansible / converge": ratios(costs["ansible"], costs["converge"]),
    }
    if fleet.pushes:
        ratio["ansible push / push"] = ratios(costs["ansible push"], costs["push"])
    return {
        "hosts": len(fleet.hosts),
        "first_deploy_s": round(first.wall, 1),
        "arms": {name: summary(values, commands[name]) for name, values in costs.items()},
        "ratios": ratio,
    }


def ratios(ours: Sequence[Cost], theirs: Sequence[Cost]) -> dict[str, float]:
    """Turn by turn, so that what else the machine does hits both."""
    return spread(a.wall / b.wall for a, b in zip(ours, theirs, strict=True))


def summary(costs: Sequence[Cost], commands: int) -> dict[str, Any]:
    return {
        "wall_s": spread(cost.wall for cost in costs),
        "cpu_s": spread(cost.cpu for cost in costs),
        "memory_mib": round(max(cost.memory for cost in costs)),
        "commands_per_host": commands,
    }


def text(found: Sequence[Mapping[str, Any]], ansible: str) -> str:
    named = {
        "floor": "floor: connect, run `true`",
        "converge": "Kernelswap, nothing to do",
        "ansible": "Ansible, nothing to do",
        "push": "Kernelswap, another flag",
        "ansible push": "Ansible, another flag",
    }
    rows = [
        (
            str(size["hosts"]),
            named[name],
            shown(arm["wall_s"]),
            shown(arm["cpu_s"]),
            str(arm["memory_mib"]),
            str(arm["commands_per_host"]),
        )
        for size in found
        for name, arm in size["arms"].items()
    ]
    heads = (
        "hosts",
        "what",
        "seconds",
        "controller's CPU, seconds",
        "largest process, MiB",
        "remote commands per host",
    )
    compares = list(dict.fromkeys(name for size in found for name in size["ratios"]))
    compared = [
        (
            str(size["hosts"]),
            *(shown(size["ratios"][name]) if name in size["ratios"] else "" for name in compares),
            f"{per_host(size):.3f}",
        )
        for size in found
    ]
    names = ("hosts", *compares, "seconds per host, nothing to do")
    return f"""
Medians (lowest to highest), measured in turn on the same hosts, which share this machine's cores with the controller.
Ansible is ansible-core {ansible} with pipelining, ControlPersist and 50 forks. A push of Kernelswap stops the old
server, proves the host clean, verifies the new one and commits it; the playbook restarts the unit and waits for
`/health`. Pushes are measured up to {PUSHED} hosts, whose servers all start on the same cores.

{measure.table(heads, rows)}

{measure.table(names, compared)}
"""


def per_host(size: Mapping[str, Any]) -> float:
    return float(size["arms"]["converge"]["wall_s"]["median"] / size["hosts"])


def install_ansible() -> str:
    """Into an environment of its own: it is no dependency of ours. Returns its version."""
    if not (VENV / "bin/ansible-playbook").exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        pip = [VENV / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", ANSIBLE / "requirements.txt"], check=True)
    words = [str(VENV / "bin/python"), "-c", "from importlib.metadata import version; print(version('ansible-core'))"]
    return measure.run(words, measure.ROOT).output.strip()
