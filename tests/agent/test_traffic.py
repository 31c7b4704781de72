"""How users are sent away before a swap stops anything, and brought back whatever becomes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router import FakeRouter
from world import OLD, Scenario, World, before

from kernelswap.agent import client, drain, files, host, network, routers, service, transaction
from kernelswap.agent.hooks import HOOKS_FILE
from kernelswap.agent.transaction import Transaction
from kernelswap.protocol import Drain, Hook, Report, Request, Router, Traffic, encode

US, OTHER = "http://10.0.0.5:30000", "http://10.0.0.6:30000"
REQUEST = Request("20261130T023000Z-ab12", "main", "converge", "b-2", "ada@desk", host="gpu1")
STEPS = ("preflight", "drain", "activate", "stop", "clean", "start", "ready", "smoke", "soak", "open", "commit")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "LIMIT", 5.0)
    monkeypatch.setattr(routers, "JOIN", 2.0)
    monkeypatch.setattr(drain, "SETTLED", 0.01)
    monkeypatch.setattr(network, "own_addresses", lambda: ["127.0.0.0/8", "10.0.0.5"])


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter(OTHER, US)
    yield router
    router.close()


def prepared(root: Path, traffic: Traffic, release: str = "b-2", **serves: Any) -> World:
    world = before(root, Scenario("traffic", release, (), **(serves or {"known_good": "a-1"})))
    world.traffic = traffic
    world.stage(release)
    files.write(world.folders.request, encode(dataclasses.replace(REQUEST, release=release)), mode=0o600)
    return world


def behind(router: FakeRouter, **more: Any) -> Traffic:
    drain = more.pop("drain", Drain(deadline=0.1))
    return Traffic("10.0.0.5", (Router(router.url, router.key),), drain, **more)


def run(world: World, monkeypatch: pytest.MonkeyPatch, running: int | None = 0, ready: bool = True) -> Report:
    with world.entered(monkeypatch) as patch:
        patch.setattr(client.Client, "running_requests", lambda _self: running)
        patch.setattr(transaction.preflight, "sglang_notes", lambda _said: [])
        patch.setattr(client.Client, "ready", lambda _self: ready)
        service.run("main", REQUEST.swap)
    return world.reports[-1]


def test_out_before_the_stop_and_in_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter
) -> None:
    world = prepared(tmp_path, behind(router))
    seen: list[tuple[str, set[str]]] = []
    router.watch = lambda what, _url: seen.append((what, world.serving))
    report = run(world, monkeypatch)
    assert (report.outcome, report.notes) == ("committed", ())
    assert seen == [("out", {"a-1"}), ("in", {"b-2"})]
    assert set(router.workers) == {US, OTHER}
    details = {step.name: step.detail for step in report.steps}
    assert details["drain"] == "out of 1 router(s), 0 request(s) running"
    assert details["open"] == "reachable from outside, in 1 router(s)"


def test_the_journal_knows_of_a_router_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter
) -> None:
    """Else nobody would bring the server back after a death right then."""
    world = prepared(tmp_path, behind(router))
    seen: list[tuple[str, tuple[str, ...]]] = []

    def watch(what: str, _url: str) -> None:
        journal = host.read_journal(world.folders)
        seen.append((what, journal.left if journal else ()))

    router.watch = watch
    assert run(world, monkeypatch).outcome == "committed"
    assert seen == [("out", (router.url,)), ("in", (router.url,))]


def test_a_rollback_brings_them_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter) -> None:
    world = prepared(tmp_path, behind(router), "bad-2")
    seen: list[tuple[str, set[str]]] = []
    router.watch = lambda what, _url: seen.append((what, world.serving))
    assert run(world, monkeypatch).outcome == "rolled-back"
    assert seen == [("out", {"a-1"}), ("in", {"a-1"})]


def test_a_candidate_with_users_is_emptied_before_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter
) -> None:
    world = prepared(tmp_path, behind(router))
    seen: list[tuple[str, set[str]]] = []
    router.watch = lambda what, _url: seen.append((what, world.serving))

    def refuse(_self: Transaction) -> None:
        raise transaction.Failed(transaction.Cause("no", "here", "nothing"))

    monkeypatch.setattr(Transaction, "_commit", refuse)
    monkeypatch.setattr(Transaction, "_guarded", staticmethod(lambda _name, step: step()))
    assert run(world, monkeypatch).outcome == "rolled-back"
    assert seen == [("out", {"a-1"}), ("in", {"b-2"}), ("out", {"b-2"}), ("in", {"a-1"})]


@pytest.mark.parametrize("known_good", ["a-1", None])
@pytest.mark.parametrize("step", STEPS)
def test_they_come_back_after_a_death_at_any_step(
    step: str, known_good: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter
) -> None:
    serves = {"known_good": known_good} if known_good else {"hand_written": OLD}
    world = prepared(tmp_path, behind(router), **serves)

    def die(*_others: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, f"_{'note_found' if step == 'drain' else step}", die)
        with pytest.raises(KeyboardInterrupt):
            run(world, monkeypatch)
    report = run(world, monkeypatch)
    assert report.outcome == ("refused" if step in STEPS[:3] else "rolled-back")
    assert set(router.workers) == {US, OTHER}


def test_release_zero_comes_back_only_to_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter
) -> None:
    elsewhere = FakeRouter(OTHER)
    both = dataclasses.replace(behind(router), routers=(Router(router.url), Router(elsewhere.url)))
    world = prepared(tmp_path, both, "bad-2", hand_written=OLD)
    report = run(world, monkeypatch)
    assert (report.outcome, report.notes) == ("rolled-back", ())
    assert (set(router.workers), set(elsewhere.workers)) == ({US, OTHER}, {OTHER})
    elsewhere.close()


def test_a_router_that_does_not_know_us_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter
) -> None:
    """It may list the server by a name that we do not know for ours; afterwards it lists it by ours."""
    del router.workers[US]
    report = run(prepared(tmp_path, behind(router)), monkeypatch)
    assert (report.outcome, report.notes) == ("committed", (f"router {router.url} does not list {US}",))
    assert set(router.workers) == {US, OTHER}


@pytest.mark.parametrize(
    ("then", "running", "outcome", "told"),
    [
        ("proceed", 3, "committed", "out of 1 router(s), 3 request(s) running"),
        ("proceed", None, "committed", "out of 1 router(s), running requests unknown"),
        ("fail", 0, "committed", "out of 1 router(s), 0 request(s) running"),
        ("fail", 3, "refused", "3 request(s) running after 0.1 s"),
        ("fail", None, "refused", "running requests unknown: the server has neither /v1/loads nor --enable-metrics"),
    ],
)
def test_requests_that_do_not_end(
    then: str, running: int | None, outcome: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    router: FakeRouter,
) -> None:  # fmt: skip
    world = prepared(tmp_path, behind(router, drain=Drain(0.1, then)))
    report = run(world, monkeypatch, running)
    assert report.outcome == outcome
    assert next(step.detail for step in report.steps if step.name == "drain") == told
    assert set(router.workers) == {US, OTHER}
    if outcome == "refused":
        assert (report.serving, world.serving) == ("a-1", {"a-1"})


def test_a_server_that_answers_nobody_has_nobody_to_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter
) -> None:
    world = prepared(tmp_path, behind(router, drain=Drain(0.1, "fail")))
    assert run(world, monkeypatch, None, ready=False).outcome == "committed"


@pytest.mark.parametrize("action", ["converge", "rollback"])
@pytest.mark.parametrize("unreachable", ["fail", "proceed"])
def test_a_router_that_is_down(
    unreachable: str, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter
) -> None:
    world = prepared(tmp_path, behind(router, drain=Drain(0.1, "fail", unreachable)))
    files.write(world.folders.request, encode(dataclasses.replace(REQUEST, action=action)))
    router.close()
    report = run(world, monkeypatch)
    if (unreachable, action) == ("fail", "converge"):
        assert (report.outcome, report.failed_step, world.serving) == ("refused", "preflight", {"a-1"})
        assert report.cause
        assert report.cause.todo == "start it, or set `drain: {unreachable: proceed}`"
    else:
        assert (report.outcome, world.serving) == ("committed", {"b-2"})
        assert f"router {router.url} does not answer" in report.notes[0]
        assert report.notes[-1].endswith("the server is put in when it does")


def test_a_router_that_goes_down_meanwhile_blocks_no_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter
) -> None:
    world = prepared(tmp_path, behind(router), "bad-2")
    real = Transaction._stop

    def stop(self: Transaction) -> Any:
        router.close()
        return real(self)

    monkeypatch.setattr(Transaction, "_stop", stop)
    report = run(world, monkeypatch)
    assert (report.outcome, world.serving) == ("rolled-back", {"a-1"})
    assert report.notes[-1].endswith("the server is put in when it does")


def test_a_server_that_no_router_takes_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter
) -> None:
    """Else a push would take one server after another out of its fleet."""
    world = prepared(tmp_path, behind(router))
    monkeypatch.setattr(routers, "JOIN", 0.3)
    router.deaf = True
    report = run(world, monkeypatch)
    assert (report.outcome, report.failed_step, world.serving) == ("rolled-back", "open", {"a-1"})
    assert "does not list it" in report.notes[-1]


def test_all_routers_are_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter) -> None:
    down, strange = "http://127.0.0.1:9", FakeRouter(key="rk")
    three = (Router(down), Router(router.url), Router(strange.url, "wrong"))
    world = prepared(tmp_path, dataclasses.replace(behind(router), routers=three))
    report = run(world, monkeypatch)
    assert (report.outcome, report.failed_step) == ("refused", "preflight")
    assert report.cause
    assert f"router {down} does not answer" in report.cause.what
    assert f"router {strange.url} refuses our key" in report.cause.what
    assert [str(fault).endswith(("proceed}`", "`routers`")) for fault in report.cause.faults] == [True, True]
    strange.close()


def test_traffic_that_cannot_be_read_stops_no_way_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = prepared(tmp_path, Traffic())
    world.folders.traffic.write_text("{torn")
    report = run(world, monkeypatch)
    assert (report.outcome, world.serving) == ("refused", {"a-1"})
    assert report.cause
    assert "traffic.json cannot be read" in report.cause.what


# Hooks.


def hook(tmp_path: Path, name: str, code: int = 0) -> Hook:
    """A command that notes what it is told, as a line of JSON in tmp_path/told."""
    path = tmp_path / f"{name}.sh"
    path.write_text(f"#!/bin/sh\ncat >>{tmp_path}/told; echo >>{tmp_path}/told; echo api_key=hunter2; exit {code}\n")
    path.chmod(0o755)
    return Hook((str(path),), timeout=20)


def told(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_hooks_are_told_of_each_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter) -> None:
    hooks = {name: hook(tmp_path, name) for name in ("drain", "open", "result")}
    world = prepared(tmp_path / "host", behind(router, hooks=hooks), "bad-2")
    assert run(world, monkeypatch).outcome == "rolled-back"
    first, second, third = told(tmp_path)
    assert [each["hook"] for each in (first, second, third)] == ["drain", "open", "result"]
    assert (first["outcome"], second["back"]) == (None, "true")
    common = {"host": "gpu1", "instance": "main", "swap": REQUEST.swap, "from": "a-1", "to": "bad-2"}
    assert third == {
        **common, "hook": "result", "action": "converge", "who": "ada@desk", "reason": "", "back": "true",
        "outcome": "rolled-back", "cause": "wrong answers",
    }  # fmt: skip
    kept = (world.folders.evidence(REQUEST.swap) / HOOKS_FILE).read_text()
    assert kept.count("[redacted]") == 3
    assert "hunter2" not in kept


def test_a_drain_hook_that_fails_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: FakeRouter) -> None:
    hooks = {"drain": hook(tmp_path, "drain", 7), "open": hook(tmp_path, "open")}
    world = prepared(tmp_path / "host", behind(router, hooks=hooks))
    report = run(world, monkeypatch)
    assert (report.outcome, report.failed_step, world.serving) == ("refused", "drain", {"a-1"})
    assert report.cause
    assert report.cause.what.endswith("drain.sh ended with exit code 7")
    assert [each["hook"] for each in told(tmp_path)] == ["drain", "open"], "it may have done half of its work"
    assert set(router.workers) == {US, OTHER}


def test_an_open_hook_that_fails_rolls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = prepared(tmp_path / "host", Traffic(drain=Drain(0.1), hooks={"open": hook(tmp_path, "open", 1)}))
    report = run(world, monkeypatch)
    assert (report.outcome, report.failed_step, world.serving) == ("rolled-back", "open", {"a-1"})
    assert report.notes[-1].endswith("open.sh ended with exit code 1"), "for the known-good it is a note"


def test_a_result_hook_changes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    webhook = Hook(webhook="http://127.0.0.1:9/services/t0k3n")
    world = prepared(tmp_path, Traffic(drain=Drain(0.1), hooks={"result": webhook}))
    report = run(world, monkeypatch)
    assert report.outcome == "committed"
    assert report.notes[0].startswith("the result hook does not answer")
    evidence = world.folders.evidence(REQUEST.swap)
    assert not any("t0k3n" in path.read_text() for path in evidence.iterdir())
    assert "t0k3n" not in world.folders.history.read_text()
