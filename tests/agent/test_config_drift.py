from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import plan

from kernelswap import seal
from kernelswap.agent import config_drift, files, host, processes, releases, units
from kernelswap.agent.config_drift import Live, Staged, UnitFiles
from kernelswap.agent.host import Folders
from kernelswap.agent.start_paths import StartPath
from kernelswap.agent.units import UnitStatus
from kernelswap.measured import Installed
from kernelswap.protocol import Finding, Report, Request, Resolved, Running, Server, encode

PATH = "/etc/systemd/system/sglang-main.service"
STATUS = UnitStatus("active", "running", 7, PATH, True, "i", "success", 100.0)
TEXT = '[Service]\nUser=sglang\nEnvironment="HF_TOKEN=hf_abcdefghijk"\nExecStart=/p -m sglang.launch_server\n'
UNIT = UnitFiles(PATH, TEXT, STATUS, changed={PATH: 50.0})
ARGV = ("-m", "sglang.launch_server", "--port", "30000", "--moe-runner-backend", "triton")
PLAN = replace(plan(), argv=ARGV, environment={"HOME": "/c", "HF_TOKEN": "hf_abcdefghijk"})
LIVE = Live(7, 40.0, ("/p", *ARGV), dict(PLAN.environment))


def kinds(found: Sequence[Finding]) -> list[tuple[str, bool]]:
    return [(finding.kind, finding.unknown) for finding in found]


def unit(seen: UnitFiles = UNIT, live: Any = LIVE, wanted: Any = TEXT, ended: float = 60.0) -> list[Finding]:
    return list(config_drift.unit(seen, wanted, live, ended, "main", ["s3cret-value"]))


def status(**changes: Any) -> UnitFiles:
    return replace(UNIT, status=replace(STATUS, **changes))


DROPIN = "/etc/systemd/system/sglang-main.service.d/override.conf"
# What is seen of the unit, the kinds found, words of the first one.
UNITS: list[tuple[UnitFiles, list[str], str]] = [
    (UNIT, [], ""),
    (replace(UNIT, text=TEXT.replace("User=sglang", "User=root")), ["unit"], "User=root"),
    (replace(UNIT, text=TEXT + "\n# a note\n"), ["unit"], "# a note"),
    (replace(UNIT, text=TEXT.replace("hf_abcdefghijk", "hf_mnopqrstuvw")), ["unit"], "another value"),
    (replace(UNIT, text=TEXT + "Environment=KEY=s3cret-value\n"), ["unit"], "[redacted]"),
    (replace(UNIT, text=None), ["unit"], "no file"),
    (replace(UNIT, text=None, masks=(PATH,), status=replace(STATUS, enabled=False)), ["masked"], PATH),
    (replace(UNIT, masks=("/run/systemd/system/sglang-main.service",)), ["masked"], "/run/systemd/system"),
    (replace(UNIT, dropins={DROPIN: "[Service]\n# why\nNice=5\n"}), ["drop-in"], "[Service]; Nice=5"),
    (replace(UNIT, dropins={DROPIN: ""}), ["drop-in"], "an empty file"),
    (replace(UNIT, dropins={DROPIN: "X=s3cret-value"}), ["drop-in"], "X=[redacted]"),
    (replace(UNIT, dropins={DROPIN: "Nice=5"}, changed={DROPIN: 30.0}), ["drop-in"], "it runs with it"),
    (replace(UNIT, dropins={DROPIN: "Nice=5"}, changed={DROPIN: 45.0}), ["drop-in"], "it runs without it"),
    (status(fragment="/run/systemd/system.control/sglang-main.service"), ["unit"], "systemd takes /run/systemd"),
    (status(stale=True), ["not-reloaded"], "systemctl daemon-reload"),
    (status(enabled=False), ["not-enabled"], "not enabled"),
    (replace(UNIT, changed={PATH: 70.0}), ["restart-pending"], "written again after the server had started"),
]


@pytest.mark.parametrize(("seen", "found", "words"), UNITS, ids=[f"{n}-{c[1]}" for n, c in enumerate(UNITS)])
def test_a_unit_that_is_not_as_it_was_committed(seen: UnitFiles, found: list[str], words: str) -> None:
    told = unit(seen)
    assert kinds(told) == [(kind, False) for kind in found]
    if told:
        assert words in " ".join(map(str, dataclasses.astuple(told[0])))
        assert "s3cret" not in str(told)
        assert "hf_abc" not in str(told)
        assert told[0].todo


