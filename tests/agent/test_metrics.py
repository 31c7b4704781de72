from __future__ import annotations

from pathlib import Path

import pytest
from samples import plan

from kernelswap import ledger
from kernelswap.agent import files, host, metrics
from kernelswap.agent.host import Folders
from kernelswap.agent.metrics import Metric
from kernelswap.ledger import Tally
from kernelswap.protocol import Finding, HostDrift, HostState, InstanceState, Report, Request, StepResult, encode

REQUEST = Request("s", "main", "converge", "triton-1", "ann")
DIRTY = (StepResult("stop", 1.0, True), StepResult("clean", 120.0, False))
BACK = (StepResult("ready", 1.0, False), StepResult("< clean", 120.0, False))
HISTORY = [
    Report(REQUEST, "committed", 10.0, 12.5),
    Report(REQUEST, "rolled-back", 20.0, 150.0, steps=DIRTY),
    Report(REQUEST, "down", 200.0, 330.0, steps=BACK),
]


def told(*found: Metric) -> dict[str, str]:
    """Series -> value."""
    lines = [line for line in metrics.text(found).splitlines() if not line.startswith("#")]
    return {series: value for series, _, value in (line.rpartition(" ") for line in lines)}


def test_what_an_instance_serves_and_how_its_swaps_ended() -> None:
    series = told(*metrics.of_instance("main", "triton-1", plan(), ledger.tally(Tally(), HISTORY), HISTORY[-1]))
    assert series == {
        'kernelswap_release_info{sglang_instance="main",release="triton-1",profile="p",model="m"}': "1.0",
        'kernelswap_swaps_total{sglang_instance="main",outcome="committed"}': "1.0",
        'kernelswap_swaps_total{sglang_instance="main",outcome="rolled-back"}': "1.0",
        'kernelswap_swaps_total{sglang_instance="main",outcome="down"}': "1.0",
        'kernelswap_swaps_total{sglang_instance="main",outcome="refused"}': "0.0",
        'kernelswap_swaps_total{sglang_instance="main",outcome="unchanged"}': "0.0",
        'kernelswap_clean_host_failures_total{sglang_instance="main"}': "2.0",
        'kernelswap_last_swap_outcome{sglang_instance="main",outcome="committed"}': "0.0",
        'kernelswap_last_swap_outcome{sglang_instance="main",outcome="rolled-back"}': "0.0",
        'kernelswap_last_swap_outcome{sglang_instance="main",outcome="down"}': "1.0",
        'kernelswap_last_swap_outcome{sglang_instance="main",outcome="refused"}': "0.0",
        'kernelswap_last_swap_outcome{sglang_instance="main",outcome="unchanged"}': "0.0",
        'kernelswap_last_swap_timestamp_seconds{sglang_instance="main"}': "330.0",
        'kernelswap_last_swap_duration_seconds{sglang_instance="main"}': "130.0",
    }


def test_what_never_served_has_no_release_and_no_last_swap() -> None:
    series = told(*metrics.of_instance("main", None, None, Tally(), None))
    assert not [name for name in series if "last" in name or "info" in name]
    assert series['kernelswap_swaps_total{sglang_instance="main",outcome="down"}'] == "0.0"


def test_drift_by_instance_and_what_is_unknown_apart() -> None:
    found = [
        Finding("unit", "/x", "a", "b", "do", "main"),
        Finding("cron", "/y", "a", "b", "do"),
        Finding("resolved", "/z", "a", "b", "do", "main", unknown=True),
    ]
    series = told(*metrics.of_drift(["main", "other"], found, 99.5))
    assert series == {
        'kernelswap_drift_findings{sglang_instance=""}': "1.0",
        'kernelswap_drift_findings{sglang_instance="main"}': "1.0",
        'kernelswap_drift_findings{sglang_instance="other"}': "0.0",
        'kernelswap_drift_unknown{sglang_instance=""}': "0.0",
        'kernelswap_drift_unknown{sglang_instance="main"}': "1.0",
        'kernelswap_drift_unknown{sglang_instance="other"}': "0.0",
        "kernelswap_drift_last_look_timestamp_seconds": "99.5",
    }


def test_labels_are_escaped() -> None:
    metric = Metric("x", "gauge", "two\nlines", (((("a", 'q"\\\n\ud800'),), 1.0),))
    assert metrics.text([metric]) == '# HELP x two\\nlines\n# TYPE x gauge\nx{a="q\\"\\\\\\n?"} 1.0\n'


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    folders = Folders("main", tmp_path)
    files.write(folders.release("r") / "plan.json", encode(plan()))
    folders.known_good.symlink_to("releases/r")
    files.append(folders.history, encode(HISTORY[0]))
    return folders


def collector(root: Path) -> Path:
    """The folder that metrics go to, as roles/monitoring.py sets it up."""
    folder = root / "collector"
    folder.mkdir()
    (root / "etc/kernelswap/metrics").symlink_to(folder)
    return folder


def test_they_are_written_where_the_link_leads(folders: Folders) -> None:
    folder = collector(folders.root)
    metrics.write(folders)
    (path,) = folder.iterdir()
    assert path.name == "kernelswap-main.prom"
    assert path.stat().st_mode & 0o777 == 0o644
    assert 'release="r"' in path.read_text()


def test_without_a_link_or_its_folder_nothing_is_written(folders: Folders) -> None:
    metrics.write(folders)
    (folders.root / "etc/kernelswap/metrics").symlink_to(folders.root / "gone")
    metrics.write(folders)
    assert not (folders.root / "gone").exists()


def test_what_cannot_be_written_stands_in_the_way_of_nothing(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    collector(folders.root)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    metrics.write(folders)


def test_drift_has_a_file_of_its_own(folders: Folders) -> None:
    folder = collector(folders.root)
    seen = HostDrift(HostState("sha", "key", instances=(InstanceState("main"),)))
    metrics.write_drift(seen, folders.root)
    assert 'kernelswap_drift_findings{sglang_instance="main"} 0.0' in (folder / "kernelswap-drift.prom").read_text()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", '{"outcomes": 5}'])
def test_a_tally_that_cannot_be_read_counts_what_the_history_has(tmp_path: Path, text: str) -> None:
    folders = Folders("main", tmp_path)
    files.write(folders.tally, text)
    assert host.tally(folders, HISTORY) == ledger.tally(Tally(), HISTORY)
