"""The guard keeps a server down only where it saw that the host is not clean."""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from test_gpus import ONE
from world import Scenario, World, before

from kernelswap.agent import __main__ as agent
from kernelswap.agent import gpus, guard, host, processes, units
from kernelswap.agent.host import Folders
from kernelswap.protocol import AGENT_PATH, DIRTY, Gpu, encode


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A known-good that needs a GPU and is about to start."""
    world = before(tmp_path, Scenario("boot", "a-1", (), known_good="a-1"))
    plan = dataclasses.replace(host.read_plan(world.folders, "a-1"), gpus=("GPU-a",), port=free_port())
    (world.folders.release("a-1") / "plan.json").write_text(encode(plan))
    monkeypatch.setattr(guard, "Folders", functools.partial(Folders, root=tmp_path))
    monkeypatch.setattr(processes, "table", lambda *_: {})
    monkeypatch.setattr(gpus, "read", lambda *_: (ONE,))
    return world


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def no_nvml(*_: object) -> tuple[Gpu, ...]:
    raise gpus.GpuError("NVML gives no answer within 60 s")


def busy_systemd(*_: object) -> units.UnitStatus:
    raise units.UnitError("systemctl show: no answer within 60 s")


BROKEN: dict[str, Callable[[World, pytest.MonkeyPatch], object]] = {
    "no NVML": lambda world, patch: patch.setattr(gpus, "read", no_nvml),
    "no systemd": lambda world, patch: patch.setattr(guard.clean.occupants, "main_pids", busy_systemd),
    "no plan": lambda world, patch: (world.folders.release("a-1") / "plan.json").write_text("{"),
    "a plan of another form": lambda world, patch: (world.folders.release("a-1") / "plan.json").write_text("[1]"),
    "an unreadable journal": lambda world, patch: world.folders.journal.mkdir(),
    "a lost journal": lambda world, patch: world.folders.journal.write_text("{"),
    "unreadable idle levels": lambda world, patch: world.folders.idle_memory.mkdir(),
    "a full /run": lambda world, patch: (world.root / "run/kernelswap").write_text("no folder"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_of_our_own_keeps_no_server_down(
    fault: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    BROKEN[fault](world, monkeypatch)
    assert agent.main(["guard", "main"]) == 0
    assert not world.folders.gpu_indices.exists() or fault == "unreadable idle levels"
    assert "kernelswap: " not in capsys.readouterr().err, "the words that tell why a server was not started"


def test_whoever_has_the_port_keeps_it_down_with_what_helps(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    plan = host.read_plan(world.folders, "a-1")
    with socket.create_server(("127.0.0.1", plan.port)):
        assert agent.main(["guard", "main"]) == DIRTY
    said = capsys.readouterr().err
    assert said.startswith(f"kernelswap: port {plan.port} is listened on by an unknown process: end what is left")


def test_nvml_without_an_answer_hides_no_listener(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "read", no_nvml)
    with socket.create_server(("127.0.0.1", host.read_plan(world.folders, "a-1").port)):
        assert agent.main(["guard", "main"]) == DIRTY


def test_a_gpu_that_is_gone_keeps_it_down(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "read", lambda *_: (dataclasses.replace(ONE, uuid="GPU-other"),))
    assert agent.main(["guard", "main"]) == DIRTY


def test_the_gpus_are_asked_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(gpus, "read", lambda *_: asked.append(1) or (ONE,))
    assert agent.main(["guard", "main"]) == 0
    assert world.folders.gpu_indices.read_text() == "CUDA_VISIBLE_DEVICES=0\n"
    assert len(asked) == 1


def test_a_unit_without_its_guard_keeps_all_else() -> None:
    guarded = f"+/bin/sh -c '/usr/bin/python3 -IS {AGENT_PATH} guard main; [ $$? -ne 3 ]'"
    other = f"+/bin/sh -c '/usr/bin/python3 -IS {AGENT_PATH} guard main-2; [ $$? -ne 3 ]'"
    lines = [
        "[Service]",
        "ExecStartPre=/bin/true",
        f"ExecStartPre={guarded}",
        f"ExecStartPre={other}",
        "ExecStart=x \\",
        "  y",
        "",
    ]
    assert guard.without("\n".join(lines), "main") == "\n".join([*lines[:2], *lines[3:]])
