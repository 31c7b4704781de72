"""kernelswap render, as people run it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernelswap.cli import main

ROOT = Path(__file__).parent.parent.parent
Kernelswap = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_model_with_a_profile() -> None:
    done = CliRunner().invoke(main, ["render", "--model", "tiny", "--profile", "torch-native"])
    assert done.exit_code == 0
    assert done.output.startswith("# sglang-main.service, release torch-native-")
    assert "\n    --moe-runner-backend auto \\\n" in done.output
    assert "\nExecStart=/opt/sglang/bin/python \\\n    -m sglang.launch_server \\\n" in done.output


def test_a_host_of_the_inventory(kernelswap: Kernelswap) -> None:
    done = kernelswap("render", "gpu-01.example.net", "--profile", "trtllm", "--json")
    (server,) = json.loads(done.stdout)
    assert (server["instance"], server["model"], server["profile"]) == ("main", "glm5", "trtllm")
    assert server["argv"][:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    assert "flashinfer_trtllm" in server["argv"]
    assert server["environment"]["CUDA_HOME"] == "/usr/local/cuda"


def test_secrets_are_named_and_never_read(tmp_path: Path, kernelswap: Kernelswap) -> None:
    (tmp_path / "hosts.py").write_text(
        'gpu = [("h1", {"model": "m", "profile": "p", "instances": {"main": {'
        '"path": "/srv/m", "secrets": {"api-key": {"env": "NOT_SET_ANYWHERE"}}}}})]\n'
    )
    for folder, text in (("models", "port: 31000\n"), ("profiles", "flags: {}\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder[0]}.yaml").write_text(text)
    done = kernelswap("render", "h1", "--inventory", str(tmp_path / "hosts.py"))
    assert done.returncode == 0, done.stderr
    assert "# secrets: api-key\n" in done.stdout
    assert "    --config ${CREDENTIALS_DIRECTORY}/secrets.yaml\n" in done.stdout
    assert "releases/RELEASE/secrets.yaml\n" in done.stdout


def test_an_unknown_host_suggests_the_nearest(kernelswap: Kernelswap) -> None:
    done = kernelswap("render", "gpu-1.example.net")
    assert done.returncode == 1
    assert "there is no host `gpu-1.example.net`; did you mean `gpu-0" in done.stderr


@pytest.mark.parametrize("words", [[], ["h1", "--model", "tiny"], ["--model", "tiny"], ["--profile", "trtllm"]])
def test_half_a_question_is_a_usage_error(words: list[str]) -> None:
    done = CliRunner().invoke(main, ["render", *words])
    assert done.exit_code == 2
    assert "give HOST, or --model and --profile" in done.output


def test_faults_are_printed() -> None:
    done = CliRunner().invoke(main, ["render", "--model", "tiny", "--profile", "cutlas"])
    assert (done.exit_code, done.output) == (
        1,
        "command line: profile: there is no profile `cutlas`; did you mean `cutlass`?\n",
    )
