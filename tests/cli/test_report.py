from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kernelswap.cli import report
from kernelswap.fleet import Seen
from kernelswap.protocol import Evidence, Report, Request, StepResult

REQUEST = Request("20251130T02-aa", "main", "converge", "b-2", "ada@desk", reason="<faster>", command="pyinfra x y")
REPORT = Report(REQUEST, "committed", 1764469800.0, 1764469890.5, steps=(StepResult("start", 1.0, True),))


def run(monkeypatch: pytest.MonkeyPatch, kept: Evidence | None, *words: str, host: str = "gpu/1") -> Result:
    seen = Seen(host, {}, kept, "" if kept else "timed out")
    monkeypatch.setattr(report, "evidence", lambda path, limit, instance, swap: (seen,))
    return CliRunner().invoke(report.command, ["gpu/1", *words])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_page_of_its_own_name_that_may_be_written_again(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    for _ in range(2):
        result = run(monkeypatch, Evidence(report=REPORT))
        assert (result.exit_code, result.output) == (0, "report-gpu_1-20251130T02-aa.html\n")
    html = (here / "report-gpu_1-20251130T02-aa.html").read_text()
    assert html.startswith("<!doctype html>")
    assert "&lt;faster&gt;" in html
    assert "<faster>" not in html


def test_another_file_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    (here / "notes.html").write_text("mine")
    result = run(monkeypatch, Evidence(report=REPORT), "--output", "notes.html")
    assert result.exit_code == 1
    assert "notes.html is there and is no report" in result.output
    assert (here / "notes.html").read_text() == "mine"
    missing = run(monkeypatch, Evidence(report=REPORT), "--output", "none/page.html")
    assert "none/page.html cannot be written: No such file or directory" in missing.output


def test_text_and_json(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    said = run(monkeypatch, Evidence(report=REPORT), "--text").output
    assert said.startswith("Committed: b-2 on gpu/1\n")
    assert (
        json.loads(run(monkeypatch, Evidence(report=REPORT), "--json").output)["report"]["request"]["swap"]
        == REQUEST.swap
    )
    assert list(here.iterdir()) == []
    assert run(monkeypatch, Evidence(report=REPORT), "--text", "--json").exit_code == 2


@pytest.mark.parametrize(
    ("kept", "words", "says"),
    [
        (Evidence(), (), "gpu/1 remembers no swap"),
        (Evidence(swaps=(REPORT,)), ("2024",), "20251130T02-aa  main      2025-11-30 02:31 UTC  committed  b-2"),
        (Evidence(unfinished=(REQUEST,)), (), "swap 20251130T02-aa to b-2 has not ended: `pyinfra x y` follows it"),
        (None, (), "gpu/1 is unreachable: timed out"),
    ],
)
def test_no_single_swap(monkeypatch: pytest.MonkeyPatch, kept: Any, words: tuple[str, ...], says: str) -> None:
    result = run(monkeypatch, kept, *words)
    assert result.exit_code == 1
    assert says in result.output


def test_no_such_host(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, Evidence(report=REPORT), host="gpu2")
    assert "gpu/1 is no host of inventory/gpu.py" in result.output
