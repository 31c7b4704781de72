from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kernelswap import bundle, config_drift, decide
from kernelswap.cli import drift, status
from kernelswap.config_drift import grouped
from kernelswap.errors import ConfigError, Fault
from kernelswap.fleet import Seen
from kernelswap.host_setup import MEMBER_UNIT, RECOVER_UNIT, unit_text
from kernelswap.protocol import Finding, Gpu, HostDrift, HostState, InstanceState, Router, Traffic, keyed_digest
from kernelswap.render import render, traffic_text
from kernelswap.spec import Secret, ServerSpec

TEMPLATES = Path(__file__).parent.parent / "templates"
KEY = "ab" * 32
SPEC = ServerSpec(
    instance="main", model="glm5", profile="triton", path="/m", served_name="glm5", host="0.0.0.0", port=30000,
    user="sglang", python="/p", flags={"moe-runner-backend": "triton"},
)  # fmt: skip
OTHER = replace(SPEC, profile="cutlass", flags={"moe-runner-backend": "cutlass"})
LIMITED = replace(SPEC, timeouts=replace(SPEC.timeouts, ready=60))
SECRET = replace(SPEC, secrets={"api-key": Secret(env="GLM_KEY")})
PINNED = replace(SPEC, gpus=("0",), gpu_count=1)
CUT = Finding("swap", "swap s of ann", "ended", "cut short at ready", "run the deploy again", "main")
EDITED = Finding("unit", "/etc/systemd/system/sglang-main.service", "a", "b", "run the deploy again", "main")


def committed(spec: ServerSpec = SPEC, secrets: Mapping[str, str] | None = None, **changes: Any) -> HostState:
    """A host just after a deploy of this."""
    release = render(spec, secrets or {}, KEY, TEMPLATES)
    files = {name: decide.digest(text) for name, text in release.files.items()}
    files |= {"secrets.yaml": ""} if secrets else {}
    instance = InstanceState(
        "main", release.name, "active", unit_intact=True, releases={release.name: files}, plan=release.plan
    )
    state = HostState(
        agent=bundle.build().digest, key=KEY, users=("sglang",), recover_enabled=("main",), instances=(instance,),
        recover_unit=decide.digest(unit_text(TEMPLATES, RECOVER_UNIT)), gpus=(Gpu(0, "GPU-1", "B200"),),
    )  # fmt: skip
    return replace(state, **changes)


def found(
    state: HostState, *told: Finding, spec: ServerSpec = SPEC, environ: Mapping[str, str] | None = None, **data: Any
) -> Sequence[Finding]:
    seen = Seen("gpu1", {"instances": {"main": {}}, **data}, HostDrift(state, told))
    return config_drift.findings(seen, [spec], TEMPLATES, environ or {})


def words(finding: Finding) -> str:
    return f"{finding.kind} | {finding.where} | {finding.expected} | {finding.found} | {finding.todo}"


def test_a_host_just_deployed_has_no_drift() -> None:
    assert found(committed()) == ()
    assert found(committed(SECRET, {"api-key": "k"}), spec=SECRET, environ={"GLM_KEY": "k"}) == ()


# The host's state, the spec, and of each finding: kind, words, whether it is unknown.
CASES: list[tuple[str, HostState, ServerSpec, dict[str, str], list[tuple[str, str, bool]]]] = [
    ("profile", committed(OTHER), SPEC, {}, [("release", "moe-runner-backend: cutlass -> triton", False)]),
    ("nothing", committed(instances=()), SPEC, {}, [("release", "nothing committed", False)]),
    ("limits", committed(LIMITED), SPEC, {}, [("staged", "timeouts.ready: 60 -> 1800", False)]),
    (
        "rotated",
        committed(SECRET, {"api-key": "k"}),
        SECRET,
        {"GLM_KEY": "rotated-s3cret"},
        [("release", "the unit's text or a secret's value", False)],
    ),
    (
        "no secret here",
        committed(SECRET, {"api-key": "k"}),
        SECRET,
        {},
        [("secrets", "the variable GLM_KEY is not set", True)],
    ),
    (
        "no secret here, another profile there",
        committed(replace(SECRET, profile="cutlass", flags=OTHER.flags), {"api-key": "k"}),
        SECRET,
        {},
        [("release", "cutlass -> triton", False), ("secrets", "GLM_KEY", True)],
    ),
    (
        "no key there",
        committed(SECRET, {"api-key": "k"}, key=""),
        SECRET,
        {"GLM_KEY": "k"},
        [("setup", "the host's key", False), ("secrets", "/etc/kernelswap/key is not there", True)],
    ),
    ("GPUs unknown", committed(gpus=(), gpu_error="no driver"), PINNED, {}, [("release", "no driver", True)]),
    ("agent", committed(agent="old"), SPEC, {}, [("setup", "another version, or edited", False)]),
    ("no agent", committed(agent=""), SPEC, {}, [("setup", "agent.pyz | the agent", False)]),
    ("recover unit", committed(recover_unit="x"), SPEC, {}, [("setup", "kernelswap-recover@.service", False)]),
    ("recover off", committed(recover_enabled=()), SPEC, {}, [("setup", "kernelswap-recover@main", False)]),
    ("user", committed(users=()), SPEC, {}, [("setup", "user sglang", False)]),
    ("metrics", committed(metrics="/m"), SPEC, {}, [("setup", "no metrics", False)]),
]  # fmt: skip


