"""Two servers, flag by flag. The cases are in differences.json."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kernelswap.differences import LIMIT_FIELDS, SERVER_FIELDS, Side, compare, of_plan, of_server
from kernelswap.protocol import LiveServer, Plan, Resolved, Server, decode

CASES = json.loads((Path(__file__).parent / "differences.json").read_text())
PLAN = Plan("main", "b-2", "b", "tiny", "/opt/engine/bin/python", (), {}, "sglang", "/models/tiny", "tiny", "127.0.0.1", 30000)  # fmt: skip # noqa: E501


def side(case: dict[str, Any]) -> Side:
    values = {name: json.dumps(value) for name, value in case.get("resolved", {}).items()}
    resolved = Resolved("b-2", "0.5.23", values) if values else None
    if "running" in case:
        argv = tuple(shlex.split(case["running"]))
        server = Server(77, 0, case.get("user", "sglang"), argv)
        python = next(word for word in argv if word.startswith("/"))
        live = LiveServer(server, "b-2", python, case.get("environment", {}), resolved)
        return of_server(live, dataclasses.replace(PLAN, secret_flags=("api-key",)))
    words = ["-m", "sglang.launch_server", "--model-path", "/models/tiny", *shlex.split(case.get("argv", ""))]
    return of_plan(decode(Plan, json.dumps({**dataclasses.asdict(PLAN), **case, "argv": words})), resolved)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_differences(case: dict[str, Any]) -> None:
    changes = compare(side(case["before"]), side(case["after"]))
    assert [f"{change.section} {change}" for change in changes] == case["lines"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_other_way_round_as_much_differs_and_nothing_from_itself(case: dict[str, Any]) -> None:
    before, after = side(case["before"]), side(case["after"])
    assert len(compare(after, before)) == len(case["lines"])
    assert compare(before, before) == compare(after, after) == ()


def test_a_deploy_says_of_each_line_where_it_belongs() -> None:
    (change,) = compare(of_plan(PLAN), of_plan(dataclasses.replace(PLAN, environment={"A": "1"})))
    assert change.line == "environment A: (unset) -> 1"


def test_every_field_of_a_plan_is_shown_somewhere() -> None:
    shown = {*LIMIT_FIELDS, *SERVER_FIELDS, "argv", "secret_flags", "environment"}
    follow_from_those = {"instance", "release", "profile", "flags", "digests"}
    assert {f.name for f in dataclasses.fields(Plan)} == shown | follow_from_those
