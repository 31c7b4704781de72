"""A host under a folder, in which the agent swaps for real: all but systemd (systemd.py) and the server's answers."""

from __future__ import annotations

import contextlib
import errno
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from systemd import PORT, WANTS, Systemd

from kernelswap.agent import (
    client,
    engine,
    files,
    gpus,
    host,
    model_files,
    network,
    preflight,
    processes,
    server,
    service,
    units,
    zero,
)
from kernelswap.agent.host import Folders
from kernelswap.agent.verify import drift, smoke, soak
from kernelswap.protocol import Cause, Drain, Plan, Report, Request, Timeouts, Traffic, encode, unit_name

UNIT = unit_name("main")
OLD = "old-glm.service"
SWAP = "20261130T023000Z-ab12"
CUT = OSError(errno.EROFS, "Read-only file system")


@dataclass(frozen=True)
class Scenario:
    """known_good, hand_written: what serves before. release: what is asked for; one named bad answers wrongly.

    ends: how it may end. broken: the committed unit cannot be written.
    """

    name: str
    release: str
    ends: tuple[str, ...]
    known_good: str | None = None
    hand_written: str | None = None
    action: str = "converge"
    broken: bool = False

    @property
    def committed_before(self) -> list[str]:
        """Releases, oldest first."""
        older = [self.release] if self.action == "rollback" else []
        return [*older, self.known_good] if self.known_good else []

    @property
    def swaps_before(self) -> list[str]:
        return [f"swap-of-{release}" for release in self.committed_before]


SCENARIOS = (
    Scenario("first commit", "b-2", ("committed", "down")),
    Scenario("first commit fails", "bad-2", ("down",)),
    Scenario("over a known-good", "b-2", ("committed", "rolled-back"), known_good="a-1"),
    Scenario("rolled back", "bad-2", ("rolled-back",), known_good="a-1"),
    Scenario("a rollback", "b-2", ("committed", "rolled-back"), known_good="a-1", action="rollback"),
    Scenario("over release zero", "b-2", ("committed", "rolled-back"), hand_written=OLD),
    Scenario("back to release zero", "bad-2", ("rolled-back",), hand_written=OLD),
    Scenario("over a unit of our name", "b-2", ("committed", "rolled-back"), hand_written=UNIT),
    Scenario("back to a unit of our name", "bad-2", ("rolled-back",), hand_written=UNIT),
    Scenario("a commit that fails", "b-2", ("rolled-back",), known_good="a-1", broken=True),
    Scenario("a commit over release zero that fails", "b-2", ("rolled-back",), hand_written=OLD, broken=True),
)


