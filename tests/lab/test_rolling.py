"""Pushes over a fleet behind the real sglang-router, while users ask it without a pause: none of them may notice."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from labhost import ROOT, Host, Lab
from load import Asked, Load
from project import PROFILES, Project, count_sessions, main_pid, release, sessions

pytestmark = pytest.mark.xdist_group("rolling")

PORT = 30000
REAL = {
    "plain": "flags: {moe-runner-backend: auto}",
    "triton": "flags: {moe-runner-backend: auto, random-seed: 1}",  # another release; Triton itself needs a GPU
    "crash": "flags: {moe-runner-backend: flashinfer_trtllm}",  # fails in earnest: FlashInfer is not installed
}
QUICK = "extends: tiny\nverify: {drift: null, min-healthy: 2, throughput: null}\n"


@dataclass(frozen=True)
class Fleet:
    project: Project
    router: Host
    servers: Sequence[Host]
    model: str

    def push(self, host: Host, profile: str) -> int:
        return self.project.deploy("--limit", host.name, "--profile", profile, "-y").code

    def workers(self) -> dict[str, bool]:
        """What the router lists: URL -> whether it takes it for healthy; nothing while it is down."""
        try:
            with urllib.request.urlopen(f"http://{self.router.address}:{PORT}/workers", timeout=9) as answer:
                return {row["url"]: row["is_healthy"] for row in json.load(answer)["workers"]}
        except OSError:
            return {}

    def whole(self) -> dict[str, bool]:
        return {f"http://{server.address}:{PORT}": True for server in self.servers}

    def await_whole(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (listed := self.workers()) != self.whole() and time.monotonic() < until:
            time.sleep(0.2)
        assert listed == self.whole()

    def load(self, **how: float) -> Load:
        return Load(self.router.address, PORT, self.model, **how)


def made(lab: Lab, folder: Path, count: int, model: str) -> Fleet:
    """A fleet with nothing on it yet."""
    there = len(lab.hosts) if (lab.folder / "hosts").exists() else 0
    router, *servers = lab.up(there + 1 + count)[there:]
    shared = {"routers": [f"http://{router.address}:{PORT}"], "drain": {"deadline": 60, "then": "fail"}}
    project = Project(folder, [(server, {"address": server.address, **shared}) for server in servers]).write()
    inventory = folder / "inventory" / "hosts.py"
    data = {"ssh_config_file": str(lab.folder / "ssh_config"), "router": {}}
    inventory.write_text(f"{inventory.read_text()}routers = ([{router.name!r}], {data!r})\n")
    return Fleet(project, router, servers, model)


@pytest.fixture
def fleet(lab: Lab, tmp_path: Path) -> Iterator[Fleet]:
    """Two servers whose start takes a moment."""
    fleet = made(lab, tmp_path, 2, "standin")
    yield fleet
    for host in (fleet.router, *fleet.servers):
        host.run("systemctl stop sglang-router 'kernelswap-member@*' sglang-main", check=False)


def in_flight(asked: Sequence[Asked], when: tuple[float, float]) -> list[Asked]:
    begin, end = when
    return [each for each in asked if each.begin <= end and each.end >= begin]


def kill(host: Host) -> tuple[float, float]:
    """End the server by force, and wait until its unit has started it again; the moments between which that was."""
    pid, begin = main_pid(host), time.time()
    host.run(f"kill -9 {pid}")
    end = time.time()
    while main_pid(host) in (0, pid):
        assert time.time() < end + 60
        time.sleep(0.5)
    return begin, end


def test_users_notice_no_push(fleet: Fleet) -> None:
    # The router first, and then what is behind it: servers put themselves in.
    assert fleet.project.deploy("--limit", "routers", "-y").code == 0
    assert fleet.workers() == {}
    assert fleet.project.deploy("--limit", "lab", "-y").code == 0
    assert fleet.workers() == fleet.whole()
    words = fleet.router.output("tr '\\0' ' ' </proc/$(systemctl show -P MainPID sglang-router)/cmdline")
    assert not any(server.address in words for server in fleet.servers)
    assert fleet.router.output("systemctl show -P User sglang-router") == "sglang-router"
    assert "smg_" in fleet.router.output("curl -s -m 5 http://127.0.0.1:29000/metrics")

    # Nothing changed: nothing is done, by one remote command for each host.
    count_sessions(fleet.router)
    before = sessions(fleet.router)
    again = fleet.project.deploy("-y")
    assert sessions(fleet.router) - before - 1 == 1
    assert "router: unchanged: 2 server(s)" in again
    assert "Starting operation" not in again

    first, second = fleet.servers
    with fleet.load().running() as load:
        for host in fleet.servers:
            assert fleet.push(host, "triton") == 0
        assert fleet.push(first, "crash") == 1
        assert release(first).startswith("triton-")
        assert fleet.push(first, "plain") == 0
        assert fleet.workers() == fleet.whole()
        pushed = list(load.asked)
        killed = kill(second)
        fleet.await_whole(40)
    assert [each for each in pushed if each.fault] == []
    assert len(pushed) > 50
    assert {each.kind for each in pushed} == {"_whole", "_stream_native", "_stream_openai"}
    assert set(load.failed) <= set(in_flight(load.asked, killed))
    drained = first.output(
        "grep -ho 'out of 1 router(s), 0 request(s) running' /var/lib/kernelswap/main/swaps/*/events.jsonl"
    )
    assert len(drained.splitlines()) == 3

    # A router forgets its servers when it ends; they put themselves in again.
    fleet.router.run("systemctl kill --signal=KILL sglang-router")
    time.sleep(1.5)
    fleet.await_whole(20)

    # A limit is changed, and a router given up, without a restart.
    pid = main_pid(first)
    text = (fleet.project.folder / "inventory" / "hosts.py").read_text()
    (fleet.project.folder / "inventory" / "hosts.py").write_text(text.replace("'deadline': 60", "'deadline': 61"))
    renewed = fleet.project.deploy("--limit", first.name, "--profile", "plain", "-y")
    assert "routers, drain and hooks are renewed without a restart" in renewed
    assert json.loads(first.read("/etc/kernelswap/main/traffic.json"))["drain"]["deadline"] == 61
    assert first.output("stat -c %a /etc/kernelswap/main/traffic.json") == "600"
    assert main_pid(first) == pid


@pytest.mark.exhaustive
def test_users_notice_no_push_of_twenty_over_four_real_servers(lab: Lab, tmp_path: Path) -> None:
    fleet = made(lab, tmp_path, 4, "tiny")
    models, profiles = (fleet.project.folder / "inventory" / kind for kind in ("models", "profiles"))
    (models / "tiny.yaml").write_text((ROOT / "inventory/models/tiny.yaml").read_text())
    fleet.project.model(QUICK + "served-name: tiny\n")
    for name in PROFILES:
        (profiles / f"{name}.yaml").unlink()
    for name, text in REAL.items():
        fleet.project.profile(name, text)
    assert fleet.project.deploy("--limit", "routers", "-y").code == 0
    assert fleet.project.deploy("--limit", "lab", "-y").code == 0
    assert fleet.workers() == fleet.whole()

    swaps = 0
    one_by_one = ("--limit", "lab", "--data", 'rollout={"waves": [1]}', "-y")
    # Four servers share the lab's cores: users who never paused would leave none to a server that starts.
    with fleet.load(users=3, tokens=50, pause=1).running() as load:
        for number in range(5):
            assert fleet.project.deploy("--profile", ("triton", "plain")[number % 2], *one_by_one).code == 0
            swaps += 4
            if number == 2:
                assert fleet.push(fleet.servers[1], "crash") == 1
                swaps += 1
            assert fleet.workers() == fleet.whole()
            assert load.failed == []
        pushed = list(load.asked)
        killed = kill(fleet.servers[2])
        fleet.await_whole(90)
    lost = load.failed
    print(f"{swaps} swaps, {len(pushed)} requests during them, {len(lost)} of {len(load.asked)} lost to the kill")
    assert swaps > 20
    assert [each for each in pushed if each.fault] == []
    assert set(lost) <= set(in_flight(load.asked, killed))
