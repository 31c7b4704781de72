from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kernelswap import pyinfra_options


def command() -> tuple[click.Command, list[dict[str, Any]]]:
    """A stand-in for pyinfra's command, and what it was called with."""
    calls: list[dict[str, Any]] = []

    @click.command()
    @click.argument("inventory")
    @click.option("--data", multiple=True)
    def cli(**kwargs: Any) -> None:
        calls.append(kwargs)

    pyinfra_options.extend(cli)
    return cli, calls


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ([], ()),
        (["--profile", "trtllm"], ('profile="trtllm"',)),
        (["--profile", "8"], ('profile="8"',)),
        (["--rollback"], ("rollback=true",)),
        (["--verify", "quick"], ('verify="quick"',)),
        (["--force", "--adopt"], ("force=true", "adopt=true")),
        (["--reason", 'a "b" = {c}'], ('reason="a \\"b\\" = {c}"',)),
        (["--data", "profile=a", "--profile", "b"], ("profile=a", 'profile="b"')),
    ],
)
def test_each_option_becomes_data(words: list[str], data: tuple[str, ...]) -> None:
    cli, calls = command()
    result = CliRunner().invoke(cli, [__file__, *words])
    assert result.exit_code == 0, result.output
    assert calls == [{"inventory": __file__, "data": data}]


def test_an_inventory_that_is_not_there_is_no_success() -> None:
    cli, calls = command()
    result = CliRunner().invoke(cli, ["inventory/nope.py", "--profile", "a"])
    assert result.exit_code == 2
    assert "inventory/nope.py: no such inventory file" in result.output
    assert not calls


def test_an_empty_profile_is_not_none() -> None:
    """As from an unset variable: to go to the declared profile instead would do what nobody asked for."""
    cli, calls = command()
    assert CliRunner().invoke(cli, [__file__, "--profile", ""]).exit_code == 0
    assert calls[0]["data"] == ('profile=""',)


def test_two_goals_are_refused() -> None:
    cli, calls = command()
    result = CliRunner().invoke(cli, [__file__, "--profile", "a", "--rollback"])
    assert result.exit_code == 2
    assert "give one" in result.output
    assert not calls


def test_extending_twice_adds_nothing() -> None:
    cli, _ = command()
    count = len(cli.params)
    pyinfra_options.extend(cli)
    assert len(cli.params) == count


def test_another_command_is_left_alone() -> None:
    other = click.Command("other", callback=lambda: None)
    pyinfra_options.extend(other)
    assert other.params == []


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    pyinfra = Path(sys.executable).with_name("pyinfra")
    return subprocess.run([pyinfra, *words], cwd=cwd, capture_output=True, text=True, check=False)


def test_the_literal_command(tmp_path: Path) -> None:
    (tmp_path / "deploy.py").write_text(
        "from pyinfra import host\nprint([host.data.get(k) for k in ('profile', 'reason', 'force', 'rollback')])\n"
    )
    done = run("@local", "deploy.py", "--profile", "8", "--reason", "[1]", "--force", "-y", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "['8', '[1]', True, None]" in done.stdout


def test_help_lists_them(tmp_path: Path) -> None:
    text = run("--help", cwd=tmp_path).stdout
    for name in pyinfra_options.OPTIONS:
        assert f"--{name}" in text


def test_gevent_alone_does_not_load_pyinfra() -> None:
    code = "from gevent import monkey; monkey.patch_all(); import sys; assert 'pyinfra_cli' not in sys.modules; "
    code += "assert 'click' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
