"""What surrounds the questions to NVML; those themselves are tested on a host, in tests/lab/test_sampling.py."""

from __future__ import annotations

import csv
import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelswap.agent import client, gpus
from kernelswap.agent.client import Client
from kernelswap.agent.verify import telemetry
from kernelswap.agent.verify.telemetry import Telemetry
from kernelswap.measured import GPU_COLUMNS, SERVER_COLUMNS
from kernelswap.protocol import Gpu

METRICS = (Path(__file__).parent / "metrics_0.5.23.txt").read_text()
ONE = Gpu(0, "GPU-a", "RTX, of some kind")
NOBODY = Client("http://127.0.0.1:1", "m")


@pytest.fixture
def server() -> Iterator[Client]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *args: Any) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield Client(f"http://127.0.0.1:{served.server_address[1]}", "m")
        served.shutdown()


def test_the_counters_of_sglang_as_recorded() -> None:
    seen = client.gauges(METRICS)
    assert (seen["running"], seen["queued"], seen["token_usage"]) == (6, 6, 0.02)
    assert (round(seen["gen_throughput"], 1), round(seen["cache_hit_rate"], 2)) == (70.3, 0.67)
    assert "spec_accept_length" not in seen, "0 of a server that does not speculate is no figure"
    ranks = METRICS + METRICS.replace('tp_rank="0"', 'tp_rank="1"')
    assert client.gauges(ranks)["running"] == 12
    assert client.gauges(ranks)["token_usage"] == 0.02
    assert client.gauges("no metrics") == {}


def fake(figures: dict[str, str]) -> Any:
    """In place of what asks NVML."""

    def sample(nvml: Any, gpu: Gpu, pipe: int) -> None:
        cells = [figures.get(name, "") for name in list(GPU_COLUMNS)[5:]]
        for _ in telemetry._rounds(0.05, time.sleep):
            who = [str(gpu.index), gpu.uuid, gpu.name.replace(",", " ")]
            telemetry._tell(pipe, ",".join([f"{time.time():.3f}", *who, *cells]))

    return sample


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(telemetry, "_sample", fake({"utilization": "98", "power": "330.1"}))
    return monkeypatch


def test_phases_are_marked_and_the_columns_are_those_that_readers_know(
    tmp_path: Path, server: Client, no_driver: pytest.MonkeyPatch
) -> None:
    with Telemetry([ONE], server, tmp_path) as sampled:
        for phase in ("warm-up", "run c=64 1/3, odd"):
            sampled.phase(phase)
            time.sleep(0.4)
    assert sampled.notes == []
    rows = list(csv.reader((tmp_path / "gpu.csv").open()))
    assert rows[0] == list(GPU_COLUMNS.values())
    assert {len(row) for row in rows} == {len(GPU_COLUMNS)}
    samples = [dict(zip(GPU_COLUMNS, row)) for row in rows[1:]]
    assert list(dict.fromkeys(row["phase"] for row in samples if row["phase"])) == ["warm-up", "run c=64 1/3, odd"]
    assert (samples[-1]["utilization"], samples[-1]["power"], samples[-1]["sm_clock"]) == ("98", "330.1", "")
    assert abs(float(samples[-1]["time"]) - time.time()) < 5
    header, first, *_ = csv.reader((tmp_path / "metrics.csv").open())
    assert header == list(SERVER_COLUMNS)
    counted = dict(zip(header, first))
    assert (float(counted["running"]), float(counted["token_usage"]), counted["spec_accept_length"]) == (6, 0.02, "")


def test_a_second_time_adds_to_the_same_files(tmp_path: Path, no_driver: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with Telemetry([ONE], NOBODY, tmp_path):
            time.sleep(0.2)
    text = (tmp_path / "gpu.csv").read_text()
    assert text.count("clocks.sm") == 1
    assert len(text.splitlines()) > 3
    assert not (tmp_path / "metrics.csv").exists(), "nobody answered"


def test_a_driver_that_is_not_there_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")

    def refuse() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    with Telemetry([ONE], NOBODY, tmp_path) as sampled:
        deadline = time.monotonic() + 10
        while not sampled.notes and time.monotonic() < deadline:
            time.sleep(0.05)
    assert sampled.notes == ["GPUs are not sampled: Driver Not Loaded"]


def test_a_disk_that_takes_nothing_ends_the_samples_only(tmp_path: Path, no_driver: pytest.MonkeyPatch) -> None:
    with Telemetry([ONE], NOBODY, tmp_path / "not there") as sampled:
        time.sleep(0.3)
    assert len(sampled.notes) == 1
    assert "samples end early" in sampled.notes[0]


def test_a_child_that_hangs_in_the_driver_is_left_with_its_gpus(tmp_path: Path, no_driver: pytest.MonkeyPatch) -> None:
    two = Gpu(1, "GPU-b", "RTX")
    left: list[Any] = []
    no_driver.setattr(gpus, "note_silence", lambda child, since, before, found: left.append((child, found)))
    no_driver.setattr(telemetry, "SILENT", 0.2)
    no_driver.setattr(telemetry, "_ended", lambda child, patience: False)
    told = telemetry._sample

    def only_one(nvml: Any, gpu: Gpu, pipe: int) -> None:
        told(nvml, gpu, pipe) if gpu == ONE else time.sleep(60)

    no_driver.setattr(telemetry, "_sample", only_one)
    start = time.monotonic()
    with Telemetry([ONE, two], NOBODY, tmp_path) as sampled:
        time.sleep(0.4)
    assert time.monotonic() - start < 3
    ((child, found),) = left
    os.waitpid(child, 0)
    assert found == [two]
    assert sampled.notes == ["NVML does not answer: GPU 1 GPU-b"]


def test_a_file_stays_small_however_long_it_takes() -> None:
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return sum(waited) > 24 * 3600

    start = time.monotonic
    clock = [0.0]
    try:
        telemetry.time.monotonic = lambda: clock[0]  # type: ignore[assignment]

        def move(seconds: float) -> bool:
            clock[0] += seconds
            return wait(seconds)

        rounds = sum(1 for _ in telemetry._rounds(telemetry.INTERVAL, move))
    finally:
        telemetry.time.monotonic = start  # type: ignore[assignment]
    assert rounds < 12_000, "rows of each GPU in a day"