def test_a_unit_that_does_not_run_is_told_and_pends_no_restart() -> None:
    stopped = replace(
        UNIT, status=replace(STATUS, active="failed", sub="failed", result="exit-code"), changed={PATH: 70.0}
    )
    (told,) = unit(stopped, live=None)
    assert (told.kind, told.found) == ("not-running", "failed (failed, exit-code)")


def test_a_commit_writes_the_unit_after_the_server_has_started() -> None:
    assert unit(replace(UNIT, changed={PATH: 61.0})) == []


# Staged files.

KEY = "ab" * 32
SECRETS = {"api-key": "s3cret"}


def staged(**changes: Any) -> Staged:
    """A release as a deploy would have staged it; `secrets`: that it was made with."""
    secrets = changes.pop("made_with", {})
    unnamed = {"sglang-main.service": "ExecStart=/p RELEASE\n"}
    name = f"triton-{seal.digest(unnamed, secrets, KEY)}"
    texts = {each: text.replace("RELEASE", name) for each, text in unnamed.items()}
    digests = {each: hashlib.sha256(text.encode()).hexdigest() for each, text in texts.items()}
    its = replace(PLAN, release=name, digests=digests, secret_flags=tuple(secrets))
    return replace(Staged(name, f"/r/{name}", texts, its, digests, secrets), **changes)


def edited() -> Staged:
    """Unit and plan are edited so that they go together."""
    sound = staged()
    text = {"sglang-main.service": "ExecStart=/q\n"}
    digests = {"sglang-main.service": hashlib.sha256(b"ExecStart=/q\n").hexdigest()}
    assert sound.plan
    return replace(sound, texts=text, digests=digests, plan=replace(sound.plan, digests=digests))


STAGED: list[tuple[Staged, list[str], str]] = [
    (staged(), [], ""),
    (staged(made_with=SECRETS), [], ""),
    (staged(plan=None), ["staged"], "cannot be read"),
    (staged(digests={"sglang-main.service": "x"}), ["staged"], "edited"),
    (staged(digests={"sglang-main.service": ""}, texts={"sglang-main.service": None}), ["staged"], "gone"),
    (edited(), ["staged"], "edited together"),
    (staged(made_with=SECRETS, secrets={"api-key": "other"}), ["secrets"], "other secrets"),
    (staged(made_with=SECRETS, secrets={}), ["secrets"], "the secrets api-key"),
    (staged(secrets=SECRETS), ["secrets"], "other secrets"),
    (staged(made_with=SECRETS, open=True), ["secrets"], "chmod 600"),
]


@pytest.mark.parametrize(("seen", "found", "words"), STAGED, ids=[f"{n}-{c[1]}" for n, c in enumerate(STAGED)])
def test_a_staged_release_that_was_edited(seen: Staged, found: list[str], words: str) -> None:
    told = list(config_drift.staged(seen, "main", KEY))
    assert kinds(told) == [(kind, False) for kind in found]
    assert words in str(told)
    for secret in ("s3cret", "other'", hashlib.sha256(b"s3cret").hexdigest()):
        assert secret not in str(told)


def test_another_hosts_key_is_told() -> None:
    assert kinds(list(config_drift.staged(staged(made_with=SECRETS), "main", "cd" * 32))) == [("secrets", False)]


# The process.

LIVES: list[tuple[Live, list[str], str]] = [
    (LIVE, [], ""),
    (replace(LIVE, argv=("/p", "-m", "sglang.launch_server", *ARGV[4:], *ARGV[2:4])), [], ""),
    (replace(LIVE, argv=("/p", *ARGV[:-1], "auto")), ["argv"], "--moe-runner-backend auto"),
    (replace(LIVE, argv=("/p", *ARGV, "--api-key", "hush-hush")), ["argv"], "--api-key [redacted]"),
    (replace(LIVE, argv=("/q", *ARGV)), ["argv"], "/q -m"),
    (replace(LIVE, environment={"HOME": "/c", "HF_TOKEN": "hf_mnopqrstuvw"}), ["environment"], "another value"),
    (replace(LIVE, environment={**PLAN.environment, "NCCL_P2P_DISABLE": "1"}), ["environment"], "NCCL_P2P_DISABLE=1"),
    (replace(LIVE, environment={"HOME": "/c"}), ["environment"], "gone"),
    (replace(LIVE, argv=(), environment={}), ["argv", "environment"], "gone"),
]


@pytest.mark.parametrize(("live", "found", "words"), LIVES, ids=[f"{n}-{c[1]}" for n, c in enumerate(LIVES)])
def test_a_process_that_was_started_otherwise(live: Live, found: list[str], words: str) -> None:
    told = list(config_drift.process(live, PLAN, "main"))
    assert kinds(told) == [(kind, False) for kind in found]
    assert words in str(told)
    for secret in ("hf_abc", "hf_mno", "hush"):
        assert secret not in str(told)


