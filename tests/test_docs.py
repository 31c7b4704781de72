"""The docs name every command, option and key, and their shell lines are real ones."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

from kernelswap import __version__
from kernelswap.cli import COMMANDS, main
from kernelswap.pyinfra_options import OPTIONS
from kernelswap.rollout_file import RolloutFile
from kernelswap.schema import ModelFile, ProfileFile

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_documented(name: str) -> None:
    row = next(line for line in REFERENCE.splitlines() if line.startswith(f"| `kernelswap {name}"))
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not {"--json", "--help"} & set(parameter.opts):
            assert f"`{parameter.opts[0]}" in row


def test_every_documented_command_exists() -> None:
    assert set(re.findall(r"^\| `kernelswap (\w+)", REFERENCE, re.MULTILINE)) == set(COMMANDS)
    assert set(re.findall(r"`kernelswap (\w+)", README + CONTRIBUTING)) <= {*COMMANDS, "command"}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_pyinfra_option_is_documented(option: str) -> None:
    assert f"| `--{option}" in REFERENCE


def keys(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield field.alias or name
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from keys(part)


@pytest.mark.parametrize("key", sorted({*keys(ModelFile), *keys(ProfileFile), *keys(RolloutFile)}))
def test_every_key_is_documented(key: str) -> None:
    assert f"`{key}`" in REFERENCE or f"`{key}:" in REFERENCE or f"{{{key}: " in REFERENCE


def test_every_kind_of_drift_is_documented() -> None:
    sources = [(ROOT / path / "config_drift.py").read_text() for path in ("kernelswap", "kernelswap/agent")]
    kinds = set(re.findall(r"(?:Finding|blind|_unknown)\(\s*\"([a-z-]+)\"", "".join(sources)))
    kinds |= set(re.findall(r"_add\(\"([a-z-]+)\"", (ROOT / "kernelswap/agent/start_paths.py").read_text()))
    table = json.loads((ROOT / "kernelswap/knowledge/start_paths.json").read_text())
    kinds |= {entry["kind"] for entry in table["files"]}
    assert {"unit", "release", "cron", "compose"} <= kinds
    for kind in kinds:
        assert f"`{kind}`" in REFERENCE, kind


def test_every_metric_is_documented() -> None:
    names = re.findall(r"\{PREFIX\}(_[a-z_]+)\"", (ROOT / "kernelswap/agent/metrics.py").read_text())
    assert names
    for name in names:
        assert f"`kernelswap{name}`" in REFERENCE


def test_the_changelog_heads_with_the_version() -> None:
    assert (ROOT / "CHANGELOG.md").read_text().splitlines()[0] == f"# {__version__}"


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    reasons = CONTRIBUTING.partition("## Dependencies")[2]
    for requirement in wanted:
        assert re.split(r"[<>=]", requirement)[0] in reasons


def test_every_file_that_the_docs_name_is_there() -> None:
    named = re.findall(r"`((?:kernelswap|roles|templates|inventory|lab|tests|docs)/[\w./-]*)`", README + CONTRIBUTING)
    assert named
    for path in named:
        if "NAME" not in path:
            assert (ROOT / path).exists(), path


def test_make_has_the_words_that_the_docs_use() -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)", README + CONTRIBUTING + (ROOT / ".ci/run").read_text())) <= targets
