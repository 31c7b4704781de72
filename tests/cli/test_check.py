"""kernelswap check, as people run it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernelswap.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent.parent
Kernelswap = Callable[..., "subprocess.CompletedProcess[str]"]
PROFILES = ROOT / "tests" / "profiles"

INVENTORY = """
gpu = (
    [("h1", {"instances": {"a": {"port": 70000}}}), ("h2", {"profile": "trtlm"}), "h3"],
    {"model": "big", "profile": "fast"},
)
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    for folder in ("models", "profiles"):
        (tmp_path / folder).symlink_to(PROFILES / "good" / "inventory" / folder)
    (tmp_path / "hosts.py").write_text(INVENTORY)
    return tmp_path / "hosts.py"


def test_the_shipped_inventory_is_right(kernelswap: Kernelswap) -> None:
    done = kernelswap("check", "inventory/gpu.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2 models and 6 profiles are right; 2 hosts with 2 servers\n"


def test_models_and_profiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(main, ["check"])
    assert (done.exit_code, done.output) == (0, "2 models and 6 profiles are right\n")


def test_a_model_that_only_others_extend_may_be_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROFILES / "good")
    done = CliRunner().invoke(main, ["check"])
    assert (done.exit_code, done.output) == (0, "2 models and 3 profiles are right\n")


def test_faults_of_a_rollout_are_told_once(inventory: Path, kernelswap: Kernelswap) -> None:
    rollout = {"waves": [0], "canary": ["h9"]}
    inventory.write_text(f"gpu = (['h1', 'h2'], {{'model': 'big', 'profile': 'fast', 'rollout': {rollout}}})\n")
    done = kernelswap("check", str(inventory))
    assert done.returncode == 1
    assert done.stderr.count("rollout/waves/0: is not the size of a wave") == 1
    assert done.stderr.count("h1: rollout/canary: there is no host `h9`; use one of: h1, h2") == 1


def test_all_faults_of_files_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = PROFILES / "bad" / "owned-flags"
    monkeypatch.chdir(case)
    done = CliRunner().invoke(main, ["check", "--library", "."])
    faults = (case / "faults.txt").read_text()
    assert done.exit_code == 1
    assert done.output == faults + f"{len(faults.splitlines())} faults\n"


def test_all_faults_of_hosts_are_printed(inventory: Path, kernelswap: Kernelswap) -> None:
    done = kernelswap("check", "hosts.py", cwd=inventory.parent)
    assert done.returncode == 1
    assert done.stderr == (
        "hosts.py: h1: instances/a/port: must be less than or equal to 65535; change the value\n"
        "hosts.py: h2: profile: there is no profile `trtlm`; use one of: common, fast, quick\n"
        "2 faults\n"
    )


def test_a_hosts_router_is_looked_at_too(inventory: Path, kernelswap: Kernelswap) -> None:
    data = {"router": {"port": "1", "flags": {"worker-urls": ["http://gpu1"]}}}
    inventory.write_text(f'routers = [("r1", {data!r})]')
    done = kernelswap("check", str(inventory))
    assert done.returncode == 1
    assert f"{inventory}: r1: router/port: is not a whole number" in done.stdout + done.stderr
    assert f"{inventory}: r1: router/flags/worker-urls: is not for `flags`" in done.stdout + done.stderr
    inventory.write_text('routers = [("r1", {"router": {}})]')
    done = kernelswap("check", str(inventory))
    assert (done.returncode, done.stdout.rstrip().endswith("1 hosts with 0 servers")) == (0, True)


def test_faults_as_json(inventory: Path, kernelswap: Kernelswap) -> None:
    done = kernelswap("check", "hosts.py", "--json", cwd=inventory.parent)
    assert done.returncode == 1
    assert json.loads(done.stdout)["faults"][0] == {
        "where": "hosts.py: h1: instances/a/port",
        "what": "must be less than or equal to 65535",
        "todo": "change the value",
    }


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("gpu = [\n", "hosts.py:1: fails: SyntaxError: '[' was never closed"),
        ("a = 1\nb = a / 0\n", "hosts.py:2: fails: ZeroDivisionError: division by zero; correct the inventory\n"),
        ("x = 1\n", "hosts.py: names no host; add a list of hosts, as in inventory/gpu.py\n"),
    ],
)
def test_an_inventory_that_does_not_load_is_a_fault(
    inventory: Path, text: str, fault: str, kernelswap: Kernelswap
) -> None:
    inventory.write_text(text)
    done = kernelswap("check", "hosts.py", cwd=inventory.parent)
    assert done.returncode == 1
    assert done.stderr.startswith(fault)


def test_an_inventory_that_is_not_there_is_a_fault(kernelswap: Kernelswap) -> None:
    done = kernelswap("check", "inventory/gpus.py")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        1,
        "inventory/gpus.py: is not an inventory file; name one, e.g. inventory/gpu.py",
    )


def test_help_names_every_command(kernelswap: Kernelswap) -> None:
    done = kernelswap("--help")
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from kernelswap.cli import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert not {"pyinfra", "gevent", "pydantic", "ruamel", "jinja2"} & set(done.stdout.split())


