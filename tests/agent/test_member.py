from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from router import FakeRouter

from kernelswap.agent import client, files, host, member, network
from kernelswap.agent.host import Folders, Journal
from kernelswap.protocol import Plan, Request, Router, Traffic, encode

US = "http://10.0.0.5:30000"
PLAN = Plan("main", "a-1", "a", "m", "/usr/bin/python3", (), {}, "root", "/m", "m", "0.0.0.0", 30000)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRouter]:
    monkeypatch.setattr(network, "own_addresses", lambda: ["127.0.0.0/8", "10.0.0.5"])
    monkeypatch.setattr(client.Client, "ready", lambda _self: True)
    router = FakeRouter()
    yield router
    router.close()


@pytest.fixture
def folders(tmp_path: Path, router: FakeRouter) -> Folders:
    folders = Folders("main", tmp_path)
    files.write(folders.release("a-1") / "plan.json", encode(PLAN))
    files.link(folders.known_good, "releases/a-1")
    files.write(folders.traffic, encode(Traffic("10.0.0.5", (Router(router.url),))))
    files.make_folder(folders.state)
    return folders


def look(folders: Folders) -> list[str]:
    return member.look(folders, member._members(folders))


def test_what_serves_is_put_in_where_it_is_not_listed(folders: Folders, router: FakeRouter) -> None:
    assert look(folders) == []
    assert list(router.workers) == [US]
    router.workers.clear()  # as a restart leaves it
    look(folders)
    look(folders)
    assert (list(router.workers), len(router.entries)) == ([US], 2)


def test_not_what_is_not_ready(folders: Folders, router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.Client, "ready", lambda _self: False)
    assert look(folders) == []
    assert router.entries == []


def test_not_during_a_swap_nor_after_the_death_of_its_agent(folders: Folders, router: FakeRouter) -> None:
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    words = [sys.executable, "-c", hold, str(folders.lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as swap:
        assert swap.stdout
        swap.stdout.readline()
        start = time.monotonic()
        assert look(folders) == []
        assert time.monotonic() - start < 2, "a swap is not waited for"
        swap.communicate(b"\n")
    host.write_journal(folders, Journal(Request("s", "main", "converge", "b-2", "ada"), 1.0, "boot"))
    assert look(folders) == []
    assert router.entries == []
    files.remove(folders.journal)
    look(folders)
    assert list(router.workers) == [US]


def test_trouble_is_told_and_the_others_are_served(folders: Folders, router: FakeRouter) -> None:
    traffic = Traffic("10.0.0.5", (Router("http://127.0.0.1:9"), Router(router.url)))
    files.write(folders.traffic, encode(traffic))
    (problem,) = look(folders)
    assert problem.startswith("router http://127.0.0.1:9 does not answer")
    assert list(router.workers) == [US]


def test_it_ends_with_its_last_router_and_when_the_agent_is_renewed(
    folders: Folders, router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent.pyz"
    agent.write_text("old")
    monkeypatch.setattr(member, "AGENT_PATH", str(agent))
    monkeypatch.setattr(member, "EVERY", 0.05)
    monkeypatch.setattr(member, "Folders", lambda _instance: folders)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(member.keep("main")), daemon=True)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    assert list(router.workers) == [US]
    files.write(agent, "new")
    thread.join(5)
    assert codes == [member.REPLACED]
    files.write(folders.traffic, encode(Traffic()))
    assert member.keep("main") == 0
