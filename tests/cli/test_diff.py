from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kernelswap.cli import diff
from kernelswap.cli.diff import Name, release_of, server_of
from kernelswap.errors import ConfigError
from kernelswap.fleet import Seen
from kernelswap.inventory import Host
from kernelswap.protocol import Gpu, HostReleases, LiveServer, Plan, Releases, Resolved, Server

ROOT = Path(__file__).parent.parent.parent
KERNELSWAP = Callable[..., Any]

# words, exit code, lines that must be shown
PROFILES = [
    (("cutlass", "cutlass"), 0, ("cutlass -> cutlass, model glm5", "no difference")),
    (("cutlass", "trtllm"), 1, ("cutlass -> trtllm, model glm5", "cutlass -> trtllm, model tiny", "flags")),
    (("cutlass", "trtllm", "--model", "tiny"), 1, ("  moe-runner-backend: flashinfer_cutlass -> flashinfer_trtllm",)),
    (("cutlas", "trtllm"), 2, ("cutlas: there is no profile `cutlas`; did you mean `cutlass`?",)),
    (("cutlass", "trtllm", "--model", "glm"), 2, ("--model: there is no model `glm`; did you mean `glm5`?",)),
    (("cutlass", "trtllm", "--instance", "main"), 2, ("--instance names the instance of a host",)),
    (("cutlass", ":running"), 2, ("write PROFILE, or HOST:RELEASE",)),
    (("cutlass", "gpu:running", "--model", "tiny"), 2, ("--model is for two profiles",)),
    (("cutlass", "gpu-01.example.ne:running"), 2, ("did you mean `gpu-01.example.net`?",)),
]


@pytest.mark.parametrize(("words", "code", "lines"), PROFILES)
def test_profiles_and_names(kernelswap: KERNELSWAP, words: Sequence[str], code: int, lines: Sequence[str]) -> None:
    done = kernelswap("diff", *words)
    assert done.returncode == code
    shown = done.stdout if code < 2 else done.stderr
    for line in lines:
        assert line in (shown.splitlines() if code < 2 else shown)


def plan(release: str, *words: str, **changes: Any) -> Plan:
    argv = ("-m", "sglang.launch_server", "--model-path", "/m", *words)
    made = Plan("main", release, release[0], "tiny", "/py", argv, {}, "sglang", "/m", "tiny", "127.0.0.1", 30000)
    return replace(made, **changes)


A = plan("a-1f", "--moe-runner-backend", "triton")
B = plan("b-2e", "--moe-runner-backend", "auto")
STAGED = Releases(
    "main", "b-2e", "a-1f", (A, B, plan("b-2f")), (Resolved("b-2e", "0.5.23", {"moe_runner_backend": '"x"'}, True),)
)
ARGV = ("/py", "-m", "sglang.launch_server", "--model-path", "/m", "--served-model-name", "tiny", "--port", "30000")
OURS = LiveServer(Server(7, 0.0, "sglang", (*ARGV, "--page-size", "64"), "sglang-main.service", 30000), "b-2e", "/py")
STRAY = LiveServer(Server(8, 0.0, "ada", ARGV, None, 30000), python="/py", problem="HTTP 401")


@pytest.mark.parametrize(
    ("what", "release"),
    [("a-1f", "a-1f"), ("a", "a-1f"), ("b-2e", "b-2e"), ("known-good", "b-2e"), ("previous", "a-1f")],
)
def test_names_of_releases(what: str, release: str) -> None:
    assert release_of(STAGED, Name(what, "gpu1", what)) == release


@pytest.mark.parametrize(
    ("staged", "what", "fault"),
    [
        (STAGED, "b-2", "beginning of several releases; use one of: b-2e, b-2f"),
        (STAGED, "a-1g", "has no release `a-1g` that can be read; did you mean `a-1f`?"),
        (STAGED, "runing", "did you mean `running`?"),
        (Releases("main"), "known-good", "nothing was committed yet; name a release: none is staged"),
        (replace(STAGED, previous=None), "previous", "nothing to go back to; name a release: a-1f, b-2e, b-2f"),
        (replace(STAGED, known_good="c-3"), "known-good", "has no release `c-3` that can be read"),
    ],
)
def test_what_is_no_release(staged: Releases, what: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=r"^gpu1:") as caught:
        release_of(staged, Name(f"gpu1:{what}", "gpu1", what))
    assert fault in str(caught.value)


ELSEWHERE = replace(STRAY, server=replace(STRAY.server, port=31000))
OTHERS = replace(OURS, server=replace(OURS.server, unit="sglang-other.service"))


