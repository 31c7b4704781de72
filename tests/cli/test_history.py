from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kernelswap.cli import history
from kernelswap.fleet import Seen
from kernelswap.protocol import Cause, HostState, InstanceState, Report, Request, StepResult

FIRST = Report(
    Request("1", "main", "converge", "a-1", "ada@desk", reason="faster"),
    "committed",
    1764469800.0,
    1764469890.5,
    steps=(StepResult("start", 1.0, True), StepResult("throughput", 9.0, True, numbers={"output_tok_s": 225.25})),
    notes=("SGLang warns: an old flag",),
)
SECOND = Report(
    Request("2", "main", "converge", "b-2", "bob@desk", host="gpu1", command="pyinfra x deploy.py"),
    "rolled-back",
    1764470000.0,
    1764470100.0,
    previous="a-1",
    serving="a-1",
    cause=Cause("ImportError: flashinfer", "server.log", "use triton", blame="release"),
    evidence="/e/2",
)
THIRD = Report(Request("3", "other", "rollback", "a-1", "ada@desk"), "committed", 1764469000.0, 1764469100.0)


def run(monkeypatch: pytest.MonkeyPatch, host: Seen[HostState] | None, *words: str) -> Result:
    monkeypatch.setattr(history, "look", lambda path, limit: (host,) if host else ())
    return CliRunner().invoke(history.command, ["gpu1", *words])


def remembers(*reports: Report) -> Seen[HostState]:
    names = sorted({report.request.instance for report in reports})
    states = tuple(InstanceState(n, history=tuple(r for r in reports if r.request.instance == n)) for n in names)
    return Seen("gpu1", {}, HostState("", "", instances=states))


def test_who_what_why_and_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, remembers(FIRST, SECOND, THIRD))
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert result.exit_code == 0
    assert lines[0] == "ENDED INSTANCE RESULT RELEASE BEFORE SECONDS WHO WHY"
    assert lines[1:] == [
        "2025-11-30 02:18 UTC other committed (rollback) a-1 100.0 ada@desk",
        "2025-11-30 02:31 UTC main committed a-1 90.5 ada@desk faster",
        "throughput: output_tok_s 225.25",
        "note: SGLang warns: an old flag",
        "2025-11-30 02:35 UTC main rolled-back b-2 a-1 100.0 bob@desk",
        "ROLLED BACK from b-2 in 100.0 s; a-1 serves again, verified",
        "where: host gpu1, instance main",
        "cause: ImportError: flashinfer",
        "try: use triton; whether another try helps is not known; it is barred: change the profile, or add --force",
        "see: server.log",
        "evidence: /e/2",
        "next: pyinfra x deploy.py",
    ]


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = json.loads(run(monkeypatch, remembers(FIRST), "--json").output)
    assert [report["request"]["swap"] for report in reports] == ["1"]


@pytest.mark.parametrize(
    ("host", "says", "code"),
    [
        (remembers(), "gpu1 remembers no swap", 0),
        (Seen("gpu1", {}, None, "timed out"), "gpu1 is unreachable: timed out", 1),
        (None, "gpu1 is no host of inventory/gpu.py", 1),
    ],
)
def test_nothing_to_show(monkeypatch: pytest.MonkeyPatch, host: Any, says: str, code: int) -> None:
    result = run(monkeypatch, host)
    assert says in result.output
    assert result.exit_code == code
