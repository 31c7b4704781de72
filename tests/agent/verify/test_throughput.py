"""Against the stand-in's server and benchmark, which are processes, requests and clocks as real as SGLang's."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernelswap.agent.client import Client
from kernelswap.agent.host import Folders
from kernelswap.agent.server import Failed
from kernelswap.agent.verify import throughput
from kernelswap.agent.verify.elsewhere import Meter
from kernelswap.agent.verify.throughput import Target
from kernelswap.measured import Run, ThroughputResult, ThroughputVerdict
from kernelswap.protocol import Gpu, Plan, Throughput, Timeouts, decode

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the agent is root")

STANDIN = Path(__file__).parents[3] / "lab" / "standin"
H200 = Gpu(0, "GPU-a", "NVIDIA H200", driver="580.65")
WANTED = Throughput(4, 8, 8, 8, floor=1, lower=(1,), regression=0.2)
Start = Callable[..., Plan]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A served release, whose tokens take `seconds` each."""
    started: list[subprocess.Popen[bytes]] = []

    def launch(release: str, *words: str, seconds: float = 0.005, fault: str = "") -> Plan:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(STANDIN)}
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "m", "--port", str(port), *words]
        slow = {"STANDIN_FAULT": fault or f"slow-answer:{seconds}"}
        with (tmp_path / f"{release}.log").open("w") as log:
            started.append(subprocess.Popen(command, env={**environment, **slow}, stderr=log))
        client = Client(f"http://127.0.0.1:{port}", "m")
        until = time.monotonic() + 20
        while client.status("/ready") != 200:
            assert time.monotonic() < until
            time.sleep(0.02)
        return Plan("main", release, "p", "m", sys.executable, (), environment, "root", "/m", "m", "127.0.0.1", port)

    yield launch
    for process in started:
        process.kill()
        process.wait()


def check(
    plan: Plan, evidence: Path, wanted: Throughput = WANTED, known: ThroughputResult | None = None, key: str = ""
) -> tuple[ThroughputVerdict, list[str]]:
    told: list[str] = []
    evidence.mkdir(exist_ok=True)
    keys = {"api-key": key} if key else {}
    return throughput.check(plan, wanted, keys, known, "key", evidence, told.append), told


def test_a_ladder_is_measured_and_kept(start: Start, tmp_path: Path) -> None:
    verdict, told = check(start("new-2", "--api-key", "s3cret", "--enable-metrics"), tmp_path / "e", key="s3cret")
    assert verdict.verdict == "pass"
    assert [(point.concurrency, len(point.runs)) for point in verdict.candidate.points] == [(1, 3), (4, 3)]
    one, four = verdict.candidate.points
    assert {run.completed for run in one.runs} == {2}
    assert {run.output_tokens for run in four.runs} == {64}
    assert four.low <= four.median <= four.high
    lines = [json.loads(line) for line in (tmp_path / "e" / "bench.jsonl").read_text().splitlines()]
    phases = [f"run c={at} {number}/3" for number in (1, 2, 3) for at in (4, 1)]
    assert [line["phase"] for line in lines] == ["warm-up", *phases]
    assert [line["requests"] for line in lines[1:]] == [8, 2] * 3
    assert all(lines[index]["ended"] <= lines[index + 1]["started"] for index in range(6))
    assert len([text for text in told if "output tok/s" in text]) == 6
    kept = (tmp_path / "e" / "throughput.json").read_text()
    assert decode(ThroughputVerdict, kept) == verdict
    assert "s3cret" not in kept + json.dumps(lines)
    numbers = throughput.numbers(verdict)
    assert numbers["output_tok_s"] == four.median
    assert numbers["output_tok_s_at_1"] == one.median
    assert {"median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "prefill_tok_s", "decode_tok_s"} <= set(
        numbers
    )


