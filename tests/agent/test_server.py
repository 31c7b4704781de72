from __future__ import annotations

import json
import math

import pytest

from kernelswap.agent import server, units
from kernelswap.protocol import Plan, Throughput

WANTED = Throughput(concurrency=4, input_tokens=32, output_tokens=16, requests=20, floor=50.0)
LINE = {
    "output_throughput": 225.456,
    "completed": 20,
    "total_output_tokens": 320,
    "median_ttft_ms": 12.3456,
    "median_itl_ms": 1.23456,
    "request_rate": math.inf,
    "server_info": {"api_key": "s3cret", "launch_command": "--api-key s3cret"},
    "backend": "sglang",
}


def test_only_finite_numbers_are_kept() -> None:
    kept = server.parse_bench(json.dumps(LINE))
    assert kept is not None
    assert "s3cret" not in json.dumps(kept)
    assert set(kept) == {"output_throughput", "completed", "total_output_tokens", "median_ttft_ms", "median_itl_ms"}


@pytest.mark.parametrize("line", ["", "{", "[]", '{"completed": 3}', "Traceback"])
def test_what_is_no_result(line: str) -> None:
    assert server.parse_bench(line) is None


def test_judge_reports_what_was_measured() -> None:
    kept = server.parse_bench(json.dumps(LINE))
    assert kept is not None
    assert server.judge(kept, WANTED, "x") == {
        "output_tok_s": 225.46,
        "completed": 20.0,
        "failed": 0.0,
        "concurrency": 4.0,
        "output_tokens": 320,
        "median_ttft_ms": 12.35,
        "median_itl_ms": 1.235,
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"output_throughput": 49.9}, "49.9 output tok/s at 4 concurrent requests, the floor is 50"),
        ({"completed": 18}, "2 of 20 benchmark requests failed"),
    ],
)
def test_judge_refuses(change: dict[str, float], text: str) -> None:
    with pytest.raises(server.Failed) as failure:
        server.judge({"output_throughput": 225.0, "completed": 20, **change}, WANTED, "x")
    assert failure.value.cause.what == text
    assert failure.value.cause.blame == "release"


@pytest.mark.parametrize(("result", "blame"), [("oom-kill", "host"), ("timeout", "host"), ("exit-code", "release")])
def test_who_is_to_blame_for_an_end_without_a_word(result: str, blame: str) -> None:
    status = units.UnitStatus("failed", "failed", 0, "", False, "", result, None)
    plan = Plan("main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "m", "0.0.0.0", 30000)
    assert server.unit_failure(plan, status, "it ended").cause.blame == blame
