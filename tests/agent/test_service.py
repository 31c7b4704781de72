"""Whoever follows a swap is told its end, whatever of the agent's last words is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kernelswap.agent import events, files, service, units
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
