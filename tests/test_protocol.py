from __future__ import annotations

import dataclasses
import json

import pytest

from kernelswap.protocol import (
    Accuracy,
    Answer,
    Cause,
    DriftLimits,
    Gpu,
    HostState,
    InstanceState,
    Plan,
    Report,
    Request,
    Running,
    Server,
    Smoke,
    StepResult,
    Throughput,
    Verify,
    decode,
    encode,
)  # fmt: skip

REQUEST = Request("20261130T000000Z-ab12", "main", "converge", "trtllm-0123456789ab", "ann@desk", "slow", True, True)
PLAN = Plan(
    instance="main", release="trtllm-0123456789ab", profile="trtllm", model="glm5", python="/opt/sglang/bin/python",
    argv=("-m", "sglang.launch_server", "--json", '{"a": "日本\\n"}', ""), environment={"PATH": "/bin", "E": ""},
    user="sglang", model_path="/m", served_name="glm5", address="::", port=30000, gpus=("GPU-1",), gpu_count=8,
    flags={"tp-size": "8"}, secret_flags=("api-key",),
    verify=Verify(
        (Answer("2+2", "4"),), Smoke(0.25), DriftLimits(2.0, 0.75, 0.25, 1.5, 0.125, "/p.json", "note"),
        Accuracy("/q.jsonl", 50, 2, 4, 0.5), Throughput(64, 1024, 1024, 256, 200.0), 1.5,
    ),
)  # fmt: skip
REPORT = Report(
    REQUEST, "rolled-back", 1.0, 2.5, "a-1", "a-1", Cause("what", "where", "todo", "oom", "release"), "", "/var/x",
    (StepResult("ready", 12.5, False, "x", {"n": 1.0}),),
)  # fmt: skip
STATE = HostState(
    "sha", "key", ("sglang",), "sha", ("main",),
    (InstanceState("main", "a-1", plan=PLAN, running=Running(REQUEST, 1.0, "ready", True), history=(REPORT,),
                   releases={"a-1": {"plan.json": "sha"}}),),
    (Server(1, 1.0, "ann", ("python3",), None, 30000),), (Gpu(0, "GPU-0", "RTX", "12.0", 97887, 4, pids=(1, 2)),),
)  # fmt: skip


@pytest.mark.parametrize("value", [REQUEST, PLAN, REPORT, STATE], ids=lambda value: type(value).__name__)
def test_what_is_encoded_decodes_to_the_same(value: object) -> None:
    text = encode(value)
    assert "\n" not in text
    assert decode(type(value), text) == value


def test_how_a_verification_is_asked_for() -> None:
    run = Throughput(64, 1024, 256, 256, 180.0, lower=(1, 8), floors={"8": 90.0})
    verify = Verify((Answer("2+2", "4"),), throughput=run, accuracy=Accuracy("/q.jsonl"))
    assert verify.asked("") == verify
    assert verify.asked("quick").accuracy is None
    short = verify.asked("quick").throughput
    assert short == Throughput(64, 1024, 256, 128, 180.0, repetitions=1, regression=None)
    whole = verify.asked("full").throughput
    assert whole == dataclasses.replace(run, repetitions=5, baseline="fresh")
    assert Verify().asked("quick") == Verify()


def test_each_rung_of_a_ladder_has_as_many_requests_as_its_share() -> None:
    run = Throughput(64, 1024, 256, 250, lower=(1, 8, 60))
    assert run.ladder == (1, 8, 60, 64)
    assert [run.requests_at(rung) for rung in run.ladder] == [4, 32, 235, 250]
    assert Throughput(8, 1, 1, 2).requests_at(8) == 8, "each slot is used"


def test_an_older_reader_ignores_newer_keys() -> None:
    text = json.dumps({**json.loads(encode(REQUEST)), "colour": "red"})
    assert decode(Request, text) == REQUEST


@pytest.mark.parametrize("text", ['{"argv": null}', '{"argv": 3}', '{"environment": []}', '{"verify": {"answers": 1}}'])
def test_text_of_another_form_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        decode(Plan, text)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"swap": "x"}'])
def test_broken_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        decode(Request, text)


def test_the_same_goal_is_asked_by_anybody() -> None:
    other = Request("later", "main", "converge", REQUEST.release, "bob@desk")
    assert REQUEST.same_goal(other)
    assert not REQUEST.same_goal(Request("later", "main", "rollback", REQUEST.release, "bob@desk"))


def test_only_a_release_that_failed_by_itself_is_barred() -> None:
    assert REPORT.bars
    assert not Report(REQUEST, "rolled-back", 1.0, 2.0, cause=Cause("a", "b", "c")).bars
    assert not Report(REQUEST, "refused", 1.0, 2.0, cause=REPORT.cause).bars