def library(root: Path, model: str = "", **profiles: str) -> Path:
    for folder in ("models", "profiles"):
        (root / folder).mkdir()
    (root / "models" / "m.yaml").write_text(f"path: /srv/m\n{model}")
    for name, text in profiles.items():
        (root / "profiles" / f"{name}.yaml").write_text(text)
    return root


def checked(root: Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["check", "--library", str(root)])
    return done.exit_code, done.output.replace(f"{root}/", "")


def test_an_undeclared_release_is_the_newest_and_the_way_out_is_told(tmp_path: Path) -> None:
    assert checked(library(tmp_path, p="flags:\n  nsa-prefill-backend: fa3\n")) == (
        1,
        "profiles/p.yaml:2: flags/nsa-prefill-backend: SGLang 0.5.23 has no such flag (0.5.4 to 0.5.19 do); write "
        "`dsa-prefill-backend`; or declare `engine: {version: ...}` if the host has no 0.5.23\n1 fault\n",
    )


def test_a_declared_release_decides(tmp_path: Path) -> None:
    model = 'engine: {version: "0.5.12"}\n'
    profiles = {"old": "flags: {nsa-prefill-backend: fa3}\n", "new": "flags: {dsa-prefill-backend: fa3}\n"}
    code, output = checked(library(tmp_path, model, **profiles))
    assert (code, output.count("\n")) == (1, 2)
    assert output.startswith("profiles/new.yaml:1: flags/dsa-prefill-backend: SGLang 0.5.12 has no such flag")
    assert "declare" not in output


def test_an_unknown_release_only_warns(tmp_path: Path) -> None:
    code, output = checked(library(tmp_path, p='engine: {version: "0.9.0"}\nflags: {to-come: 1}\n'))
    assert code == 0
    assert output.startswith("warning: profiles/p.yaml:2: flags/to-come: SGLang 0.5.23 has no such flag")
    assert output.endswith("SGLang 0.9.0 itself is not known here\n1 models and 1 profiles are right; 1 warning\n")


def test_a_fault_is_told_once_however_many_pairs_show_it(tmp_path: Path) -> None:
    root = library(tmp_path, "flags: {tp-size: x}\n", a="expose: ready\n", b="flags: {mem-fraction: 1}\n")
    (root / "models" / "n.yaml").write_text("path: /srv/n\n")
    code, output = checked(root)
    assert (code, output.count("tp-size"), output.count("mem-fraction-static")) == (1, 1, 2)


def test_what_two_files_only_make_together_is_a_warning_unless_nothing_else_is_possible(tmp_path: Path) -> None:
    root = library(tmp_path, "flags: {quantization: awq}\n", p="flags: {moe-runner-backend: flashinfer_cutlass}\n")
    assert checked(root)[0] == 1
    (root / "models" / "n.yaml").write_text("path: /srv/n\nflags: {quantization: modelopt_fp4}\n")
    (root / "profiles" / "q.yaml").write_text("flags: {moe-runner-backend: triton}\n")
    code, output = checked(root)
    assert code == 0
    assert "warning: profiles/p.yaml:1: flags/moe-runner-backend: " in output
    assert "(model `m` with profile `p`)" in output


def test_a_server_of_the_inventory_is_meant(tmp_path: Path, kernelswap: Kernelswap) -> None:
    root = library(tmp_path, "flags: {quantization: awq}\n", p="flags: {moe-runner-backend: flashinfer_cutlass}\n")
    (root / "models" / "n.yaml").write_text("path: /srv/n\nflags: {quantization: modelopt_fp4}\n")
    (root / "profiles" / "q.yaml").write_text("flags: {moe-runner-backend: triton}\n")
    (root / "hosts.py").write_text('gpu = (["h1"], {"model": "m", "profile": "p"})\n')
    assert "profiles/p.yaml:1: flags/moe-runner-backend: " in kernelswap("check", "hosts.py", cwd=root).stderr
    assert kernelswap("check", "hosts.py", cwd=root).returncode == 1


def test_a_faulty_file_hides_no_fault_of_another(tmp_path: Path) -> None:
    code, output = checked(library(tmp_path, a="flags: {nnodes: 2}\n", b="flags: {no-such-flag: 1}\n"))
    assert code == 1
    assert "a.yaml:1: flags/nnodes" in output
    assert "b.yaml:1: flags/no-such-flag" in output


@pytest.mark.parametrize("architecture", ["sm90", "sm120"])
def test_a_declared_architecture_is_looked_at(tmp_path: Path, architecture: str) -> None:
    model = f"requires: {{architecture: [sm100, {architecture}]}}\n"
    code, output = checked(library(tmp_path, model, p="flags: {decode-attention-backend: cutedsl_mla}\n"))
    assert code == 1
    assert f"cutedsl_mla needs SM100, and this is for {architecture.upper()}" in output


def test_warnings_as_json(tmp_path: Path) -> None:
    root = library(tmp_path, p="flags: {tp: 8}\n")
    done = CliRunner().invoke(main, ["check", "--library", str(root), "--json"])
    said = json.loads(done.stdout)
    assert (done.exit_code, said["faults"]) == (0, [])
    assert said["warnings"][0]["what"] == "is short for `tp-size`"
