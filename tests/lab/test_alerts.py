"""Prometheus's own promtool on the alert rules and on what the agent writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from labhost import ROOT
from promtool import check

from kernelswap import ledger
from kernelswap.agent import metrics
from kernelswap.protocol import Finding, Plan, Report, Request, StepResult

pytestmark = pytest.mark.xdist_group("promtool")  # it is downloaded once
ALERTS = ROOT / "monitoring/alerts.yml"


def test_every_alert_fires_when_it_must_and_never_for_a_host_that_is_well(tmp_path: Path) -> None:
    for path in (ALERTS, Path(__file__).with_name("alerts_test.yml")):
        shutil.copy(path, tmp_path)
    assert "SUCCESS" in check("check", "rules", "alerts.yml", folder=tmp_path)
    assert "SUCCESS" in check("test", "rules", "alerts_test.yml", folder=tmp_path)
    tested = (tmp_path / "alerts_test.yml").read_text()
    names = [line.split(": ")[1] for line in ALERTS.read_text().splitlines() if "- alert: " in line]
    assert names
    for name in names:
        assert f"alertname: {name}\n" in tested


def test_the_metrics_are_prometheus_own_format() -> None:
    request = Request("s", "main", "converge", 'we"ird\\', "ann")
    steps = (StepResult("stop", 1.0, True), StepResult("clean", 120.0, False))
    reports = [Report(request, "committed", 1.0, 2.5), Report(request, "down", 3.0, 124.0, steps=steps)]
    plan = Plan("main", "r", "pro\nfile", "m", "/p", (), {}, "u", "/m", "m", "0.0.0.0", 30000)
    found = [
        *metrics.of_instance("main", 'we"ird\\', plan, ledger.tally(ledger.Tally(), reports), reports[-1]),
        *metrics.of_drift(["main"], [Finding("unit", "/x", "a", "b", "do")], 9.5),
    ]
    assert check("check", "metrics", text=metrics.text(found)) == ""
