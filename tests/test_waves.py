"""Rollouts by the literal command on pyinfra's own simulated hosts: who is asked to swap, when, and who never.

What the hosts themselves then say is for tests/lab/test_push.py.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kernelswap import bundle, decide, protocol
from kernelswap.host_setup import RECOVER_UNIT, unit_text
from kernelswap.library import load_library
from kernelswap.protocol import HostState, InstanceState, Report, Request, Running
from kernelswap.render import Release, render
from kernelswap.spec import host_specs

ROOT = Path(__file__).parent.parent
PYINFRA = str(Path(sys.executable).with_name("pyinfra"))
KEY = "00" * 32
OLD = "old-0123456789ab"
ACCEPTED = {"waves": [1, 3, "50%"]}
DEAD = {"ssh_hostname": "127.0.0.1", "ssh_port": 1}


@dataclass(frozen=True)
class Sim:
    """A simulated host. serves: the release that is committed; fails: whether a swap to `new` fails; took: seconds of
    the last commit; running: a swap to `new` runs; barred: `new` is; staged: whether it lacks no file; data: its own.
    """

    serves: str = OLD
    fails: bool = False
    took: float | None = None
    running: bool = False
    barred: bool = False
    staged: bool = True
    data: Mapping[str, Any] = field(default_factory=dict)


FAILS, SERVES = Sim(fails=True), Sim(serves="new")


@dataclass(frozen=True)
class Run:
    code: int
    text: str

    @property
    def swapped(self) -> list[str]:
        """The hosts that were asked to swap to the new release, in this order."""
        return self._asked("new")

    @property
    def went_back(self) -> list[str]:
        return self._asked("old")

    def _asked(self, profile: str) -> list[str]:
        return re.findall(rf"^\s*\[@fake/([\w-]+)\]\s+asked for {profile}-", self.text, re.MULTILINE)

    def row(self, what: str) -> list[str]:
        """The hosts of a line."""
        lines = re.findall(rf"^\s*{re.escape(what)}: (?:\d+ hosts?: )?(.*)$", self.text, re.MULTILINE)
        return [name.removeprefix("@fake/") for line in lines for name in line.split(", ")]

    @property
    def to_go_on(self) -> list[str]:
        (line,) = re.findall(r"to go on: pyinfra inventory/hosts.py deploy.py (.*)$", self.text, re.MULTILINE)
        return shlex.split(line)

    def __contains__(self, words: str) -> bool:
        return words in self.text


@dataclass(frozen=True)
class Fleet:
    folder: Path

    @property
    def new(self) -> Release:
        library = load_library(self.folder / "inventory")
        (spec,) = host_specs(library, {"model": "tiny", "profile": "new"})
        return render(spec, {}, KEY, self.folder / "templates")

    def declare(self, hosts: Mapping[str, Sim | dict[str, Any]], rollout: Any = None, more: str = "") -> None:
        """Write the inventory. A dict is the data of a host that is none of the simulated."""
        shared = {"model": "tiny", "profile": "new", **({} if rollout is None else {"rollout": rollout})}
        new = self.new
        named = [self._host(name, host, new) for name, host in hosts.items()]
        (self.folder / "inventory" / "hosts.py").write_text(f"gpu = ({named!r}, {shared!r})\n{more}")

    def _host(self, name: str, host: Sim | dict[str, Any], new: Release) -> tuple[str, dict[str, Any]]:
        if isinstance(host, dict):
            return name, host
        answers: dict[str, Any] = {"A glance at a host": protocol.encode(self._state(host, new))}
        for release in (new.name, OLD):
            fails = host.fails and release == new.name
            end = f"ROLLED BACK from {release} in 1.0 s\n  cause: no kernel image" if fails else f"committed {release}"
            answers[f'"release":"{release}"'] = {"success": not fails, "stdout": f"asked for {release}\n{end}"}
        return f"@fake/{name}", {"fake_responses": answers, "fake_delay": 0.02, "fake_delay_jitter": 0, **host.data}

    def _state(self, host: Sim, new: Release) -> HostState:
        request = Request("20261130T023000Z-ab12", "main", "converge", new.name, "ada@desk")
        serves = new.name if host.serves == "new" else host.serves
        files = {name: decide.digest(text) for name, text in new.files.items()} if host.staged else {}
        history = () if host.took is None else (Report(request, "committed", 0.0, host.took),)
        instance = InstanceState(
            "main",
            serves,
            unit_state="active",
            unit_intact=True,
            releases={OLD: {}, new.name: files},
            running=Running(request, 0.0, "ready", True) if host.running else None,
            history=history,
            barred=(new.name,) if host.barred else (),
            rollback_target=new.name if serves == OLD else None,
        )
        unit = decide.digest(unit_text(self.folder / "templates", RECOVER_UNIT))
        return HostState(bundle.build().digest, KEY, ("sglang",), unit, ("main",), (instance,))

    def deploy(self, *words: str) -> Run:
        command = [PYINFRA, "inventory/hosts.py", "deploy.py", *words]
        done = subprocess.run(command, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
        print(f"$ {shlex.join(command)}\n{text}")  # pytest shows it when the test fails
        return Run(done.returncode, text)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    for name in ("deploy.py", "roles", "templates"):
        (tmp_path / name).symlink_to(ROOT / name)
    for kind, name, text in (
        ("models", "tiny", "path: /srv/models/tiny\nflags: {device: cpu}\n"),
        ("profiles", "new", "flags: {moe-runner-backend: triton}\n"),
    ):
        (tmp_path / "inventory" / kind).mkdir(parents=True)
        (tmp_path / "inventory" / kind / f"{name}.yaml").write_text(text)
    return Fleet(tmp_path)


def hosts(count: int, **others: Sim) -> dict[str, Sim | dict[str, Any]]:
    return {name: others.get(name, Sim()) for name in names(1, count)}


def names(first: int, last: int) -> list[str]:
    return [f"gpu{number}" for number in range(first, last + 1)]


HOW = [(), ("--parallel", "2"), ("--serial",), ("--no-wait",)]


def test_a_canary_that_fails_is_the_only_host_touched_and_the_retry_finishes_the_rest(fleet: Fleet) -> None:
    fleet.declare(hosts(20, gpu1=FAILS), ACCEPTED)
    run = fleet.deploy("-y", "--retry", "1", "--retry-delay", "0", "--exclude", "nobody", "--data", "api_key=hunter2")
    assert run.code == 1
    assert run.swapped == ["gpu1"]
    assert run.row("not attempted") == names(2, 20)
    assert "failed: @fake/gpu1: ROLLED BACK from new-" in run
    assert "cause: no kernel image" in run
    assert "hunter2" not in run
    rest = fleet.deploy(*run.to_go_on)
    assert rest.code == 0
    assert sorted(rest.swapped) == sorted(names(2, 20))
    assert rest.swapped[0] == "gpu2"


@pytest.mark.parametrize("how", HOW, ids=" ".join)
def test_a_host_of_wave_2_fails_and_wave_3_is_not_touched_and_all_go_back(fleet: Fleet, how: Sequence[str]) -> None:
    fleet.declare(hosts(12, gpu3=FAILS), {**ACCEPTED, "on_stop": "revert"})
    run = fleet.deploy("-y", *how)
    assert run.code == 1
    assert run.swapped[0] == "gpu1"
    assert "gpu3" in run.swapped
    assert set(run.swapped) <= set(names(1, 4))
    assert sorted(run.went_back) == sorted(set(run.swapped) - {"gpu3"})
    assert sorted(run.row("went back")) == sorted(run.went_back)
    assert set(run.row("not attempted")) == set(names(1, 12)) - set(run.swapped)
    assert set(run.to_go_on[-11 * 2 + 1 :: 2]) == {f"@fake/{name}" for name in names(1, 12)} - {"@fake/gpu3"}


def test_no_wave_begins_before_the_last_has_ended_and_what_was_committed_stays(fleet: Fleet) -> None:
    # The canary lacks files that the others have: pyinfra would order its operations after theirs.
    rollout = {"canary": ["@fake/gpu7"], "waves": [1, 2, "50%"]}
    fleet.declare(hosts(9, gpu7=Sim(staged=False), gpu9=FAILS), rollout)
    run = fleet.deploy("-y")
    assert run.code == 1
    assert run.swapped[0] == "gpu7"
    assert set(run.swapped[1:3]) == {"gpu1", "gpu2"}
    assert set(run.swapped[3:7]) == {"gpu3", "gpu4", "gpu5", "gpu6"}
    assert set(run.swapped[7:]) == {"gpu8", "gpu9"}
    assert not run.went_back
    assert run.row("committed") == ["gpu7", "gpu1", "gpu2", "gpu3", "gpu4", "gpu5", "gpu6", "gpu8"]


def test_so_many_may_fail_and_fail_percent_keeps_its_meaning(fleet: Fleet) -> None:
    fleet.declare(hosts(6, gpu2=FAILS, gpu4=FAILS), {"waves": [1], "max_failed": 1})
    run = fleet.deploy("-y")
    assert run.code == 1
    assert run.swapped == names(1, 4)
    assert run.row("not attempted") == ["gpu5", "gpu6"]
    percent = fleet.deploy("-y", "--fail-percent", "0")
    assert percent.swapped == names(1, 2)
    assert "and --fail-percent is 0" in percent


def test_a_wave_that_leaves_a_router_without_a_server_is_told_in_the_plan(fleet: Fleet) -> None:
    behind = Sim(data={"address": "192.0.2.1", "routers": ["http://192.0.2.9:30000"]})
    fleet.declare(hosts(3, gpu1=behind, gpu2=behind), {"waves": ["100%"]})
    dry = fleet.deploy("--dry")
    assert "wave 1 takes all that serve http://192.0.2.9:30000 out of it at once: @fake/gpu1, @fake/gpu2;" in dry
    assert "takes all that serve" not in fleet.deploy("--dry", "--data", 'rollout={"waves": [1]}')
    assert "takes all that serve" not in fleet.deploy("--dry", "--exclude", "@fake/gpu3")  # it may be behind it, too
    assert "takes all that serve" not in fleet.deploy("--dry", "--serial")


def test_a_host_alone_tells_only_its_own_words(fleet: Fleet) -> None:
    fleet.declare(hosts(1, gpu1=FAILS))
    run = fleet.deploy("-y")
    assert run.code == 1
    assert "cause: no kernel image" in run
    assert "--> The rollout" not in run
    assert "failed: @fake" not in run


def test_unchanged_hosts_are_in_no_wave_and_the_plan_tells_all_before_anything_begins(fleet: Fleet) -> None:
    some = {name: Sim(took=took) for name, took in (("gpu11", 100.0), ("gpu2", 200.0), ("gpu7", 500.0))}
    several = hosts(12, **{**dict.fromkeys(names(1, 12), SERVES), **some})
    fleet.declare(several, {"canary": ["@fake/gpu5", "@fake/gpu7"], "pause": 1})
    dry = fleet.deploy("--dry")
    assert dry.code == 0
    assert not dry.swapped
    plan = [line.strip() for line in dry.text.partition("--> Rollout: ")[2].splitlines()]
    new = fleet.new.name
    assert plan[:7] == [
        "3 hosts in 2 waves, 1 s between them, about 12 min; it stops when more than 0 failed",
        "canary @fake/gpu5: it has nothing to swap; @fake/gpu7 goes first",
        "wave 1 of 2: 1 host, about 8 min",
        f"@fake/gpu7: main: swap: {OLD} -> {new}",
        "wave 2 of 2: 2 hosts, about 3 min",
        f"@fake/gpu2, @fake/gpu11: main: swap: {OLD} -> {new}",
        f"9 hosts: main: unchanged: {new}",
    ]
    run = fleet.deploy("-y")
    assert run.code == 0
    assert all(line in run for line in plan[:7])
    assert run.swapped[0] == "gpu7"
    for noise in ("Skipped", "to go on", "[@fake/gpu3] "):
        assert noise not in run.text.partition("--> Rollout: ")[2].replace("[@fake/gpu3]  Ready", "")


def test_an_unchanged_fleet_runs_no_operation_whatever_its_rollout(fleet: Fleet) -> None:
    for rollout in (None, {"waves": [2], "canary": ["@fake/gpu2"]}):
        fleet.declare(dict.fromkeys(names(1, 3), SERVES), rollout)
        run = fleet.deploy("-y")
        assert run.code == 0
        assert "Starting operation" not in run
        assert "3 hosts: main: unchanged: new-" in run


def test_a_dead_host_counts_or_is_skipped_by_policy_and_is_always_told(fleet: Fleet) -> None:
    several = {**hosts(3), "dead": DEAD}
    fleet.declare(several)
    for words in (("-y",), ("-y", "--dry")):
        none = fleet.deploy(*words)
        assert none.code == 1
        assert not none.swapped
        assert "nothing is started: 1 host failed (dead), and max_failed is 0" in none
        assert "--exclude dead" in none
    fleet.declare(several, {"unreachable": "skip"})
    others = fleet.deploy("-y")
    assert others.code == 1
    assert others.swapped == names(1, 3)
    assert "unreachable: dead: could not be reached or read" in others


def test_a_refused_host_counts_as_failed(fleet: Fleet) -> None:
    fleet.declare(hosts(4, gpu2=Sim(barred=True), gpu3=FAILS), {"max_failed": 1, "waves": [1]})
    run = fleet.deploy("-y")
    assert run.swapped == ["gpu1", "gpu3"]
    assert re.search("failed: @fake/gpu2: new-.* is barred", run.text)
    fleet.declare(hosts(4, gpu2=Sim(barred=True)))
    none = fleet.deploy("-y")
    assert (none.code, none.swapped) == (1, [])
    assert "nothing is started: 1 host failed (@fake/gpu2)" in none


def test_limits_groups_and_excluded_canaries(fleet: Fleet) -> None:
    rack = f"rack = {[f'@fake/{name}' for name in names(4, 8)]!r}\n"
    fleet.declare(hosts(8), {"canary": ["@fake/gpu6"], "waves": [1, "100%"]}, rack)
    run = fleet.deploy("-y", "--limit", "rack", "--exclude", "*gpu6", "--serial")
    assert run.code == 0
    assert run.swapped == ["gpu4", "gpu5", "gpu7", "gpu8"]
    assert "canary @fake/gpu6: it is not in this run (--limit, --exclude); @fake/gpu4 goes first" in run


def test_a_swap_that_runs_already_is_followed_before_any_begins_and_a_rollback_goes_in_waves(fleet: Fleet) -> None:
    fleet.declare(hosts(4, gpu3=Sim(running=True)), {"waves": [1]})
    run = fleet.deploy("-y")
    assert run.code == 0
    assert run.swapped == ["gpu3", "gpu1", "gpu2", "gpu4"]
    fleet.declare(hosts(3, gpu1=FAILS))  # whose commit before is the new release
    back = fleet.deploy("-y", "--rollback")
    assert back.code == 1
    assert back.swapped == ["gpu1"]
    assert "--rollback" in back.to_go_on


def test_all_faults_are_told_before_anything_is_read(fleet: Fleet) -> None:
    said = [{"rollout": {"wave": [1], "waves": [0, "20"], "canary": ["@fake/gpu22"]}}, {"rollout": {"max_failed": 2}}]
    fleet.declare({"gpu1": Sim(data=said[0]), "gpu2": Sim(data=said[1])})
    run = fleet.deploy("-y", "--profile", "nwe")
    assert run.code == 1
    for words in (
        "there is no profile `nwe`; did you mean `new`?",
        "host @fake/gpu1: rollout/wave: unknown key; did you mean `waves`?",
        "host @fake/gpu1: rollout/waves/0: is not the size of a wave",
        "host @fake/gpu1: rollout/waves/1: is not the size of a wave",
        "host @fake/gpu1: rollout/canary: there is no host `@fake/gpu22`; did you mean `@fake/gpu2`?",
        'there is more than one: host @fake/gpu1 says {"wave": [1], ',
        'host @fake/gpu2 says {"max_failed": 2}; say it once',
    ):
        assert words in run
    assert "asked for" not in run
    assert fleet.deploy("-y", "--data", 'rollout={"waves": [2]}').swapped == ["gpu1", "gpu2"]


def test_nobody_to_answer_is_said_in_a_line_and_nothing_begins(fleet: Fleet) -> None:
    fleet.declare(hosts(2))
    run = fleet.deploy()
    assert run.code == 1
    assert "nobody is here to answer: add -y; with --dry it changes nothing" in run
    assert "Traceback" not in run
    assert not run.swapped
    assert "The rollout has" not in run