def test_the_words_by_which_secrets_come_are_the_units_own() -> None:
    its = replace(PLAN, secret_flags=("api-key",))
    argv = ("/p", *ARGV, "--config", "/run/credentials/sglang-main.service/secrets.yaml")
    assert list(config_drift.process(replace(LIVE, argv=argv), its, "main")) == []
    assert kinds(list(config_drift.process(LIVE, its, "main"))) == [("argv", False)]


# What the server says, and what it runs on.

SAID = Resolved("r", "0.5.23", {"moe_runner_backend": '"triton"', "random_seed": "1", "nccl_port": "5"}, served=True)


@pytest.mark.parametrize(
    ("now", "found"),
    [
        (SAID, []),
        (replace(SAID, values={**SAID.values, "random_seed": "2", "nccl_port": "6"}), []),
        (replace(SAID, values={**SAID.values, "moe_runner_backend": '"auto"'}), ["resolved"]),
        (replace(SAID, version="0.5.22"), ["engine"]),
        (replace(SAID, version=""), []),
    ],
)
def test_a_server_that_says_otherwise_than_at_its_commit(now: Resolved, found: list[str]) -> None:
    assert [f.kind for f in config_drift.resolved(SAID, now, "url", "main")] == found


THEN = Installed("0.5.23", "aa", "580.65", ("GPU-1 B200",))
INSTALLED: list[tuple[Installed, Installed, list[tuple[str, bool]]]] = [
    (THEN, THEN, []),
    (THEN, replace(THEN, engine="0.5.24", files="bb"), [("engine", False)]),
    (THEN, replace(THEN, files="bb"), [("engine", False)]),
    (THEN, replace(THEN, engine="", files=""), [("engine", True)]),
    (replace(THEN, files=""), THEN, [("engine", True)]),
    (THEN, replace(THEN, driver="590.48"), [("driver", False)]),
    (THEN, replace(THEN, gpus=("GPU-1 B200", "GPU-2 B200")), [("gpus", False)]),
    (THEN, replace(THEN, driver="", gpus=()), [("driver", False), ("gpus", False)]),
]


@pytest.mark.parametrize(("then", "now", "found"), INSTALLED)
def test_what_a_release_runs_on_is_what_it_was_verified_on(
    then: Installed, now: Installed, found: list[tuple[str, bool]]
) -> None:
    assert kinds(list(config_drift.installed(then, now, PLAN, "main"))) == found


def test_a_server_on_the_cpu_has_no_driver() -> None:
    its = replace(PLAN, flags={"device": "cpu"})
    assert list(config_drift.installed(THEN, replace(THEN, driver="1", gpus=()), its, "main")) == []


# Servers beside ours.


def test_servers_beside_ours_and_the_port_that_they_share() -> None:
    argv = ("python3", "-m", "sglang.launch_server", "--api-key", "[redacted]")
    seen = [Server(7, 1.0, "ann", argv, None, 31000), Server(8, 1.0, "root", argv, "glm.service", 30000)]
    alone, shared = config_drift.servers(seen, {30000: "main"})
    assert (alone.kind, alone.instance, alone.where) == ("server", "", "no unit")
    assert (shared.kind, shared.instance, shared.where) == ("port", "main", "port 30000")
    assert "glm.service" in shared.found
    assert "pid 8" in shared.detail


def test_another_way_to_a_server_says_whose_port_it_takes() -> None:
    path = StartPath("cron", "/etc/cron.d/glm:1", "cron", "sglang serve", 30000)
    assert config_drift.way(path, {30000: "main"}).instance == "main"
    assert config_drift.way(replace(path, port=None), {30000: "main"}).instance == ""


def test_a_swap_that_runs_makes_the_rest_unknown_and_one_cut_short_is_drift() -> None:
    assert kinds([config_drift.swapping("main", "s", "ann", "ready", active) for active in (True, False)]) == [
        ("swap", True),
        ("swap", False),
    ]


