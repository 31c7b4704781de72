"""What is deleted on a host, in real folders, and by agents that die of it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import disk
import pytest
from test_transaction import REQUEST
from world import Scenario, World, before

from kernelswap import ledger
from kernelswap.agent import files, glance, host, retention, transaction
from kernelswap.agent.host import Folders
from kernelswap.protocol import Report, Resolved, Retention, encode

POLICY = Retention(releases=3, swaps=4)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Serves a-1, whose plan has the policy."""
    world = before(tmp_path / "host", Scenario("over a known-good", "b-2", (), known_good="a-1"))
    stage(world, "a-1")
    return world


def stage(world: World, release: str, policy: Retention = POLICY) -> None:
    if not world.folders.release(release).exists():
        world.stage(release)
    plan = dataclasses.replace(host.read_plan(world.folders, release), retention=policy)
    files.write(world.folders.release(release) / "plan.json", encode(plan))


def swap(
    world: World, release: str, monkeypatch: pytest.MonkeyPatch, policy: Retention = POLICY, **change: Any
) -> Report:
    stage(world, release, policy)
    request = dataclasses.replace(REQUEST, swap=f"{len(world.reports)}-{release}", release=release, **change)
    files.write(world.folders.request, encode(request))
    with world.entered(monkeypatch):
        return transaction.perform(world.folders, request)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_a_host_keeps_what_its_policy_says(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = world.folders
    for release in ("b-2", "bad-3", "c-4", "bad-5", "d-6", "bad-7", "e-8"):
        swap(world, release, monkeypatch)
        files.write(folders.resolved(release), encode(Resolved(release, "0.5.23", {})))
    swap(world, "f-9", monkeypatch)
    assert names(folders.releases) == {"f-9", "e-8", "d-6"}
    assert names(folders.measured("")) <= {"f-9", "e-8", "d-6"}
    assert names(folders.resolved("any").parent) == {"e-8.json", "d-6.json"}
    assert names(folders.evidence("")) == {"5-d-6", "6-bad-7", "7-e-8", "8-f-9"}
    assert {report.request.release for report in world.reports} == {
        *("a-1", "b-2", "bad-3", "c-4", "bad-5"),  # old commits and bars: a line each
        *("d-6", "bad-7", "e-8", "f-9"),
    }
    assert host.rollback_target(folders) == "e-8"
    for target in ("e-8", "d-6"):
        assert swap(world, target, monkeypatch, action="rollback").outcome == "committed"
    assert host.rollback_target(folders) is None
    refused = swap(world, "bad-3", monkeypatch)
    assert refused.cause
    assert "failed before and is barred" in refused.cause.what


def test_a_failed_swap_deletes_nothing_and_a_refused_one_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Retention(releases=2, swaps=4)
    assert swap(world, "b-2", monkeypatch, two).outcome == "committed"
    for _ in range(6):
        assert swap(world, "bad-3", monkeypatch, two, force=True).outcome == "rolled-back"
    assert len(names(world.folders.evidence(""))) == 7
    assert swap(world, "bad-3", monkeypatch, two).outcome == "refused"
    assert len(names(world.folders.evidence(""))) == 4 + 1, "and of the commit"
    assert names(world.folders.releases) == {"a-1", "b-2", "bad-3"}, "what was just asked for may be asked for again"


@pytest.mark.parametrize("spoilt", ["history", "journal", "link", "plan"])
def test_where_not_all_is_known_nothing_is_deleted(spoilt: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("b-2", "c-3", "d-4", "e-5"):
        swap(world, release, monkeypatch)
    old(world)
    stay, lines = host.staged(world.folders), world.folders.history.read_text().splitlines(keepends=True)
    {
        "history": lambda: files.write(world.folders.history, "".join(lines[:-1])),
        "journal": lambda: files.write(world.folders.journal, "{}"),
        "link": world.folders.known_good.unlink,
        "plan": lambda: (world.folders.known_good / "plan.json").write_text("{"),
    }[spoilt]()
    retention.prune(world.folders)
    assert host.staged(world.folders) == stay


def old(world: World, policy: Retention = Retention(2, 1)) -> None:  # noqa: B008 - frozen
    """A policy by which nearly all may go."""
    stage(world, host.known_good(world.folders) or "", policy)


def test_what_is_staged_right_now_stays(world: World) -> None:
    stage(world, "new-2")
    (world.folders.releases / "half-3").mkdir()
    for name in ("forgotten-4", "half-5"):
        (world.folders.releases / name).mkdir()
        os.utime(world.folders.releases / name, (1, 1))
    files.make_folder(world.folders.evidence("waits"))
    files.write(world.folders.request, encode(dataclasses.replace(REQUEST, swap="waits")))
    os.utime(world.folders.evidence("waits"), (1, 1))
    upload, fresh = (world.folders.release("a-1") / f".secrets.yaml.new-{end}" for end in ("aB3dE6_x", "Zz3dE6_x"))
    upload.write_text("half")
    fresh.write_text("half")
    os.utime(upload, (1, 1))
    retention.prune(world.folders)
    assert names(world.folders.releases) == {"a-1", "new-2", "half-3"}
    assert names(world.folders.evidence("")) == {"waits"}
    assert not upload.exists()
    assert fresh.exists()


def test_links_are_not_followed(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(world.folders.release("a-1"), outside / "a-1")
    for release in ("b-2", "c-3", "d-4"):
        swap(world, release, monkeypatch, Retention(9, 99))
    (world.folders.release("b-2") / "link").symlink_to(outside)
    shutil.rmtree(world.folders.release("a-1"))
    world.folders.release("a-1").symlink_to(outside / "a-1")
    (outside / "old.json").touch()
    (outside / "a-1/.secrets.yaml.new-aB3dE6_x").touch()
    os.utime(outside / "a-1/.secrets.yaml.new-aB3dE6_x", (1, 1))
    for place in (world.folders.measured(""), world.folders.resolved("any").parent):
        shutil.rmtree(place, ignore_errors=True)
        place.symlink_to(outside)
    old(world)
    retention.prune(world.folders)
    assert names(world.folders.releases) == {"c-3", "d-4", "a-1"}
    assert names(outside) == {"a-1", "old.json"}
    assert len(names(outside / "a-1")) == 3


def test_who_looks_meanwhile_sees_no_release(world: World) -> None:
    assert set(glance.digests(str(world.folders.release("a-1")))) == {"plan.json", world.folders.unit}
    assert glance.digests(str(world.folders.release("gone-9"))) == {}
    world.folders.release("a-1").rename(world.folders.releases / f"{retention.GONE}a-1")
    assert "a-1" not in str(glance.look(["main"], [], f"{world.root}/")["instances"]["main"]["releases"])


def test_an_agent_that_dies_at_any_moment_leaves_what_the_next_one_finishes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kill, and by a power cut that loses, keeps or tears what was not synced."""
    for release in ("b-2", "bad-3", "c-4", "bad-5", "d-6"):
        swap(world, release, monkeypatch, policy=Retention(9, 99))
    old(world)
    for number in range(9):
        (world.folders.release("b-2") / f"{number}").touch()
    whole = {name: names(world.folders.release(name)) for name in host.staged(world.folders)}
    watched = disk.Disk(world.root, lambda: None)
    with watched.watched(monkeypatch):
        retention.prune(world.folders)
    end = names_below(world.root)
    assert len(watched.moments) > 20
    trees = {repr(tree): tree for moment in watched.moments for _, tree in moment.after_power_cut()}
    for number, tree in enumerate(trees.values()):
        disk.put(tree, tmp_path / f"{number}")
        folders = Folders("main", tmp_path / f"{number}")
        staged = {name: names(folders.release(name)) for name in host.staged(folders)}
        assert {"d-6", "c-4"} <= set(staged)
        assert staged.items() <= whole.items(), "none is torn"
        assert (host.known_good(folders), host.rollback_target(folders)) == ("d-6", "c-4")
        assert ledger.barred(host.history(folders)) == {"bad-3", "bad-5"}
        retention.prune(folders)
        files.drop_unfinished(folders.state)
        assert names_below(folders.root) == end
    assert retention.GONE not in str(end)


def names_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))
