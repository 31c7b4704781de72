from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kernelswap.agent import evidence, host
from kernelswap.agent.host import Folders, Journal
from kernelswap.protocol import Report, Request, encode


def ended(folders: Folders, swap: str, at: float, **files: str) -> Report:
    report = Report(Request(swap, folders.instance, "converge", "b-2", "ada"), "committed", at - 9, at, previous="a-1")
    folders.state.mkdir(parents=True, exist_ok=True)
    with folders.history.open("a") as file:
        file.write(encode(report) + "\n")
    for name, text in files.items():
        path = folders.evidence(swap) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return report


@pytest.fixture
def main(tmp_path: Path) -> Folders:
    return Folders("main", tmp_path)


def test_the_newest_or_the_one_whose_id_begins_so(main: Folders, tmp_path: Path) -> None:
    other = Folders("other", tmp_path)
    first, second = ended(main, "20251130T02-aa", 100), ended(main, "20251130T03-bb", 200)
    third = ended(other, "20251130T03-bbcc", 150)
    both = [main, other]
    assert evidence.find(both, "").report == second
    assert evidence.find([other], "").report == third
    assert evidence.find(both, "20251130T02").report == first
    assert evidence.find(both, "20251130T03-bb").report == second  # exactly this, and no beginning of it
    several = evidence.find(both, "20251130T03")
    assert (several.report, several.swaps) == (None, (third, second))
    none = evidence.find(both, "../../etc")
    assert (none.report, none.swaps, none.files) == (None, (first, third, second), {})
    assert evidence.find([Folders("new", tmp_path)], "").swaps == ()


def test_one_that_runs_and_one_that_the_history_could_not_take(main: Folders) -> None:
    report = ended(main, "1-a", 100)
    unrecorded = replace(report, request=replace(report.request, swap="2-b"), ended=200.0)
    main.unrecorded.parent.mkdir(parents=True)
    main.unrecorded.write_text(encode(unrecorded))
    running = replace(report.request, swap="3-c")
    host.write_journal(main, Journal(running, 300.0, "boot"))
    assert evidence.find([main], "").report == unrecorded
    assert evidence.find([main], "3").unfinished == (running,)


def test_files_within_their_bounds(main: Folders) -> None:
    log = "\n".join(f"line {i} " + "x" * 3000 for i in range(500))
    rows = "\n".join(f"{second},run,{gpu},{second * 8 + gpu}" for second in range(5000) for gpu in range(8))
    ended(main, "1", 100, **{
        "server.log": log, "gpu.csv": f"time,phase,index,power\n{rows}\n", "drift.json": '{"a": "é"}',
        "accuracy.json": '{"mean": 0.9}',
        "throughput.json": "x" * (evidence.SIZE + 1), "clean.txt": "not asked for",
    })  # fmt: skip
    found = evidence.find([main], "1")
    assert set(found.files) == {"server.log", "gpu.csv", "drift.json", "accuracy.json"}
    assert found.files["drift.json"] == '{"a": "é"}'
    lines = found.files["server.log"].split("\n")
    assert len(lines) == 60
    assert lines[-1].startswith("line 499 ")
    assert max(map(len, lines)) <= evidence.LINE
    heading, *kept = found.files["gpu.csv"].split("\n")
    assert heading == "time,phase,index,power"
    assert len(kept) == 4000
    assert found.rows == {"server.log": 500, "gpu.csv": 40001}
    assert len(json.dumps(found.files)) < 4 * evidence.SIZE


def test_thinning_keeps_instants_whole_and_is_even() -> None:
    # Each GPU is asked at its own moment.
    rows = [f"{second}.{gpu},{gpu}" for second in range(100) for gpu in range(8)]
    heading, *kept = evidence.thin(["time,index", *rows], 100)
    assert heading == "time,index"
    seconds = [int(row.partition(".")[0]) for row in kept]
    assert len(kept) == 96
    assert all(seconds.count(second) == 8 for second in set(seconds))
    assert sorted(set(seconds)) == [i * 100 // 12 for i in range(12)]
    assert evidence.thin(["time,index", *rows[:5]], 5) == ["time,index", *rows[:5]]
    # Rows of no GPU are instants by themselves.
    counters = [f"{second},{second * 2}" for second in range(100)]
    assert evidence.thin(["time,running", *counters], 10) == ["time,running", *counters[::10]]


def test_plans_and_what_sglang_made_of_them(main: Folders) -> None:
    ended(main, "1", 100)
    main.resolved("b-2").parent.mkdir(parents=True)
    main.resolved("b-2").write_text('{"release": "b-2", "version": "0.5.23", "values": {"tp_size": "8"}}')
    main.resolved("a-1").write_text("torn")
    found = evidence.find([main], "")
    assert [(item.release, item.values) for item in found.resolved] == [("b-2", {"tp_size": "8"})]
    assert found.plans == ()
