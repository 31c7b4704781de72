"""Whoever follows a swap is told its end, whatever of the agent's last words is missing."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import time
from pathlib import Path

import pytest
from world import Scenario, before

from kernelswap.agent import events, files, host, service, units
from kernelswap.agent.host import Folders
from kernelswap.protocol import Report, Request, encode

REQUEST = Request("20261130T023000Z-ab12", "main", "converge", "b-2", "ada@desk")
REPORT = Report(REQUEST, "committed", 1764469800.0, 1764469890.0, serving="b-2")
ENDED = units.UnitStatus("inactive", "dead", 0, "", False, "", "success", None)


@pytest.mark.parametrize(
    ("outcome", "code", "says"),
    [("committed", 0, "committed b-2 in 90.0 s"), ("down", 1, "DOWN after 90.0 s"), ("", 1, "gone without a result")],
)
@pytest.mark.parametrize("last_event", [True, False])
def test_the_end_is_told(
    last_event: bool,
    outcome: str,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = Folders("main", tmp_path)
    monkeypatch.setattr(units, "status", lambda _unit: ENDED)
    story = events.Events(folders.evidence(REQUEST.swap) / "events.jsonl")
    story.emit("commit", "begin")
    if outcome:
        report = encode(dataclasses.replace(REPORT, outcome=outcome))
        files.write(story.path.with_name("report.json"), report)
        files.append(folders.history, report)
        if last_event:
            story.emit("result", "result", says)
    assert service.follow(folders, REQUEST.swap) == code
    assert says in capsys.readouterr().out


def test_a_systemd_that_is_busy_ends_no_following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([units.UnitError("systemctl show: no answer within 60 s"), ENDED])

    def status(_unit: str) -> units.UnitStatus:
        answer = next(answers)
        if isinstance(answer, units.UnitError):
            raise answer
        return answer

    folders = Folders("main", tmp_path)
    monkeypatch.setattr(units, "status", status)
    files.append(folders.history, encode(REPORT))
    assert service.follow(folders, REQUEST.swap) == 0
    assert "committed b-2" in capsys.readouterr().out


def test_where_nothing_can_be_written_nothing_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "var").write_text("a file where a folder should be")
    monkeypatch.setattr(service, "Folders", functools.partial(Folders, root=tmp_path))
    assert service.swap(REQUEST) == 1
    said = capsys.readouterr().out
    assert said.startswith("REFUSED, nothing was touched: ")
    assert "Not a directory" in said


def _hold(path: Path, ready: multiprocessing.synchronize.Event) -> None:
    with files.lock(path):
        ready.set()
        time.sleep(1)


def test_an_agent_that_waits_for_another_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = before(tmp_path, Scenario("over a known-good", "b-2", (), known_good="a-1"))
    world.stage("b-2")
    files.write(world.folders.request, encode(REQUEST))
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    owner = context.Process(target=_hold, args=(world.folders.lock, ready))
    owner.start()
    assert ready.wait(10)
    with world.entered(monkeypatch) as patch:
        patch.setattr(files, "lock", functools.partial(files.lock, every=0.1))
        service.run("main", REQUEST.swap)
    owner.join()
    story = (world.folders.evidence(REQUEST.swap) / "events.jsonl").read_text()
    assert f'"step":"waiting","text":"for process {owner.pid}' in story
    assert world.reports[-1].outcome == "committed"


def test_a_swap_whose_end_could_not_be_recorded_is_told_and_recorded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = Folders("main", tmp_path)
    append = files.append
    monkeypatch.setattr(files, "append", lambda *_others: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    host.record(folders, REPORT)
    assert host.history(folders) == []
    assert host.report(folders, REQUEST.swap) == REPORT
    monkeypatch.setattr(files, "append", append)
    host.record(folders, REPORT)
    host.record(folders, REPORT)
    assert host.history(folders) == [REPORT]
    assert not folders.unrecorded.exists()
