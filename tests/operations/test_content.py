from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.command import StringCommand

from kernelswap.operations.content import place
from kernelswap.render import Hidden


def commands(*args: Any, **kwargs: Any) -> list[StringCommand]:
    return list(place._inner(*args, **kwargs))  # type: ignore[attr-defined]


def run(command: StringCommand) -> subprocess.CompletedProcess[str]:
    stdin = "".join(command.connector_arguments["_stdin"])
    return subprocess.run(
        ["sh", "-c", command.get_raw_value()], input=stdin, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "content",
    [Hidden("s3cret: 'ü'\n"), b"\x00\xff binary", b"", b"x" * 200_000],
    ids=["secret", "binary", "empty", "long"],
)
@pytest.mark.parametrize("name", ["plain", "it's a $HOME `name`"])
def test_it_writes_exactly_the_content(tmp_path: Path, content: Hidden | bytes, name: str) -> None:
    path = tmp_path / name
    (command,) = commands(str(path), content, mode="640")
    done = run(command)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert path.read_bytes() == (content.reveal().encode() if isinstance(content, Hidden) else content)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_it_replaces_the_file_and_never_changes_it_in_place(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    path.write_text("old")
    with path.open() as reader:
        run(commands(str(path), b"new")[0])
        assert reader.read() == "old"
    assert path.read_text() == "new"


def test_create_keeps_what_somebody_else_has_made(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("theirs")
    done = run(commands(str(path), Hidden("ours"), create=True)[0])
    assert done.returncode == 1
    assert "could not write" in done.stderr
    assert path.read_text() == "theirs"
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
    path.unlink()
    assert run(commands(str(path), Hidden("ours"), create=True)[0]).returncode == 0
    assert path.read_text() == "ours"


def test_a_standard_input_that_was_lost_is_an_error(tmp_path: Path) -> None:
    (command,) = commands(str(tmp_path / "secret"), Hidden("s3cret"))
    done = subprocess.run(["sh", "-c", command.get_raw_value()], input="", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_the_content_shows_nowhere(tmp_path: Path) -> None:
    (command,) = commands(str(tmp_path / "secret"), Hidden("s3cret"))
    shown = f"{command} {command!r} {command.get_raw_value()} {command.get_masked_value()} {Hidden('s3cret')!r}"
    assert "s3cret" not in shown
    assert "czNjcmV0" not in shown  # nor as base64