# A whole instance, on files under a folder.


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """A release as it lies on a host after its commit; its server answers nothing."""
    folders = Folders("main", tmp_path)
    sound = staged(made_with=SECRETS)
    assert sound.plan
    folder = folders.release(sound.name)
    for name, text in sound.texts.items():
        files.write(folder / name, text or "")
    files.write(folder / "plan.json", encode(sound.plan))
    files.write(folder / "secrets.yaml", 'api-key: "s3cret"\n', mode=0o600)
    files.write(tmp_path / "etc/kernelswap/key", KEY)
    folders.known_good.symlink_to(f"releases/{sound.name}")
    files.write(folders.committed_unit, sound.texts["sglang-main.service"] or "")
    request = Request("s", "main", "converge", sound.name, "ann")
    files.append(folders.history, encode(Report(request, "committed", 1.0, 2e9)))
    where = replace(STATUS, fragment=str(folders.committed_unit), main_pid=os.getpid())
    monkeypatch.setattr(units, "status", lambda _unit: where)
    monkeypatch.setattr(config_drift, "running", lambda _folders: None)
    monkeypatch.setattr(processes, "listeners", lambda _port: [])
    live = Live(1, 1.0, tuple(config_drift.words_of(sound.plan)), sound.plan.environment)
    monkeypatch.setattr(config_drift, "_live", lambda *_: live)
    return folders


def remove_plan(folders: Folders) -> None:
    (folders.known_good / "plan.json").unlink()


def edit_secret(folders: Folders) -> None:
    (folders.known_good / "secrets.yaml").write_text('api-key: "another"\n')


def lay_over(folders: Folders) -> None:
    for place in ("etc/systemd/system", "run/systemd/system", "run/systemd/system.control"):
        files.write(folders.root / place / "sglang-main.service.d/x.conf", "[Service]\nNice=1\n")


def mask(folders: Folders) -> None:
    files.make_folder(folders.root / "run/systemd/system")
    (folders.root / "run/systemd/system/sglang-main.service").symlink_to("/dev/null")


def mask_in_etc(folders: Folders) -> None:
    folders.committed_unit.unlink()
    folders.committed_unit.symlink_to("/dev/null")


def replace_key(folders: Folders) -> None:
    files.write(folders.root / "etc/kernelswap/key", "cd" * 32)


HOSTS: dict[str, tuple[Callable[[Folders], Any], list[str]]] = {
    "sound": (lambda folders: None, []),
    "edited": (lambda folders: folders.committed_unit.write_text("[Service]\n"), ["unit"]),
    "gone": (lambda folders: folders.committed_unit.unlink(), ["unit"]),
    "no plan": (remove_plan, ["staged"]),
    "secret": (edit_secret, ["secrets"]),
    "open": (lambda folders: (folders.known_good / "secrets.yaml").chmod(0o644), ["secrets"]),
    "key": (replace_key, ["secrets"]),
    "drop-ins": (lay_over, ["drop-in", "drop-in", "drop-in"]),
    "masked": (mask, ["masked"]),
    "masked in etc": (mask_in_etc, ["masked"]),
}


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_on_which_something_was_changed(committed: Folders, name: str) -> None:
    change, expected = HOSTS[name]
    change(committed)
    found = list(config_drift._instance(committed, (), "no driver"))
    # No server answers here, and no driver; that is unknown, and nothing else is.
    assert [f.kind for f in found if not f.unknown] == expected
    unknown = ["resolved", "gpus"] if name != "no plan" else []
    assert [f.kind for f in found if f.unknown] == unknown
    assert "s3cret" not in str(found)


def test_an_instance_without_a_commit_has_no_drift_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_drift, "running", lambda _folders: None)
    assert list(config_drift._instance(Folders("main", tmp_path), (), "")) == []
    request = Request("s", "main", "converge", "r", "ann")
    monkeypatch.setattr(config_drift, "running", lambda _folders: Running(request, 1.0, "ready", active=True))
    assert kinds(list(config_drift._instance(Folders("main", tmp_path), (), ""))) == [("swap", True)]


def test_the_environment_without_what_systemd_adds(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    files.write(folders.gpu_indices, "CUDA_VISIBLE_DEVICES=0\n")
    its = replace(PLAN, environment={"CUDA_VISIBLE_DEVICES": "GPU-1"})
    own = releases.own_environment({"CUDA_VISIBLE_DEVICES": "0", "INVOCATION_ID": "x", "HF_TOKEN": "t"}, folders, its)
    assert own == {"CUDA_VISIBLE_DEVICES": "GPU-1", "HF_TOKEN": "t"}


def test_a_finding_is_one_line_of_json() -> None:
    told = encode(config_drift.undeclared("old"))
    assert "\n" not in told
    assert json.loads(told)["instance"] == "old"


def test_what_was_verified_on_is_kept_with_each_commit_quick_or_not(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    for swap, verify in (("one", ""), ("two", "quick")):
        request = Request(swap, "main", "converge", "r", "ann", verify=verify)
        files.write(folders.evidence(swap) / "installed.json", encode(Installed(swap)))
        host.keep_measured(folders, request)
        assert host.measured(folders, "r", "installed.json", Installed) == Installed(swap)
