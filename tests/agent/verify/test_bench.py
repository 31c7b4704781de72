from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kernelswap.agent.verify import bench
from kernelswap.agent.verify.bench import Tick
from kernelswap.protocol import Plan

PLAN = Plan("main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "m", "127.0.0.1", 1)

LINE = {
    "output_throughput": 225.456,
    "input_throughput": 450.9,
    "duration": 1.42,
    "completed": 19,
    "total_input_tokens": 608,
    "total_output_tokens": 304,
    "median_ttft_ms": 12.3456,
    "p90_ttft_ms": 20.0,
    "p99_ttft_ms": 30.0,
    "median_itl_ms": 1.23456,
    "request_rate": math.inf,
    "server_info": {"api_key": "s3cret", "launch_command": "--api-key s3cret"},
    "cache_report": {"total_cached_tokens": 32, "storage_backend": None},
    "accept_length": None,
    "backend": "sglang",
}


def test_only_finite_numbers_are_kept() -> None:
    kept = bench.parse(json.dumps(LINE))
    assert kept is not None
    assert "s3cret" not in json.dumps(kept)
    dropped = {"request_rate", "server_info", "cache_report", "accept_length", "backend"}
    assert set(kept) == set(LINE) - dropped | {"cached_tokens"}
    assert kept["cached_tokens"] == 32


@pytest.mark.parametrize("line", ["", "{", "[]", '{"completed": 3}', '{"output_throughput": NaN}', "Traceback"])
def test_what_is_no_result(line: str) -> None:
    assert bench.parse(line) is None


def test_a_run() -> None:
    run = bench.run_of(bench.parse(json.dumps(LINE)) or {}, concurrency=4, requests=20)
    assert (run.completed, run.failed, run.input_tokens, run.output_tokens) == (19, 1, 608, 304)
    assert (run.input_tok_s, run.output_tok_s, run.cached_tokens) == (450.9, 225.46, 32)
    assert run.ttft == {"median": 12.346, "p90": 20.0, "p99": 30.0}
    assert run.itl == {"median": 1.235}


def ticks(count: int, share: float, running: float | None = None, queued: float | None = None) -> list[Tick]:
    return [Tick(0.5, share, running, queued)] * count


@pytest.mark.parametrize(
    ("seen", "bound"),
    [
        (ticks(20, 0.3), False),
        (ticks(20, 1.0, 20, 0), True),  # the server has a third of what was to be there
        (ticks(20, 1.0, 64, 0), False),  # it has all of it
        (ticks(20, 1.0, 32, 32), False),  # it takes no more
        (ticks(20, 1.0), None),
        (ticks(8, 1.0, 0, 0) + ticks(20, 0.4), False),  # the benchmark is imported
        (ticks(20, 0.4) + ticks(6, 1.0, 20, 0), False),  # and counts its tokens
        (ticks(9, 1.0) + ticks(11, 1.0, 20, 0), True),
        ([], False),
    ],
)
def test_a_client_that_is_the_bottleneck(seen: list[Any], bound: bool | None) -> None:
    assert bench.client_bound(seen, concurrency=64, duration=10) is bound


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["bench_serving.py"], "bench_serving"),
        (["bench_serving.py", "benchmark/__init__.py"], "bench_serving"),
        (["bench_serving.py", "benchmark/__init__.py", "benchmark/serving.py"], "benchmark/serving"),
    ],
)
def test_the_benchmark_is_found_where_each_sglang_keeps_it(tmp_path: Path, files: list[str], found: str) -> None:
    """With the options that it has; a second run goes on in the same process."""
    source = (
        'import sys\nprint(sys.argv, "--flush-cache", file=sys.stderr)\n'
        'open("out.jsonl", "a").write(\'{"completed": 1}\\n{"output_throughput": 2}\\n\')\n'
    )
    for name in ["__init__.py", *files]:
        file = tmp_path / "sglang" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(source if "serving" in name else "")
    run = json.dumps({"words": ["--port", "1"], "optional": [["--flush-cache"], ["--not-yet", "2"]]}) + "\n"
    words = [sys.executable, "-c", bench.SERVE]
    done = subprocess.run(words, cwd=tmp_path, input=run * 2, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.count(f"/{found}.py', '--port', '1', '--flush-cache']") == 2, done.stderr
    assert done.stdout == (json.dumps(["", False, '{"output_throughput": 2}']) + "\n") * 2
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("files", "says", "own"),
    [
        ({}, "ModuleNotFoundError: No module named 'sglang'", True),
        ({"__init__.py": ""}, "ModuleNotFoundError: No module named 'sglang.bench_serving'", True),
        (
            {"__init__.py": "", "bench_serving.py": "import no_such"},
            "ModuleNotFoundError: No module named 'no_such",
            True,
        ),
        ({"__init__.py": "", "bench_serving.py": "raise ValueError('no server')"}, "ValueError: no server", False),
        ({"__init__.py": "", "bench_serving.py": "raise SystemExit(1)"}, "1", False),
    ],
)
def test_whose_fault_it_is_that_there_is_no_result(tmp_path: Path, files: dict[str, str], says: str, own: bool) -> None:
    for name, text in files.items():
        (tmp_path / "sglang").mkdir(exist_ok=True)
        (tmp_path / "sglang" / name).write_text(text)
    run = json.dumps({"words": [], "optional": []}) + "\n"
    words = [sys.executable, "-c", bench.SERVE]
    done = subprocess.run(words, cwd=tmp_path, input=run, capture_output=True, text=True, timeout=60, check=False)
    error, blamed, result = json.loads(done.stdout)
    assert result == ""
    assert says in error
    assert blamed is own


def test_one_that_is_killed_while_it_answers_gave_no_result() -> None:
    script = 'printf \'["", false, "{\'; kill -9 $$'
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe) as process, tempfile.TemporaryFile() as log:
        assert process.stdin
        assert process.stdout
        late = time.monotonic() + 60
        benchmark = bench.Benchmark(PLAN, PLAN, "", late, log, process, process.stdin, process.stdout)
        _, error, own, result = benchmark._wait()
    assert (error, own, result) == ("it was killed by signal 9, as when memory is short", True, "")
