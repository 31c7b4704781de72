from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kernelswap import decide
from kernelswap.host_setup import Monitoring, monitoring_of
from kernelswap.protocol import HostState

TEMPLATES = Path(__file__).parent.parent / "templates"
NONE = HostState("", "ab" * 32)


def test_metrics_are_set_up_only_where_they_are_not() -> None:
    wanted = monitoring_of({"metrics": "/m"}, NONE, TEMPLATES)
    assert wanted
    assert (wanted.folder, sorted(wanted.units)) == ("/m", ["kernelswap-drift.service", "kernelswap-drift.timer"])
    digest = decide.digest("".join(wanted.units.values()))
    there = replace(NONE, metrics="/m", drift_units=digest)
    assert monitoring_of({"metrics": "/m"}, there, TEMPLATES) is None
    moved = monitoring_of({"metrics": "/n"}, there, TEMPLATES)
    assert moved == Monitoring("/n", "/m", wanted.units)
    assert monitoring_of({}, there, TEMPLATES) == Monitoring("", "/m")
    assert monitoring_of({}, NONE, TEMPLATES) is None
