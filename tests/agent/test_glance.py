"""What is read for a deploy at first sight says what the agent would say, and leaves to it what is more than that."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_recorded import CASES, lay_out
from world import Scenario, World, before

from kernelswap import ledger
from kernelswap.agent import files, glance, host, inspection, member, processes, units
from kernelswap.protocol import DRIFT_UNITS, Report, Request, StepResult, encode, keyed_digest, unit_name

UNITS = [unit_name("main"), "kernelswap-swap-main.service", member.unit_name("main")]
STATUS = units.UnitStatus("active", "running", 7, "/etc/x", True, "", "success", 5.0)


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = before(tmp_path, Scenario("over a known-good", "b-2", (), known_good="a-1"))
    world.stage("b-2")
    (world.folders.release("b-2") / "secrets.yaml").write_text('api-key: "x"\n')
    (tmp_path / "usr/local/lib/kernelswap").mkdir(parents=True)
    (tmp_path / "usr/local/lib/kernelswap/agent.pyz").write_bytes(b"PK")
    (tmp_path / "etc/kernelswap/key").write_text("k3y\n")
    return world


def look(world: World, instance: str = "main") -> dict[str, Any]:
    seen = glance.look([instance], ["root", "nobody-of-that-name"], f"{world.root}/")
    told: dict[str, Any] = ast.literal_eval(ascii(seen))  # as it comes to the controller
    return told


def test_what_is_there_is_seen(world: World) -> None:
    folders = world.folders
    state = inspection.state_of(look(world), dict.fromkeys(UNITS, STATUS))
    (instance,) = state.instances
    assert (state.agent, state.key, state.users) == (
        hashlib.blake2b(b"PK").hexdigest(),
        "k3y",
        ("root",),
    )
    assert (instance.known_good, instance.unit_intact, instance.unit_state) == ("a-1", True, "active")
    assert instance.plan == host.read_plan(folders, "a-1")
    assert sorted(instance.releases) == host.staged(folders) == ["a-1", "b-2"]
    wanted = {name: host.digest(folders.release("b-2") / name) for name in (unit_name("main"), "plan.json")}
    assert instance.releases["b-2"] == {**wanted, "secrets.yaml": ""}
    assert instance.history == tuple(host.history(folders))
    assert instance.rollback_target == host.rollback_target(folders)


@pytest.mark.parametrize("key", ["k3y", "k" * 65, "é" * 20])
def test_what_says_where_users_come_from_is_told_by_its_keyed_digest_only(world: World, key: str) -> None:
    (world.root / "etc/kernelswap/key").write_text(f"{key}\n")
    world.folders.traffic.unlink()
    assert look(world)["instances"]["main"]["traffic"] == ""
    world.folders.traffic.write_text('{"key": "s3cret"}')
    seen = look(world)
    assert seen["instances"]["main"]["traffic"] == keyed_digest(key, '{"key": "s3cret"}')
    assert "s3cret" not in str(seen)


def test_where_metrics_go_and_what_looks_for_drift(world: World) -> None:
    assert (look(world)["metrics"], look(world)["drift_units"]) == ("", "")
    etc = world.root / "etc"
    (etc / "kernelswap/metrics").symlink_to("/var/lib/metrics")
    (etc / "systemd/system/timers.target.wants").mkdir(parents=True)
    for name, text in zip(DRIFT_UNITS, ("[Service]\n", "[Timer]\n")):
        (etc / "systemd/system" / name).write_text(text)
    assert look(world)["drift_units"] == ""  # the timer is not enabled
    (etc / "systemd/system/timers.target.wants" / DRIFT_UNITS[1]).write_text("")
    seen = look(world)
    assert (seen["metrics"], seen["drift_units"]) == (
        "/var/lib/metrics",
        hashlib.sha256(b"[Service]\n[Timer]\n").hexdigest(),
    )


@pytest.mark.parametrize("change", ["unit", "candidate", "settings", "link"])
def test_what_is_not_as_it_was_committed_is_not_intact(world: World, change: str) -> None:
    folders = world.folders
    if change == "unit":
        folders.committed_unit.write_text("[Unit]\nDescription=edited\n")
    elif change == "candidate":
        files.write(folders.candidate_unit, "[Unit]\n")
    elif change == "settings":
        files.write(folders.candidate_settings / "x.conf", "[Service]\n")
    else:
        files.link(folders.known_good, "releases/b-2")
    assert not host.is_intact(folders, host.known_good(folders) or "")
    assert not look(world)["instances"]["main"]["intact"]


def test_nothing_is_seen_of_an_instance_that_is_none(world: World) -> None:
    seen = look(world, "other")
    (instance,) = inspection.state_of(seen, dict.fromkeys(glance.unit_names(["other"]), units.ABSENT)).instances
    assert (instance.known_good, instance.unit_state, instance.unit_intact) == (None, "absent", False)
    assert (instance.releases, instance.history, instance.plan) == ({}, (), None)


def test_a_long_history_bars_and_leads_back_as_a_whole_one_does(world: World) -> None:
    steps = (StepResult("preflight", 1.0, True, "\u2028 one line only"),)
    asked = Request("s0", "main", "converge", "bad-1", "ann")
    reports = [Report(asked, "committed", 1.0, 2.0, serving="a-1", steps=steps)]
    for number in range(glance.WHOLE + 20):
        request = replace(asked, swap=f"s{number + 1}", release=f"b-{number % 3}")
        reports.append(Report(request, "committed", 1.0, 2.0, serving="b-2", steps=steps))
    for report in reports:
        files.append(world.folders.history, encode(report))
    files.append(world.folders.history, '{"torn')
    (instance,) = inspection.state_of(look(world), dict.fromkeys(UNITS, STATUS)).instances
    whole = host.history(world.folders)
    assert len(instance.history) == inspection.HISTORY_SHOWN
    assert instance.history[-1] == whole[-1]
    assert set(instance.barred) == ledger.barred(whole)
    assert instance.rollback_target == ledger.rollback_target(whole, {"a-1", "b-2"})


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_no_server_is_overlooked(path: Path, tmp_path: Path) -> None:
    lay_out({"gpus": [], **json.loads(path.read_text())}, tmp_path)
    table = processes.table(tmp_path)
    if any(head.unit not in UNITS for head in processes.servers(table)):
        assert glance.others(str(tmp_path), UNITS)


def test_our_own_server_is_nothing_more(tmp_path: Path) -> None:
    words = ["/opt/sglang/bin/python", "-m", "sglang.launch_server", "--port", "30000"]
    row = {"pid": 700, "parent": 1, "argv": words, "cgroup": f"/system.slice/{UNITS[0]}"}
    lay_out({"processes": [row]}, tmp_path)
    assert not glance.others(str(tmp_path), UNITS)
    assert glance.others(str(tmp_path), [unit_name("other")])


def test_whoever_asks_is_no_server(tmp_path: Path) -> None:
    mine = {
        "pid": os.getpid(),
        "parent": 70,
        "argv": ["python3", "-c", "sglang"],
        "cgroup": "/system.slice/ssh.service",
    }
    above = {"pid": 70, "parent": 1, "argv": ["sh", "-c", "python3 -c sglang"], "cgroup": "/system.slice/ssh.service"}
    lay_out({"processes": [mine, above]}, tmp_path)
    assert not glance.others(str(tmp_path), UNITS)


@pytest.mark.parametrize(
    ("agent", "journal", "quiet"),
    [("inactive", False, True), ("failed", False, True), ("active", False, False), ("inactive", True, False)],
)
def test_a_swap_under_way_is_for_the_agent_to_tell(agent: str, journal: bool, quiet: bool) -> None:
    seen = {"units": dict(zip(UNITS, ("ActiveState=active\nMainPID=7", f"ActiveState={agent}\nMainPID=0\n")))}
    assert glance.is_quiet({**seen, "instances": {"main": {"journal": journal}}}) is quiet


def test_systemds_answer_is_read_as_the_agent_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "systemctl"
    tool.write_text('#!/bin/sh\nprintf "%s " "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert glance.show(UNITS) == units._systemctl("show", f"--property={glance.PROPERTIES}", "--", *UNITS)
    tool.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(OSError, match="systemctl failed"):
        glance.show(UNITS)


def test_systemd_is_asked_for_what_has_a_file(tmp_path: Path) -> None:
    assert glance.known(UNITS, f"{tmp_path}/") == UNITS[:1]
    for place, name in (("run/systemd/transient", UNITS[1]), (glance.WANTS, UNITS[2])):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / name).symlink_to("/nowhere")
    assert glance.known(UNITS, f"{tmp_path}/") == UNITS


def test_what_systemd_was_not_asked_for_is_not_there(world: World) -> None:
    said = "\n".join(f"{name}=" for name in glance.PROPERTIES.split(","))
    said = said.replace("MainPID=", "MainPID=7").replace("ActiveState=", "ActiveState=active")
    (instance,) = inspection.glanced({**look(world), "units": {UNITS[0]: said}}).instances
    assert (instance.unit_state, instance.main_pid, instance.member) == ("active", 7, "disabled")


def test_hardly_a_module_is_loaded() -> None:
    code = f"import sys; exec(open({glance.__file__!r}).read(), {{'__name__': 'glance'}}); print(set(sys.modules))"
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True)
    heavy = {"collections", "contextlib", "dataclasses", "enum", "json", "pathlib", "re", "subprocess", "typing"}
    assert heavy & ast.literal_eval(done.stdout) == set()