@pytest.mark.parametrize(
    ("servers", "instances", "found"),
    [
        ((STRAY, OURS), ("main",), OURS),
        ((STRAY, OTHERS), ("main", "other"), STRAY),
        ((STRAY, ELSEWHERE), ("main",), STRAY),
        ((ELSEWHERE,), ("main",), ELSEWHERE),
        ((ELSEWHERE,), ("main", "other"), "no SGLang server runs there"),
        ((OTHERS,), ("main", "other"), "no SGLang server runs there"),
        ((), ("main",), "no SGLang server runs there"),
        ((STRAY, STRAY), ("main",), "several servers run there: pid 8 of ada, no unit, since 1970"),
    ],
)
def test_which_server_is_meant(
    servers: Sequence[LiveServer], instances: Sequence[str], found: LiveServer | str
) -> None:
    if isinstance(found, LiveServer):
        assert server_of(STAGED, servers, instances, "gpu1:running") is found
        return
    with pytest.raises(ConfigError, match=found):
        server_of(STAGED, servers, instances, "gpu1:running")


def run(monkeypatch: pytest.MonkeyPatch, seen: Sequence[Seen[HostReleases]], *words: str) -> tuple[Result, list[Any]]:
    """The command with hosts that say what the test says."""
    asked: list[Any] = []
    monkeypatch.setattr(diff, "load_inventory", lambda path: [Host(item.host, item.data) for item in seen])
    monkeypatch.setattr(diff, "look_at_releases", lambda *args: asked.append(args) or seen)
    return CliRunner().invoke(diff.command, [*words, "--inventory", str(ROOT / "inventory/gpu.py")]), asked


def host(name: str, staged: Releases = STAGED, *servers: LiveServer, **data: Any) -> Seen[HostReleases]:
    return Seen(name, data, HostReleases((staged, replace(staged, instance="other")), servers, (Gpu(0, "GPU-a"),)))


def test_releases_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = run(monkeypatch, [host("gpu1")], "gpu1:previous", "gpu1:known-good")
    assert result.output.splitlines() == [
        "gpu1:previous (a-1f) -> gpu1:known-good (b-2e)",
        "  note: gpu1:previous (a-1f): what SGLang made of its flags is not known",
        "flags",
        "  moe-runner-backend: triton -> auto (x)",
    ]
    assert result.exit_code == 1
    assert [args[1:] for args in asked] == [(["gpu1", "gpu1"], set(), set())]


def test_the_running_servers_of_two_hosts_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [host("gpu1", STAGED, OURS), host("gpu2", Releases("main"), STRAY)]
    result, asked = run(monkeypatch, hosts, "gpu1:running", "gpu2:running", "--json")
    (told,) = json.loads(result.output)
    assert "gpu2:running (pid 8 of ada, no unit, since 1970-01-01 00:00 UTC)" in told["after"]["label"]
    assert told["after"]["note"] == "what SGLang made of its flags is not known: HTTP 401"
    assert [(change["section"], change["name"]) for change in told["changes"]] == [
        ("flags", "page-size"),
        ("server", "user"),
    ]
    assert told["changes"][0]["before"] == {"declared": "64", "resolved": None}
    assert [args[1:] for args in asked] == [(["gpu1", "gpu2"], {"gpu1", "gpu2"}, set())]


def test_a_profile_is_laid_over_what_the_host_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"model": "tiny", "profile": "triton", "instances": {"main": {"gpus": [0], "port": 30001}}}
    result, asked = run(monkeypatch, [host("gpu1", STAGED, **data)], "torch-native", "gpu1:b-2e")
    assert "  port: 30001 -> 30000" in result.output.splitlines()
    assert "  gpus: GPU-a -> (unset)" in result.output.splitlines()
    assert "torch-native on gpu1 -> gpu1:b-2e" in result.output
    assert [args[1:] for args in asked] == [(["gpu1", "gpu1"], set(), {"gpu1"})]


TWO: dict[str, Any] = {"instances": {"main": {}, "other": {}}}


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        ((), 2, "gpu1 has the instances main, other; choose with --instance NAME"),
        (("--instance", "othre"), 2, "--instance: gpu1 has no instance `othre`; did you mean `other`?"),
        (("--instance", "other"), 0, "no difference"),
        (("--instance", "main", "--instance", "other"), 0, "no difference"),
    ],
)
def test_instances(monkeypatch: pytest.MonkeyPatch, words: Sequence[str], code: int, shown: str) -> None:
    result, _ = run(monkeypatch, [host("gpu1", STAGED, **TWO)], "gpu1:b-2e", "gpu1:b-2e", *words)
    assert (result.exit_code, shown in result.output) == (code, True)


def test_a_host_that_does_not_answer_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(monkeypatch, [Seen("gpu1", {}, None, "timed out")], "gpu1:running", "gpu1:known-good")
    assert (result.exit_code, result.output) == (2, "Error: gpu1 is unreachable: timed out\n")
