"""Every trace has the right first finding: as it is, and made harder in ways that change nothing of its cause."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import SCRIPTS, Script, ours

from kernelswap import diagnosis, loads, traces
from kernelswap.diagnosis import Finding, diagnose

LOADED = [name for name, script in SCRIPTS.items() if script.expect not in ("idle", "unknown")]
IDLE = {
    "utilization": 0, "memory_utilization": 0, "power": 35, "sm_clock": 180, "memory_clock": 405, "reasons": 1,
    "temperature": 33, "pcie_rx": 0, "pcie_tx": 0,
}  # fmt: skip


def findings(script: Script, rows: list[dict[str, Any]]) -> tuple[Finding, ...]:
    """Through the files that a user has, so that what the files cannot say is not known."""
    server = script.server(rows)
    return diagnose(
        traces.read_gpus(ours(rows)).samples,
        traces.read_bench(script.bench()).runs,
        traces.read_server(server).server if server else (),
    )


def first(script: Script, rows: list[dict[str, Any]]) -> str:
    return findings(script, rows)[0].name


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_first_finding_is_the_cause(name: str) -> None:
    script = SCRIPTS[name]
    found = findings(script, script.rows())
    assert found[0].name == script.expect, [finding.headline for finding in found]
    assert set(script.data.get("also", [])) <= {finding.name for finding in found}
    for finding in found:
        assert finding.next
        assert finding.alternatives
        assert finding.evidence or finding.name == "unknown"
        assert len({figure.what for figure in finding.evidence}) == len(finding.evidence)


@pytest.mark.parametrize("name", LOADED)
def test_noise_and_samples_that_are_missing_do_not_change_it(name: str) -> None:
    script = SCRIPTS[name]
    chance = random.Random(7)  # noqa: S311
    rows = [row for row in script.rows(noise=0.03, seed=3) if chance.random() < 0.6]
    assert first(script, rows) == script.expect


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOADED)
def test_no_noise_of_many_changes_it(name: str) -> None:
    script = SCRIPTS[name]
    for seed in range(20):
        rows = script.rows(noise=0.04, step=0.5, seed=seed)
        assert first(script, rows) == script.expect, seed


def between(low: dict[str, Any], high: dict[str, Any], share: float) -> dict[str, Any]:
    def level(value: Any) -> float:
        return sum(value) / 2 if isinstance(value, list) else value

    return {key: low[key] + share * (level(high[key]) - low[key]) for key in low if high.get(key) is not None}


def with_segments(script: Script, segments: list[dict[str, Any]]) -> Script:
    return replace(script, data={**script.data, "segments": segments})


@pytest.mark.parametrize("name", LOADED)
def test_a_ramp_a_tail_and_time_without_work_do_not_change_it(name: str) -> None:
    """As whoever starts the sampler first and stops it last sees it, in the same phase."""
    script = SCRIPTS[name]
    start, end = script.segments[0], script.segments[-1]
    common = script.data["common"]
    idle = {**start, **IDLE, "seconds": 12, "gpus": {}}
    up = [
        {**start, **between(IDLE, {**common, **start}, share / 6), "reasons": 0, "gpus": {}, "seconds": 1}
        for share in range(1, 6)
    ]
    down = [
        {**end, **between(IDLE, {**common, **end}, share / 6), "reasons": 0, "gpus": {}, "seconds": 1}
        for share in range(5, 0, -1)
    ]
    # What hangs has no tail: it hangs.
    after = [] if script.expect == "hang" else [*down, {**end, **IDLE, "seconds": 25, "gpus": {}}]
    assert first(script, with_segments(script, [idle, *up, *script.segments, *after]).rows()) == script.expect


@pytest.mark.parametrize("name", LOADED)
def test_a_gpu_that_is_a_little_other_does_not_change_it(name: str) -> None:
    """A card of the same kind: 8 % more power, 5 degrees warmer, 3 % lower clocks."""
    script = SCRIPTS[name]
    rows = script.rows()
    for row in rows:
        if row["index"] == 2 and row["power"] is not None:
            row["power"] = min(row["power"] * 1.08, row["power_limit"] or 600)
            row["sm_clock"] *= 0.97
            row["temperature"] += 5 if script.expect == "thermal-cap" else 2
    assert first(script, rows) == script.expect


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("step", [0.5, 3.0])
def test_the_rate_of_sampling_does_not_change_it(name: str, step: float) -> None:
    script = SCRIPTS[name]
    assert first(script, script.rows(step=step)) == script.expect


@pytest.mark.parametrize("name", LOADED)
def test_twice_as_many_gpus_of_the_same_do_not_change_it(name: str) -> None:
    script = SCRIPTS[name]
    rows = script.rows()
    twins = [{**row, "index": row["index"] + 100, "uuid": row["uuid"] + "b"} for row in rows]
    both = [row for pair in zip(rows, twins) for row in pair]  # noqa: B905
    assert first(script, both) == script.expect


@pytest.mark.parametrize("name", LOADED)
def test_it_is_found_without_names_of_phases(name: str) -> None:
    """But for what only the phase tells: how much power decoding takes, or which of several rates is meant."""
    script = SCRIPTS[name]
    words = {segment.get("phase", "").partition(" ")[0] for segment in script.segments}
    if words & {"prefill", "decode"} or len(words - {"between"}) > 1:
        pytest.skip("the phase is the point")
    rows = [{**row, "phase": ""} for row in script.rows()]
    assert first(script, rows) == script.expect


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_not_known_is_not_taken_for_nothing(name: str) -> None:
    """Without any one column there is still an answer, and never one that the missing column alone would tell."""
    script = SCRIPTS[name]
    rows = script.rows()
    for field, needs in {
        "power": {"busy-not-loaded", "normal-decode", "loaded"},
        "sm_clock_max": set(),
        "reasons": set(),
        "name": set(),
    }.items():
        found = findings(script, [{**row, field: None if field != "name" else ""} for row in rows])
        assert found
        assert not needs & {finding.name for finding in found}


def test_one_gpu_waits_for_no_other() -> None:
    """Little power alone, where nothing says whether memory is read, is a hang only of several GPUs."""
    script = SCRIPTS["nccl_deadlock_unrated"]
    rows = [{**row, "memory_utilization": None} for row in script.rows()]
    assert first(script, rows) == "hang"
    assert first(script, [row for row in rows if row["index"] == 0]) == "busy-not-loaded"


def test_a_hang_is_found_without_the_power_limit() -> None:
    """As in a file of `nvidia-smi dmon`, which has neither limits nor names."""
    script = SCRIPTS["hang_after_a_while"]
    rows = [{**row, "power_limit": None, "name": ""} for row in script.rows()]
    assert first(script, rows) == "hang"


def test_every_rule_is_explained_and_every_threshold_is_used() -> None:
    table = loads.table()
    names = [row["name"] for row in table["findings"]]
    assert [name for name in names if name not in ("idle", "unknown")] == list(diagnosis._RULES)
    source = "".join(Path(module.__file__).read_text() for module in (diagnosis, loads))
    for name, row in table["thresholds"].items():
        assert f'threshold("{name}")' in source
        assert row["source"]
    assert {script.expect for script in SCRIPTS.values()} == set(names)