@pytest.mark.parametrize(("state", "spec", "environ", "wanted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_the_inventory_declares_and_the_host_has_not(
    state: HostState, spec: ServerSpec, environ: dict[str, str], wanted: list[tuple[str, str, bool]]
) -> None:
    told = found(state, spec=spec, environ=environ)
    assert [(finding.kind, finding.unknown) for finding in told] == [(kind, unknown) for kind, _, unknown in wanted]
    for finding, (_, text, _) in zip(told, wanted, strict=True):
        assert text in words(finding)
        assert finding.todo
    assert "s3cret" not in str(told)


def test_what_the_host_has_told_is_not_told_twice_and_a_swap_hides_what_is_declared() -> None:
    plan = replace(EDITED, kind="staged", where="/etc/kernelswap/main/known-good/plan.json")
    assert [f.kind for f in found(committed(LIMITED), EDITED)] == ["staged", "unit"]
    assert [f.kind for f in found(committed(OTHER), CUT)] == ["swap"]
    assert found(committed(LIMITED), plan) == (plan,)


def test_a_host_that_cannot_be_read_is_unknown() -> None:
    seen: Seen[HostDrift] = Seen("gpu1", {}, None, "no route")
    (told,) = config_drift.findings(seen, [SPEC], TEMPLATES, {})
    assert (told.kind, told.found, told.unknown) == ("unreachable", "unreachable: no route", True)


def test_the_same_finding_of_many_hosts_is_one() -> None:
    alone = replace(CUT, detail="pid 7")
    both = [replace(EDITED, detail=f"changed {n}") for n in (1, 2)]
    blind = replace(EDITED, unknown=True)
    first, second, third = grouped({"gpu1": [alone, both[0], both[0]], "gpu2": [both[1], blind], "gpu3": []})
    assert (first.hosts, first.finding) == (("gpu1", "gpu2"), EDITED)
    assert (second.hosts, second.finding.detail) == (("gpu1",), "pid 7")
    assert third.finding.unknown


# The command.


def run(monkeypatch: pytest.MonkeyPatch, found: Mapping[str, Sequence[Finding]], *options: str) -> Any:
    told = drift.Drift(found, dict.fromkeys(found, ("cron", "systemd units")))
    monkeypatch.setattr(drift, "look", lambda *_: told)
    return CliRunner().invoke(status.command, ["hosts.py", "--drift", *options])


BLIND = replace(EDITED, unknown=True)


@pytest.mark.parametrize(
    ("found", "code"),
    [([], 0), ([EDITED], 1), ([BLIND], 2), ([BLIND, EDITED], 1)],
    ids=["clean", "drift", "unknown", "both"],
)
def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, found: list[Finding], code: int) -> None:
    result = run(monkeypatch, {"gpu1": found, "gpu2": []})
    assert result.exit_code == code
    assert run(monkeypatch, {"gpu1": found, "gpu2": []}, "--json").exit_code == code


def test_the_text_groups_hosts_and_says_what_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(monkeypatch, {"gpu1": [EDITED], "gpu2": [EDITED, BLIND], "gpu3": [], "gpu4": []}).output.splitlines()
    assert lines[0] == "gpu[1-2]: unit: instance main: /etc/systemd/system/sglang-main.service"
    assert lines[1:4] == ["    expected: a", "    found: b", "    do: run the deploy again"]
    assert lines[4].startswith("gpu2: unknown: unit")
    assert lines[8] == "gpu[3-4]: as declared and as committed"
    assert lines[-1] == "looked on gpu[1-4] for other ways to a server: cron; systemd units"


def test_json_has_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = json.loads(run(monkeypatch, {"gpu1": [EDITED, BLIND], "gpu2": []}, "--json").output)
    assert (first["host"], first["ok"], first["drift"], first["unknown"]) == ("gpu1", False, 1, 1)
    assert first["findings"][0]["where"] == EDITED.where
    assert (second["ok"], second["findings"], second["looked"]) == (True, [], ["cron", "systemd units"])


def test_a_fault_of_the_inventory_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError([Fault("hosts.py", "is not an inventory file", "name one")])

    monkeypatch.setattr(drift, "look", fail)
    result = CliRunner().invoke(status.command, ["hosts.py", "--drift"])
    assert (result.exit_code, result.output) == (2, "Error: hosts.py: is not an inventory file; name one\n")


def test_routers_that_the_host_does_not_know() -> None:
    joined = replace(SPEC, traffic=Traffic("10.0.0.5", (Router("http://r1:30000"),)))
    drift = found(committed(), spec=joined)
    assert [(finding.kind, finding.where, finding.found) for finding in drift] == [
        ("setup", "/etc/systemd/system/kernelswap-member@.service", "missing"),
        ("setup", "kernelswap-member@main.service", "missing"),
        ("staged", "/etc/kernelswap/main/traffic.json", "others"),
    ]
    (instance,) = committed().instances
    text = traffic_text(joined, {}).reveal()
    known = replace(instance, traffic=keyed_digest(KEY, text), member="active")
    unit = decide.digest(unit_text(TEMPLATES, MEMBER_UNIT))
    assert found(committed(instances=(known,), member_unit=unit), spec=joined) == ()
