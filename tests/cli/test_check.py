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
