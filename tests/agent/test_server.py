from __future__ import annotations

import json
import math

import pytest

from kernelswap.agent import server, units
from kernelswap.agent.client import Reply
from kernelswap.protocol import Answer, Plan, Throughput

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


class Fake:
    """Answers a chat from a list; only what `_check_*` asks of a client."""

    def __init__(self, *texts: str, cut: bool = False) -> None:
        self.texts = list(texts)
        self.cut = cut

    def chat(self, prompt: str, max_tokens: int, timeout: float) -> Reply:
        return Reply(self.texts.pop(0), self.cut)


@pytest.mark.parametrize(
    ("texts", "faults"),
    [
        (("a", "a", "a"), 0),
        (("cold", "warm", "warm"), 0),  # the first fills the prefix cache; another kernel shape is no fault
        (("a", "b", "c"), 1),
        (("", "", ""), 1),
    ],
)
def test_the_same_answer_twice(texts: tuple[str, ...], faults: int) -> None:
    assert len(server._check_chat(Fake(*texts), 9)) == faults  # type: ignore[arg-type]


def test_a_thought_that_was_cut_says_so() -> None:
    answer = Answer("2+2", r"\b4\b", 64)
    assert server._check_answer(Fake("it is 4."), answer, 9) == []  # type: ignore[arg-type]
    (fault,) = server._check_answer(Fake("Let me think", cut=True), answer, 9)  # type: ignore[arg-type]
    assert "cut at max-tokens 64" in fault


@pytest.mark.parametrize(("result", "blame"), [("oom-kill", "host"), ("timeout", "host"), ("exit-code", "release")])
def test_who_is_to_blame_for_an_end_without_a_word(result: str, blame: str) -> None:
    status = units.UnitStatus("failed", "failed", 0, "", False, "", result, None)
    plan = Plan("main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "m", "0.0.0.0", 30000)
    assert server.unit_failure(plan, status, "it ended").cause.blame == blame
