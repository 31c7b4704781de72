from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernelswap import bundle, protocol
from kernelswap.facts import agent
from kernelswap.facts.host_drift import CarriedHostDrift, HostDrift
from kernelswap.facts.host_releases import CarriedHostReleases, HostReleases
from kernelswap.facts.host_state import CarriedHostState, GlancedHostState, HostState

GLANCE = GlancedHostState().command(["main"], ["sglang"])
STATE = protocol.HostState("sha", "key", users=("sglang",))


@pytest.mark.parametrize(
    ("output", "state"),
    [
        ([protocol.encode(STATE)], STATE),
        (["Welcome to gpu1", protocol.encode(STATE)], STATE),
        (["Traceback (most recent call last):", "SyntaxError"], None),
        (['{"an": "older agent"}'], None),
        (["{broken"], None),
    ],
)
def test_process(output: Sequence[str], state: protocol.HostState | None) -> None:
    assert HostState().process(output) == state


def test_a_glance_is_judged_here() -> None:
    instance = {"known_good": None, "intact": False, "releases": {}, "plan": None, "history": [], "journal": False}
    instance["traffic"] = "sum"
    seen = {"agent": "sha", "key": "key\n", "users": ("sglang",), "recover_unit": ""}
    seen |= {"metrics": "/var/lib/metrics", "drift_units": "sum", "member_unit": ""}
    seen |= {"recover_enabled": (), "instances": {"main": instance, "other": instance}}
    seen["units"] = {"sglang-main.service": 992.0, "sglang-other.service": 993.0}
    seen["units"] |= {"kernelswap-member@other.service": 990.0}
    state = GlancedHostState().process(["Welcome to gpu1", f"glance {seen!a}"])
    assert state
    assert (state.agent, state.key, state.users) == ("sha", "key", ("sglang",))
    assert (state.metrics, state.drift_units) == ("/var/lib/metrics", "sum")
    assert [(each.instance, each.unit_since) for each in state.instances] == [("main", 992.0), ("other", 993.0)]
    assert [(each.traffic, each.member) for each in state.instances] == [("sum", "disabled"), ("sum", "active")]


def test_the_agents_word_counts_where_there_is_more_than_a_glance_shows() -> None:
    assert GlancedHostState().process([protocol.encode(STATE)]) == STATE
    assert GlancedHostState().process([]) is None


def test_what_is_asked_at_a_glance_is_quoted() -> None:
    script = GlancedHostState().command(["main", "o'hara"], ["a b"]).get_raw_value()
    words = shlex.split(script)
    instances, users, question = words[words.index("--") + 1 :][:3]
    assert (instances, users) == ("main,o'hara", "a b")
    assert json.loads(question)["instances"] == ["main", "o'hara"]


def test_a_glance_runs_from_its_bytecode_or_else_from_its_source(tmp_path: Path) -> None:
    python, compiled = tmp_path / "python", re.search(r"\S+/glance-\w{16}\.pyc", GLANCE.get_raw_value())
    assert compiled
    for refuses, said in ((compiled[0], ["-c", "main", "sglang"]), ("-c", [compiled[0], "main", "sglang"])):
        code = f"import sys; sys.exit(7) if sys.argv[2] == {refuses!r} else print(sys.argv[2], *sys.argv[-3:-1])"
        python.write_text(f"#!{sys.executable} -IS\n{code}\n")
        python.chmod(0o755)
        done = shell(GLANCE.get_raw_value().replace(protocol.PYTHON, str(python)))
        assert (done.returncode, done.stdout.split(), done.stderr) == (0, said, "")


def test_a_comparison_has_a_question_of_its_own() -> None:
    script = CarriedHostReleases().command(["main"], running=True, gpus=False).get_raw_value()
    done = shell(script, zipapp("import sys; print(*sys.argv[1:])"))
    assert done.stdout == 'releases {"instances": ["main"], "running": true, "gpus": false}\n'
    told = protocol.HostReleases((protocol.Releases("main", "b-2"),))
    assert HostReleases().process([protocol.encode(told)]) == told


def test_drift_has_a_question_of_its_own() -> None:
    script = CarriedHostDrift().command(["main"], ["sglang"]).get_raw_value()
    done = shell(script, zipapp("import sys; print(*sys.argv[1:])"))
    assert done.stdout == 'drift {"instances": ["main"], "users": ["sglang"]}\n'
    told = protocol.HostDrift(STATE, (protocol.Finding("unit", "/x", "a", "b", "do"),), ("cron",))
    assert HostDrift().process([protocol.encode(told)]) == told


def shell(script: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", script], input=stdin, capture_output=True, text=True, check=False)


def test_no_agent_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostState, "script", agent.INSTALLED.replace(protocol.AGENT_PATH, "/nowhere/agent.pyz"))
    done = shell(HostState().command(["main"], []).get_raw_value())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_python_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostState, "script", agent.INSTALLED.replace(protocol.PYTHON, "/nowhere/python3"))
    done = shell(HostState().command(["main"], []).get_raw_value())
    assert done.returncode == 1
    assert "needs /nowhere/python3" in done.stderr


def zipapp(source: str) -> str:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("__main__.py", source)
    return bundle.Bundle(buffer.getvalue(), "").packed


def test_a_carried_agent_gets_the_question_and_leaves_nothing_behind() -> None:
    script = CarriedHostState().command(["it's", "$HOME"], ["a b"], gpus=True).get_raw_value()
    done = shell(script, zipapp("import sys; print(sys.argv[0]); print(sys.argv[2])"))
    path, question = done.stdout.splitlines()
    assert json.loads(question) == {"instances": ["it's", "$HOME"], "users": ["a b"], "health": False, "gpus": True}
    assert shell(f"ls -d {path} {path.rpartition('/')[0]}").stdout == ""


def test_a_carried_agent_that_fails_fails() -> None:
    done = shell(CarriedHostState().command(["main"], []).get_raw_value(), zipapp("raise SystemExit(3)"))
    assert done.returncode == 3
