"""The known-good is measured before it stops where nothing comparable is stored, shut off and let go again."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import Any

import pytest
from world import Scenario, World, before

from kernelswap.agent import files, host, service, transaction, units
from kernelswap.agent.client import Unanswered
from kernelswap.agent.server import Failed
from kernelswap.agent.transaction import Transaction
from kernelswap.agent.verify import gates, throughput
from kernelswap.measured import Run, ThroughputResult, ThroughputVerdict
from kernelswap.protocol import Cause, Report, Request, Throughput, Verify, encode

REQUEST = Request("20261130T023000Z-ab12", "main", "converge", "b-2", "ada@desk")
WANTED = Throughput(8, 32, 16, 64)
POINTS = (gates.point(8, [Run(8, 8, 0, 1.0, 256, 128, 256.0, 128.0, {}, {}, {})]),)
KNOWN = ThroughputResult("a-1", "key", POINTS)
STEPS = ["preflight", "drain", "activate", "stop", "clean", "start", "ready", "smoke"]
STEPS += ["drift", "throughput", "soak", "open", "commit"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = before(tmp_path, Scenario("over a known-good", "b-2", (), known_good="a-1"))
    world.stage("b-2")
    ask(world, WANTED)
    files.write(world.folders.request, encode(REQUEST), mode=0o600)
    return world


def ask(world: World, wanted: Throughput, **change: Any) -> None:
    plan = dataclasses.replace(host.read_plan(world.folders, "b-2"), verify=Verify(throughput=wanted), **change)
    files.write(world.folders.release("b-2") / "plan.json", encode(plan))


def swap(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    baseline: Any = lambda *_others: KNOWN,
    request: Request = REQUEST,
    generate: Any = lambda *_others: None,
) -> tuple[Report, list[ThroughputResult | None]]:
    """How it ends, and what the candidate was compared to."""
    compared: list[ThroughputResult | None] = []

    def check(
        plan: Any, wanted: Any, _keys: Any, known: ThroughputResult | None, key: str, evidence: Path, _tell: Any
    ) -> ThroughputVerdict:
        compared.append(known)
        verdict = ThroughputVerdict("pass", "fast", ThroughputResult(plan.release, key, POINTS), known)
        files.write(evidence / "throughput.json", encode(verdict))
        return verdict

    with world.entered(monkeypatch) as patch:
        patch.setattr(throughput, "key", lambda *_others: "key")
        patch.setattr(throughput, "baseline", baseline)
        patch.setattr(throughput, "check", check)
        patch.setattr(transaction.client.Client, "generate", generate)
        report = transaction.perform(world.folders, request)
    return report, compared


def shut_off(world: World) -> bool:
    return (world.folders.candidate_settings / "50-IPAddressDeny.conf").exists()


def test_it_is_measured_where_nothing_is_stored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def baseline(plan: Any, _wanted: Any, old: throughput.Target, *_others: Any) -> ThroughputResult:
        assert (plan.release, old.plan.release, world.serving, shut_off(world)) == ("b-2", "a-1", {"a-1"}, True)
        return KNOWN

    report, compared = swap(world, monkeypatch, baseline)
    assert [step.name for step in report.steps] == [*STEPS[:2], "baseline", *STEPS[2:]]
    assert (report.outcome, compared) == ("committed", [KNOWN])
    assert throughput.stored(world.folders, "a-1", "key") == KNOWN, "for the next swap"
    assert throughput.stored(world.folders, "b-2", "key") == ThroughputResult("b-2", "key", POINTS)
    assert not shut_off(world)


def test_what_is_stored_is_not_measured_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    throughput.keep(world.folders, KNOWN)
    report, compared = swap(world, monkeypatch)
    assert [step.name for step in report.steps] == STEPS
    assert compared == [KNOWN]


@pytest.mark.parametrize(
    ("change", "measured"),
    [({"baseline": "fresh"}, True), ({"regression": None}, False), ({"regression": None, "baseline": "fresh"}, False)],
)
def test_when_else(change: dict[str, Any], measured: bool, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    throughput.keep(world.folders, KNOWN)
    ask(world, dataclasses.replace(WANTED, **change))
    report, _ = swap(world, monkeypatch)
    assert ("baseline" in [step.name for step in report.steps]) is measured


@pytest.mark.parametrize("stored", [True, False])
def test_a_rollback_is_compared_with_its_own_result_and_waits_for_none(
    stored: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves may hang, or be faster and wrong."""
    own = dataclasses.replace(KNOWN, release="b-2")
    throughput.keep(world.folders, KNOWN)
    if stored:
        throughput.keep(world.folders, own)
    ask(world, dataclasses.replace(WANTED, baseline="fresh"))
    rollback = dataclasses.replace(REQUEST, action="rollback")
    report, compared = swap(world, monkeypatch, request=rollback)
    assert [step.name for step in report.steps] == STEPS
    assert compared == [own if stored else None]


def test_one_that_hangs_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_others: Any) -> None:
        raise Unanswered("POST /generate: timed out")

    report, compared = swap(world, monkeypatch, lambda *_others: pytest.fail("measured"), generate=hang)
    assert (report.outcome, compared) == ("committed", [None])
    assert "POST /generate: timed out" in str(report.steps)


