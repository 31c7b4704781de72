"""A disk that becomes full or read-only in the middle of a swap: it ends well, and its end is told."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from world import SWAP, Scenario, World, before

from kernelswap.agent import files, host, preflight, service
from kernelswap.agent.host import Folders, Journal
from kernelswap.protocol import Request, encode

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, so it needs root")

STEPS = ("preflight", "drain", "activate", "stop", "clean", "start", "ready", "smoke", "open", "commit")
GOOD = Scenario("over a known-good", "b-2", ("committed", "rolled-back"), known_good="a-1")
BAD = Scenario("rolled back", "bad-2", ("rolled-back",), known_good="a-1")


@dataclass(frozen=True)
class Mount:
    """A small file system of its own, which can be spoilt."""

    path: Path

    def spoil(self, how: str) -> None:
        if how == "read-only":
            # Not of the file system itself, which is busy with our lock.
            self.run("mount", "--bind", str(self.path), str(self.path))
            self.run("mount", "-o", "remount,bind,ro", str(self.path))
        elif how == "full":
            with contextlib.suppress(OSError), (self.path / "fill").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 512)
        else:
            with contextlib.suppress(OSError):
                for number in range(10**6):
                    (self.path / f"fill-{number}").touch()

    def repair(self, how: str) -> None:
        if how == "read-only":
            self.run("umount", str(self.path))
        for path in self.path.glob("fill*"):
            path.unlink()

    def end(self) -> None:
        while self.path.is_mount():  # with what a test that failed has left on top
            self.run("umount", "--lazy", str(self.path))

    @staticmethod
    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A host with file systems of its own for /etc, /var/lib and /run."""
    root = tmp_path / "host"
    mounts = [root / name for name in ("etc", "var/lib", "run")]
    with contextlib.ExitStack() as stack:
        for path in mounts:
            path.mkdir(parents=True)
            Mount.run("mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=128", "tmpfs", str(path))
            stack.callback(Mount(path).end)
        world = before(root, request.param)
        world.stage(request.param.release)
        files.make_folder(world.folders.state)
        goal = Request(SWAP, "main", "converge", request.param.release, "ann")
        files.write(world.folders.request, encode(goal), mode=0o600)
        yield world


CASES = [
    pytest.param(scenario, where, how, step, id=f"{where} {how} at {step}, {scenario.name}")
    for scenario, where, how, step in itertools.product(
        (GOOD, BAD), ("etc", "var/lib", "run"), ("full", "no inodes", "read-only"), STEPS
    )
    # A wrong answer ends the swap before the later steps, and nothing makes a tmpfs read-only.
    if not (scenario is BAD and step in STEPS[-2:]) and (where, how) != ("run", "read-only")
]


@pytest.mark.parametrize(("world", "where", "how", "step"), CASES, indirect=["world"])
def test_it_ends_well_and_says_so(
    world: World, step: str, where: str, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mount = Mount(world.root / where)
    write, spoilt = host.write_journal, False

    def spoil(folders: Folders, journal: Journal) -> None:
        nonlocal spoilt
        write(folders, journal)
        if journal.step == step and not spoilt:
            spoilt = True
            mount.spoil(how)

    with world.entered(monkeypatch) as patch:
        patch.setattr(preflight, "disk", lambda *_others: [])  # of which these hosts have none to spare
        patch.setattr(host, "write_journal", spoil)
        service.run("main", SWAP)
        report = host.report(world.folders, SWAP)
        assert report
        assert report.outcome in ("refused", "rolled-back", "committed", "down")
        # What may not be done on a spoilt disk: everything else goes on, or back to what served.
        if report.outcome == "down":
            assert (where, how, step, world.serving) == ("etc", "read-only", "commit", {"b-2"})
        else:
            assert world.serving == {report.request.release if report.outcome == "committed" else "a-1"}
        assert report.serving == next(iter(world.serving))
        last = {"committed": "committed", "rolled-back": "ROLLED BACK", "refused": "REFUSED", "down": "DOWN"}
        assert last[report.outcome] in capsys.readouterr().out
        if how != "read-only":
            # The reserve was there for it.
            assert [known.outcome for known in world.reports if known.request.swap == SWAP] == [report.outcome]
        mount.repair(how)
        if world.folders.journal.exists():
            service.recover("main")
        ends = [known.outcome for known in world.reports if known.request.swap == SWAP]
        assert ends == [report.outcome]
        assert not world.folders.journal.exists()
        assert not world.folders.reserve.exists()