def test_a_slower_one_is_rejected_and_an_equal_one_is_not(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "share", lambda _self: 0.0)  # whatever else this machine does, see test_gates.py
    wanted = dataclasses.replace(WANTED, lower=(), regression=0.5)
    good = start("good-1", seconds=0.01)
    target, told = Target(good, {}), []
    known = throughput.baseline(good, wanted, target, "key", tmp_path, told.append)
    assert [point.concurrency for point in known.points] == [4]
    assert all(text.startswith("baseline run c=4 ") for text in told if "output tok/s" in text)
    verdict, _ = check(good, tmp_path / "same", wanted, known)
    assert verdict.verdict in ("pass", "inconclusive")
    with pytest.raises(Failed, match=r"slower than good-1 at 4 concurrent requests") as failure:
        check(start("new-2", seconds=0.05), tmp_path / "slow", wanted, known)
    assert failure.value.cause.blame == "release"
    kept = decode(ThroughputVerdict, (tmp_path / "slow" / "throughput.json").read_text())
    assert (kept.verdict, kept.baseline) == ("fail", known)
    assert kept.difference is not None and kept.difference < -0.5


@pytest.mark.parametrize(
    ("words", "change", "says"),
    [
        ((), {"floor": 1e6}, "the floor is 1e+06"),
        (("--api-key", "another"), {}, "8 of 8 benchmark requests failed"),
    ],
)
def test_what_fails(start: Start, tmp_path: Path, words: tuple[str, ...], change: dict[str, float], says: str) -> None:
    wanted = dataclasses.replace(WANTED, lower=(), **change)
    with pytest.raises(Failed) as failure:
        check(start("new-2", *words), tmp_path / "e", wanted)
    assert says in failure.value.cause.what


def test_a_benchmark_that_cannot_run(start: Start, tmp_path: Path) -> None:
    plan = dataclasses.replace(start("new-2"), environment={"PATH": os.environ["PATH"]})
    says = "the benchmark gave no result: ModuleNotFoundError: No module named 'sglang"
    with pytest.raises(Failed, match=says) as failure:
        check(plan, tmp_path / "e")
    assert failure.value.cause.blame == "host"


@pytest.mark.parametrize(
    ("end", "says", "blame"),
    [
        ("kill -KILL $$", "it was killed by signal 9, as when memory is short", "host"),
        ("exit 1", "it ended", "release"),
    ],
)
def test_a_benchmark_that_ends(end: str, says: str, blame: str, start: Start, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nread line\n{end}\n")
    script.chmod(0o755)
    with pytest.raises(Failed) as failure:
        check(dataclasses.replace(start("new-2"), python=str(script)), tmp_path / "e")
    cause = failure.value.cause
    assert (cause.what, cause.blame) == (f"the benchmark gave no result: {says}", blame)


def test_a_server_that_dies_of_it(start: Start, tmp_path: Path) -> None:
    with pytest.raises(Failed):
        check(start("new-2", fault="crash-during-throughput"), tmp_path / "e")


def test_time_is_limited(start: Start, tmp_path: Path) -> None:
    plan = dataclasses.replace(start("new-2", seconds=1), timeouts=Timeouts(throughput=2))
    before = time.monotonic()
    with pytest.raises(Failed, match="no result within 2 s"):
        check(plan, tmp_path / "e")
    assert time.monotonic() - before < 10


def run(**change: object) -> Run:
    return dataclasses.replace(Run(4, 8, 0, 1.0, 256, 64, 256.0, 64.0, {}, {}, {}), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cached", "flushed", "cold"),
    [
        (0, True, True),
        (0, False, True),
        (200, True, False),
        (20, False, True),
        (None, True, True),
        (None, False, False),
    ],
)
def test_what_is_cold(cached: int | None, flushed: bool, cold: bool) -> None:
    assert throughput.is_cold(run(cached_tokens=cached), flushed) is cold


@pytest.mark.parametrize("policy", ["commit", "rollback"])
def test_a_warm_cache_is_no_measurement(
    policy: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "flush", lambda _self: False)  # and the stand-in counts no cached tokens
    wanted = dataclasses.replace(WANTED, lower=(), inconclusive=policy)
    plan = start("new-2")
    if policy == "rollback":
        with pytest.raises(
            Failed, match="inconclusive: not measured: the prefix cache could not be emptied"
        ) as failure:
            check(plan, tmp_path / "e", wanted)
        assert failure.value.cause.blame == "host"
        return
    verdict, _ = check(plan, tmp_path / "e", wanted)
    assert (verdict.verdict, verdict.candidate.points) == ("inconclusive", ())
    assert verdict.why.endswith("; so its floor could not be judged")
    assert throughput.numbers(verdict) == {}


def test_what_was_measured_counts_though_later_runs_do_not(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unclear(_wanted: Throughput, candidate: ThroughputResult, *_others: object) -> ThroughputVerdict:
        return ThroughputVerdict("inconclusive", "2.0% slower", candidate)

    runs = iter([True] * 4)  # the warm-up is not asked about
    monkeypatch.setattr(throughput, "is_cold", lambda *_others: next(runs, False))
    monkeypatch.setattr(throughput.gates, "judge", unclear)
    verdict, told = check(start("new-2"), tmp_path / "e", dataclasses.replace(WANTED, lower=()))
    assert [len(point.runs) for point in verdict.candidate.points] == [4]
    assert verdict.why == "2.0% slower"
    assert any(text.startswith("no more runs: the prefix cache could not be emptied") for text in told)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"completed": 6, "failed": 2, "output_tokens": 48}, "2 of 8 benchmark requests failed"),
        ({"output_tokens": 63}, "63 tokens came at 4 concurrent requests, 64 were asked for"),
        ({"input_tokens": 32}, "the benchmark sent 32 tokens, not 64"),
    ],
)
def test_a_run_that_did_not_do_what_was_asked(change: dict[str, int], says: str, tmp_path: Path) -> None:
    plan = Plan("main", "b-2", "b", "m", sys.executable, (), {}, "root", "/m", "m", "127.0.0.1", 1)
    session = throughput.Session(plan, Target(plan, {}), WANTED, "key", tmp_path, lambda _text: None)
    session._check(run(input_tokens=64))
    with pytest.raises(Failed) as failure:
        session._check(run(input_tokens=change.pop("input_tokens", 64), **change))
    assert failure.value.cause.what == says
    assert failure.value.cause.blame == ("host" if "sent" in says else "release"), "prompts are the benchmark's own"


