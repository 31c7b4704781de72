"""Launch lines of every kind, and what becomes of each: two files and findings, or a refusal with its reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launch_lines import CASES, NAMES, imported, options, rendered, run, said

from kernelswap.cli.check import check


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_line_becomes_what_its_case_says(name: str) -> None:
    assert said(run(name)) == (CASES / f"{name}.out").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_imported_passes_check_or_a_finding_says_why_not(name: str, tmp_path: Path) -> None:
    result = run(name, "--library", str(tmp_path))
    if result.exit_code == 0:
        found = check(None, tmp_path)
        for fault in (*found.faults, *found.warnings):
            assert f": {fault.what}; {fault.todo}\n" in result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_no_secret_is_printed(name: str) -> None:
    assert not re.search(r"hf_[a-z]{20}|sk-very-secret", run(name).output + run(name, "--json").output)


@pytest.mark.parametrize("name", NAMES)
def test_every_key_says_where_it_came_from(name: str) -> None:
    for line in run(name).stdout.splitlines():
        if not re.fullmatch(r"#.*|---|flags:( \{\})?|environment:", line):
            number = re.search(rf" # {re.escape(name)}:(\d+)$", line)
            assert number, line
            assert int(number[1]) <= len((CASES / name).read_text().splitlines())


def test_the_files_are_written_and_never_over_others(tmp_path: Path) -> None:
    first = run("l2.txt", "--library", str(tmp_path), "--model", "glm", "--profile", "fast")
    assert first.stdout == f"{tmp_path}/models/glm.yaml\n{tmp_path}/profiles/fast.yaml\n"
    again = run("plain.sh", "--library", str(tmp_path), "--profile", "fast")
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == f"{tmp_path}/profiles/fast.yaml: exists already; choose other names: --model, --profile\n"
    assert not (tmp_path / "models" / "qwen3-30b-a3b.yaml").exists()


def test_of_two_files_none_is_left_where_one_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "profiles").symlink_to("/proc/version")
    result = run("plain.sh", "--library", str(tmp_path), "--model", "glm")
    assert (result.exit_code, result.stdout) == (1, "")
    todo = "see its permissions and the disk, or choose another --library"
    assert result.stderr == f"{tmp_path}/profiles: File exists; {todo}\n"
    assert list((tmp_path / "models").iterdir()) == []


def test_as_json() -> None:
    whole = json.loads(run("json-stripped.sh", "--json").stdout)
    assert list(whole["files"]) == ["models/a.yaml", "profiles/imported.yaml"]
    assert whole["findings"][-1]["where"] == "json-stripped.sh:3"
    refused = run("open-quote.sh", "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["faults"][0]["where"] == "open-quote.sh:1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "A B"], "use lower-case letters"),
        (["--set", "X"], "'X' is not NAME=VALUE"),
        (["--path", "models/x"], "is not an absolute path"),
    ],
)
def test_a_wrong_option_is_told(words: list[str], message: str) -> None:
    result = run("plain.sh", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_path_of_the_caller_s_wins(tmp_path: Path) -> None:
    argv = rendered(imported("l9.txt", path="/srv/models/GLM-5.2"), tmp_path)
    assert argv[:4] == ["--model-path", "/srv/models/GLM-5.2", "--served-model-name", "nvidia/GLM-5.2-NVFP4"]


def test_options_of_a_case_are_read() -> None:
    assert options("two-lines-chosen.sh") == ["--line", "3"]