class World:
    """A host under a folder, in which the agent runs."""

    def __init__(self, root: Path, systemd: Systemd, boot: str) -> None:
        self.root, self.systemd, self.boot = root, systemd, boot
        self.folders = Folders("main", root)
        self.traffic = Traffic(drain=Drain(deadline=0.1))

    @contextlib.contextmanager
    def entered(self, monkeypatch: pytest.MonkeyPatch, broken: bool = False) -> Iterator[pytest.MonkeyPatch]:
        """What is yielded takes further patches: taken back in the wrong order, one of ours would stay for ever."""

        def ready(plan: Plan, *_others: Any) -> str:
            text = files.read(self.folders.release(plan.release) / UNIT)
            if self.systemd.running.get(plan.unit) != text:
                raise server.Failed(Cause("another server answers", "here", "nothing"))
            return "ready"

        def judge(plan: Plan, *_others: Any) -> tuple[str, dict[str, float]]:
            if "bad" in plan.release:
                raise server.Failed(Cause("wrong answers", "here", "nothing", "smoke", "release"))
            return "right", {"garbled": 0.0}

        def table(*_others: Any) -> dict[int, Any]:
            return self.systemd.processes()

        def listeners(*_others: Any) -> list[int]:
            return list(self.systemd.processes())

        write = files.write

        def refuse(path: Path, *others: Any, **more: Any) -> None:
            if path == self.folders.committed_unit:
                raise CUT
            write(path, *others, **more)

        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(files, "write", refuse)
            patch.setattr(host, "RESERVE", 1)
            patch.setattr(time, "sleep", lambda _seconds: None)
            patch.setattr(service, "Folders", functools.partial(Folders, root=self.root))
            patch.setattr(units, "_systemctl", self.systemd)
            patch.setattr(units, "_begin", self.systemd.begin)
            patch.setattr(units, "ETC", str(self.root / "etc/systemd/system"))
            patch.setattr(units, "OURS", str(self.root / "run/systemd/system.control") + "/")
            patch.setattr(units, "log", lambda *_others: [])
            patch.setattr(host, "boot_id", lambda: self.boot)
            patch.setattr(processes, "table", table)
            patch.setattr(processes, "listeners", listeners)
            patch.setattr(gpus, "read", lambda *_others: ())
            patch.setattr(network, "own_addresses", lambda: ["127.0.0.0/8"])
            patch.setattr(preflight, "system", lambda: [])
            patch.setattr(model_files, "look", lambda _plan: model_files.ModelFiles())
            patch.setattr(preflight, "host_notes", lambda *_others: [])
            patch.setattr(engine, "asked", lambda *_others: contextlib.nullcontext(engine.Answer))
            patch.setattr(client.Client, "running_requests", lambda _self: 0)
            patch.setattr(server, "wait_ready", ready)
            patch.setattr(smoke, "check", judge)
            patch.setattr(drift, "check", judge)
            patch.setattr(soak, "check", judge)
            patch.setattr(zero, "_is_healthy", lambda _port: True)
            yield patch

    def stage(self, release: str) -> None:
        """As roles/server.py does: every file whole, its folder synced, the folders above not."""
        folder = self.folders.release(release)
        folder.mkdir(parents=True)
        timeouts = Timeouts(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
        words = ("-m", "sglang.launch_server", "--port", str(PORT))
        plan = Plan(
            "main", release, release[:-2], "m", "/p", words, {}, "root", "/m", "m", "0.0.0.0", PORT, timeouts=timeouts
        )
        files.write(self.folders.traffic, encode(self.traffic), mode=0o600)
        for name, text in ((UNIT, f"[Unit]\nDescription=release {release}\n" + "#" * 200), ("plan.json", encode(plan))):
            files.write(folder / name, text)

    @property
    def reports(self) -> list[Report]:
        return host.history(self.folders)

    @property
    def serving(self) -> set[str]:
        """The releases that run, by the text of what was started."""
        return {text.partition("release ")[2].split("\n")[0] for text in self.systemd.running.values()}


def before(root: Path, scenario: Scenario) -> World:
    """The host as the swap finds it."""
    world = World(root, Systemd(root), "boot-1")
    (root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
    (root / WANTS).mkdir()
    (root / "var/lib").mkdir(parents=True, exist_ok=True)
    (root / "run/systemd").mkdir(parents=True, exist_ok=True)
    if scenario.known_good:
        world.stage(scenario.known_good)
        if scenario.action == "rollback":
            world.stage(scenario.release)
        text = (world.folders.release(scenario.known_good) / UNIT).read_text()
        world.folders.committed_unit.write_text(text)
        world.folders.known_good.symlink_to(f"releases/{scenario.known_good}")
        (root / WANTS / UNIT).symlink_to(f"/etc/systemd/system/{UNIT}")
        for release in scenario.committed_before:
            request = Request(f"swap-of-{release}", "main", "converge", release, "ann")
            files.append(world.folders.history, encode(Report(request, "committed", 1.0, 2.0, serving=release)))
    if scenario.hand_written:
        name = scenario.hand_written
        (root / "etc/systemd/system" / name).write_text("[Unit]\nDescription=release zero\n")
        (root / WANTS / name).symlink_to(f"/etc/systemd/system/{name}")
    world.systemd.boot()
    return world