def test_only_what_can_be_compared_is_taken_from_the_store(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    result = ThroughputResult("a-1", "key", (throughput.gates.point(4, [run()]),))
    assert throughput.stored(folders, "a-1", "key") is None
    throughput.keep(folders, result)
    assert throughput.stored(folders, "a-1", "key") == result
    assert throughput.stored(folders, "a-1", "another") is None
    throughput.keep(folders, dataclasses.replace(result, points=()))
    assert throughput.stored(folders, "a-1", "key") is None
    (folders.measured("a-1") / "throughput.json").write_text("{")
    assert throughput.stored(folders, "a-1", "key") is None
    assert throughput.stored(folders, None, "key") is None


def test_what_a_result_depends_on(tmp_path: Path) -> None:
    def key_of(plan: Plan, wanted: Throughput, gpu: Gpu = H200, engine: str = "5f3a") -> str:
        return throughput.key(plan, wanted, [gpu], engine)

    plan = Plan("main", "b-2", "b", "m", "/p", (), {}, "root", str(tmp_path), "m", "127.0.0.1", 1)
    key = key_of(plan, WANTED)
    same = dataclasses.replace(plan, release="c-3", profile="c", argv=("--moe-runner-backend", "x"), port=2)
    assert key_of(same, dataclasses.replace(WANTED, floor=9, repetitions=5, regression=None)) == key
    assert key_of(dataclasses.replace(plan, python="/q"), WANTED) != key
    assert key_of(plan, dataclasses.replace(WANTED, input_tokens=9)) != key
    assert key_of(plan, dataclasses.replace(WANTED, lower=())) != key
    assert key_of(plan, WANTED, engine="77b0") != key
    assert key_of(plan, WANTED, dataclasses.replace(H200, driver="590.1")) != key
    assert key_of(plan, WANTED, dataclasses.replace(H200, uuid="GPU-b")) != key
    (tmp_path / "config.json").write_text("{}")
    assert key_of(plan, WANTED) != key