def test_an_inconclusive_one_is_noted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = ThroughputVerdict("inconclusive", "3.0% slower", KNOWN)
    with world.entered(monkeypatch) as patch:
        patch.setattr(throughput, "key", lambda *_others: "key")
        patch.setattr(throughput, "check", lambda *_others: verdict)
        report = transaction.perform(world.folders, REQUEST)
    assert report.notes[-1] == "throughput is inconclusive: 3.0% slower"


def test_another_model_is_not_compared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(world, WANTED, model="other")
    report, compared = swap(world, monkeypatch)
    assert [step.name for step in report.steps] == STEPS
    assert compared == [None]


@pytest.mark.parametrize("how", ["quick", "full"])
def test_as_asked_for(how: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    throughput.keep(world.folders, KNOWN)
    report, compared = swap(world, monkeypatch, request=dataclasses.replace(REQUEST, verify=how))
    assert ("baseline" in [step.name for step in report.steps]) is (how == "full")
    assert compared == [None if how == "quick" else KNOWN]


@pytest.mark.parametrize(
    "error",
    [
        Failed(Cause("the benchmark gave no result: x", "here", "nothing", "throughput", "release")),
        throughput.Unmeasured("the benchmark was the bottleneck"),
        OSError("no space"),
    ],
)
def test_trouble_with_it_is_told_and_stops_nothing(
    error: Exception, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_others: Any) -> ThroughputResult:
        raise error

    report, compared = swap(world, monkeypatch, fail)
    assert (report.outcome, compared) == ("committed", [None])
    detail = next(step.detail for step in report.steps if step.name == "baseline")
    assert detail == f"not measured, so the candidate is not compared to it: {error}"


def test_a_fresh_one_that_fails_leaves_the_stored_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_others: Any) -> ThroughputResult:
        raise throughput.Unmeasured("the benchmark was the bottleneck")

    throughput.keep(world.folders, KNOWN)
    report, compared = swap(world, monkeypatch, fail, request=dataclasses.replace(REQUEST, verify="full"))
    assert (report.outcome, compared) == ("committed", [KNOWN])
    detail = next(step.detail for step in report.steps if step.name == "baseline")
    says = "not measured, so the candidate is compared with what is stored of it: the benchmark was the bottleneck"
    assert detail == says


def test_requests_of_others_are_no_baseline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.entered(monkeypatch) as patch:
        patch.setattr(transaction.client.Client, "running_requests", lambda _self: 3)
        patch.setattr(throughput, "key", lambda *_others: "key")
        patch.setattr(throughput, "check", lambda *_others: ThroughputVerdict("pass", "", KNOWN))
        patch.setattr(throughput, "baseline", lambda *_others: pytest.fail("measured"))
        report = transaction.perform(world.folders, REQUEST)
    assert "3 request(s) of others are still running" in str(report.steps)


def test_an_agent_that_dies_in_it_has_touched_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_others: Any) -> ThroughputResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swap(world, monkeypatch, die)
    assert shut_off(world)
    with world.entered(monkeypatch):
        service.run("main", REQUEST.swap)
    report = world.reports[-1]
    assert (report.outcome, report.serving, world.serving) == ("refused", "a-1", {"a-1"})
    assert report.cause
    assert report.cause.what == "the agent died during the step baseline"
    assert host.is_intact(world.folders, "a-1"), "and nothing is laid over its unit"


def test_a_newcomer_during_it_is_refused_and_the_known_good_let_go(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newcomer(_self: Transaction) -> None:
        raise Failed(Cause("SGLang runs outside any unit", "ps", "run it again", "preflight"))

    monkeypatch.setattr(Transaction, "_note_found", newcomer)
    report, _ = swap(world, monkeypatch)
    assert (report.outcome, report.failed_step, world.serving) == ("refused", "baseline", {"a-1"})
    assert host.is_intact(world.folders, "a-1")


@pytest.mark.parametrize("measured", [False, True])
def test_a_journal_that_cannot_say_stop_stops_nothing(
    measured: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What serves was not touched yet: it is neither stopped nor started again, and reachable."""
    if not measured:
        throughput.keep(world.folders, KNOWN)
    write, started = host.write_journal, []

    def refuse(folders: Any, journal: host.Journal) -> None:
        if journal.step == "stop" and not journal.back:
            raise OSError(errno.EROFS, "Read-only file system")
        write(folders, journal)

    monkeypatch.setattr(host, "write_journal", refuse)
    monkeypatch.setattr(units, "stop", lambda *words: started.append(words))
    monkeypatch.setattr(units, "start", lambda *words: started.append(words))
    report, _ = swap(world, monkeypatch)
    assert (report.outcome, report.failed_step, report.serving, world.serving) == ("refused", "stop", "a-1", {"a-1"})
    assert report.cause
    assert report.cause.what == "cannot write the journal: Read-only file system"
    assert started == []
    assert not shut_off(world)
    assert host.is_intact(world.folders, "a-1")


def test_how_long_it_will_take_is_told_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    swap(world, monkeypatch)
    notes = (world.folders.evidence(REQUEST.swap) / "events.jsonl").read_text().splitlines()
    told = [note for note in notes if "verification" in note]
    assert len(told) == 1
    assert "baseline 1 x 3 runs" in told[0]
    assert notes.index(told[0]) < next(index for index, note in enumerate(notes) if '"drain"' in note)
