"""A swap is cut short at every moment, in every way that a power cut or a kill can leave the disk; then it is closed.

The host is that of world.py, the disk that of disk.py.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import disk
import pytest
from systemd import WANTS, Systemd
from world import SCENARIOS, SWAP, UNIT, Scenario, World, before

from kernelswap.agent import files, host, service
from kernelswap.protocol import Request, encode

Way = tuple[str, disk.Folder, "Systemd | None"]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: thousands of small files are made."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def moments(folder: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> list[disk.Moment]:
    """Every moment of the whole swap."""
    world = before(folder / "before", scenario)
    watched = disk.Disk(world.root, lambda: world.systemd.at(world.root))
    with world.entered(monkeypatch, scenario.broken), watched.watched(monkeypatch):
        if not world.folders.release(scenario.release).exists():
            world.stage(scenario.release)
        watched.note("staged")
        start = len(watched.moments)
        files.make_folder(world.folders.state)
        request = Request(SWAP, "main", scenario.action, scenario.release, "ann")
        files.write(world.folders.request, encode(request), mode=0o600)
        service.run("main", SWAP)
    (report,) = [report for report in world.reports if report.request.swap == SWAP]
    assert report.outcome == ("committed" if "committed" in scenario.ends else scenario.ends[-1])
    return watched.moments[start:]


def ways(found: list[disk.Moment]) -> Iterator[Way]:
    """Every distinct state in which the agent's death, or the host's, can leave things; the former with its systemd."""
    seen = set()
    for number, moment in enumerate(found):
        for name, tree in moment.after_power_cut():
            rebooted = disk.Folder({**tree.names, "run": disk.Folder({"systemd": disk.Folder()})})
            if repr(rebooted) not in seen:
                seen.add(repr(rebooted))
                yield f"{number}, before {moment.call}: {name}", rebooted, None
        key = repr((moment.now, moment.memory.running))
        if key not in seen:
            seen.add(key)
            yield f"{number}, before {moment.call}: killed", moment.now, moment.memory


def wake(root: Path, tree: disk.Folder, systemd: Systemd | None, boot: str) -> World:
    """The host after the cut: booted, or with its systemd as it was."""
    disk.put(tree, root)
    world = World(root, Systemd(root), boot)
    if systemd:
        world.systemd = systemd.at(root)
        world.systemd.loaded = {unit: root / path.relative_to(systemd.root) for unit, path in systemd.loaded.items()}
    else:
        world.systemd.boot()
    return world


def close(world: World) -> None:
    """As the recover unit does; where no swap is open it is not started, and what is unfinished waits for the next."""
    if world.folders.journal.exists():
        service.recover("main")
        assert not list(world.root.rglob(".*"))


def judge(world: World, scenario: Scenario) -> None:
    """The host has ended in exactly one allowed way, and everything on it says so."""
    folders = world.folders
    reports = world.reports
    assert [report.request.swap for report in reports if report.request.swap != SWAP] == scenario.swaps_before
    outcomes = [report.outcome for report in reports if report.request.swap == SWAP]
    assert len(outcomes) <= 1
    assert not folders.journal.exists()
    outcome = outcomes[0] if outcomes else "refused"
    assert outcome in (*scenario.ends, "refused"), reports[-1]
    good = scenario.release if outcome == "committed" else scenario.known_good
    assert host.known_good(folders) == good
    served = good or ("zero" if scenario.hand_written else None)
    assert world.serving == ({served} if served else set())
    enabled = {link.name for link in (world.root / WANTS).iterdir()}
    assert enabled == ({UNIT} if good else {scenario.hand_written} if served else set())
    if good:
        assert host.is_intact(folders, good)
    elif scenario.hand_written == UNIT:
        assert "release zero" in folders.committed_unit.read_text()
    else:
        assert not folders.committed_unit.exists()
    masked = {path.name for path in (world.root / "run").rglob("*") if path.is_symlink()}
    assert not masked or outcome == "committed"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_whatever_is_cut_it_ends_well(scenario: Scenario, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(ways(moments(memory, scenario, monkeypatch)))
    assert len(found) > 200
    faults = closed_badly(found, ("boot-1", "boot-2"), scenario, memory, monkeypatch)
    assert not faults, f"{len(faults)} of {len(found)}:\n" + "\n".join(faults[:10])


@pytest.mark.parametrize("name", ["over a known-good", "back to release zero"])
def test_what_closes_it_may_be_cut_too(name: str, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    found = list(ways(moments(memory, scenario, monkeypatch)))
    faults = []
    for number, (first, tree, systemd) in enumerate(found[len(found) // 4 :: len(found) // 6]):
        folder = memory / f"again-{number}"
        folder.mkdir()
        boot = "boot-1" if systemd else "boot-2"
        world = wake(folder / "first", tree, systemd, boot)
        watched = disk.Disk(world.root, partial(world.systemd.at, world.root))
        with world.entered(monkeypatch), watched.watched(monkeypatch):
            close(world)
        second = list(ways(watched.moments))
        assert len(second) > 20, first
        faults += [
            f"{first}, then {fault}" for fault in closed_badly(second, (boot, "boot-3"), scenario, folder, monkeypatch)
        ]
    assert not faults, f"{len(faults)}:\n" + "\n".join(faults[:10])


def closed_badly(
    found: list[Way], boots: tuple[str, str], scenario: Scenario, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Close the swap out of each state; one line for each that does not end well. boots: if killed, and if rebooted."""
    faults = []
    for number, (name, tree, systemd) in enumerate(found):
        world = wake(folder / str(number), tree, systemd, boots[0] if systemd else boots[1])
        with world.entered(monkeypatch), monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _handle: None)
            try:
                close(world)
                judge(world, scenario)
                world.boot = "the last boot"
                world.systemd.boot()
                judge(world, scenario)
            except Exception as error:
                line = traceback.extract_tb(error.__traceback__)[-1]
                faults.append(f"{name}: {type(error).__name__} {error} {line.name}:{line.lineno}: {line.line}")
        shutil.rmtree(world.root)
    return faults
