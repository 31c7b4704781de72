"""What is read for a deploy at first sight says what the agent would say, and leaves to it what is more than that."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_recorded import CASES, lay_out
from world import Scenario, World, before

from kernelswap import ledger
from kernelswap.agent import files, glance, host, member, processes
from kernelswap.agent.state import ABSENT, HISTORY_SHOWN, Unit, glanced, state_of
from kernelswap.protocol import DRIFT_UNITS, Report, Request, StepResult, encode, keyed_digest, unit_name

UNITS = [unit_name("main"), "kernelswap-swap-main.service", member.unit_name("main")]
RUNS = Unit("active", 7, 5.0, True)


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
    state = state_of(look(world), dict.fromkeys(UNITS, RUNS))
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
    (instance,) = state_of(look(world, "other"), dict.fromkeys(glance.unit_names(["other"]), ABSENT)).instances
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
    (instance,) = state_of(look(world), dict.fromkeys(UNITS, RUNS)).instances
    whole = host.history(world.folders)
    assert len(instance.history) == HISTORY_SHOWN
    assert instance.history[-1] == whole[-1]
    assert set(instance.barred) == ledger.barred(whole)
    assert instance.rollback_target == ledger.rollback_target(whole, {"a-1", "b-2"})


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_no_server_is_overlooked(path: Path, tmp_path: Path) -> None:
    lay_out({"gpus": [], **json.loads(path.read_text())}, tmp_path)
    table = processes.table(tmp_path)
    if any(head.unit not in UNITS for head in processes.servers(table)):
        assert glance.servers(str(tmp_path), UNITS) is None


def row(pid: int, *words: str, unit: str = UNITS[0], **more: object) -> dict[str, Any]:
    return {"pid": pid, "parent": 1, "argv": list(words), "cgroup": f"/system.slice/{unit}", "session": pid, **more}


MAIN = row(700, "/opt/sglang/bin/python", "-m", "sglang.launch_server", "--port", "30000")
RANK = row(90, "sglang::scheduler_TP0", parent=700, session=700)
GUARD = row(95, "/usr/bin/python3", "-IS", glance.AGENT, "guard", "sgl")
MEMBER = row(96, "/usr/bin/python3", "-IS", glance.AGENT, "member", "sgl", unit=UNITS[2])


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([MAIN, RANK], {UNITS[0]}),
        ([MAIN, RANK, MEMBER], {UNITS[0]}),
        ([RANK], set()),  # its main process has ended, and it hangs
        ([RANK, GUARD], set()),  # and the guard of the next start waits for that
        ([{**MAIN, "state": "Z"}], set()),
        ([{**MAIN, "torn": True}], set()),
        ([{**MAIN, "cgroup": "/system.slice/sglang-other.service"}], None),
    ],
)
def test_our_own_server_is_nothing_more(rows: list[dict[str, Any]], found: object, tmp_path: Path) -> None:
    lay_out({"processes": rows}, tmp_path)
    assert glance.servers(str(tmp_path), UNITS) == found


def test_whoever_asks_is_no_server(tmp_path: Path) -> None:
    mine = {
        "pid": os.getpid(),
        "parent": 70,
        "argv": ["python3", "-c", "sglang"],
        "cgroup": "/system.slice/ssh.service",
    }
    above = {"pid": 70, "parent": 1, "argv": ["sh", "-c", "python3 -c sglang"], "cgroup": "/system.slice/ssh.service"}
    lay_out({"processes": [mine, above]}, tmp_path)
    assert glance.servers(str(tmp_path), UNITS) == set()


SERVER, SWAP, KEEPER = UNITS


@pytest.mark.parametrize(
    ("begun", "enabled", "there", "serves", "seen"),
    [
        ((SERVER,), (SERVER,), (SERVER,), True, {SERVER: 5.0}),
        ((SERVER, KEEPER), (SERVER, KEEPER), (SERVER,), True, {SERVER: 5.0, KEEPER: 5.0}),
        ((SERVER,), (SERVER, KEEPER), (SERVER,), True, {SERVER: 5.0}),  # the keeper has failed, or has no routers now
        ((SERVER, KEEPER), (SERVER,), (SERVER,), True, {SERVER: 5.0}),  # the next boot does not start it
        ((), (), (), False, {}),
        ((SERVER,), (), (SERVER,), True, None),  # another target may start it
        ((SERVER,), (SERVER,), (SERVER,), False, None),  # its guard proves the host clean
        ((), (SERVER,), (SERVER,), False, None),  # stopped, or failed
        ((), (SERVER,), (SERVER,), True, None),  # failed, and a process remains
        ((), (), (SERVER,), False, None),
        ((), (), (), True, None),
        ((SERVER, SWAP), (SERVER,), (SERVER,), True, None),
        ((SERVER,), (SERVER,), (SERVER, SWAP), True, None),
    ],
)
def test_what_is_under_way_or_broken_is_for_the_agent_to_tell(
    begun: Sequence[str], enabled: Sequence[str], there: Sequence[str], serves: bool, seen: object, tmp_path: Path
) -> None:
    links = [*(glance.BEGUN + name for name in begun), *(f"{glance.WANTS}/{name}" for name in enabled)]
    links += [f"{'run/systemd/transient' if name == SWAP else 'etc/systemd/system'}/{name}" for name in there]
    for link in links:
        path = tmp_path / link
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/nowhere")
        os.utime(path, (5, 5), follow_symlinks=False)
    assert glance.running(["main"], {SERVER} if serves else set(), f"{tmp_path}/") == seen


def test_what_runs_is_judged_as_the_agent_judges_it(world: World) -> None:
    (instance,) = glanced({**look(world), "units": {SERVER: 5.0}}).instances
    assert (instance.unit_state, instance.unit_since, instance.member) == ("active", 5.0, "disabled")
    (instance,) = glanced({**look(world), "units": {SERVER: 5.0, KEEPER: 5.0}}).instances
    assert (instance.unit_intact, instance.member) == (True, "active")
    (instance,) = glanced({**look(world), "units": {}}).instances
    assert (instance.unit_state, instance.unit_since, instance.unit_intact) == ("absent", None, False)


def test_hardly_a_module_is_loaded() -> None:
    code = f"import sys; exec(open({glance.__file__!r}).read(), {{'__name__': 'glance'}}); print(set(sys.modules))"
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True)
    heavy = {"collections", "contextlib", "dataclasses", "enum", "json", "pathlib", "re", "subprocess", "typing"}
    assert heavy & ast.literal_eval(done.stdout) == set()
