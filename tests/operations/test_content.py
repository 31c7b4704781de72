from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.command import StringCommand
from pyinfra.context import ctx_host

from kernelswap.operations.content import File, place
from kernelswap.render import Hidden


class FakeHost:
    def __init__(self, arguments: dict[str, Any] | None = None) -> None:
        self.current_op_global_arguments = arguments


def command(*files: File, host: FakeHost | None = None) -> StringCommand:
    with ctx_host.use(host or FakeHost()):
        (one,) = place._inner(files)  # type: ignore[attr-defined]
    assert isinstance(one, StringCommand)
    return one


def run(placing: StringCommand, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    sent = "".join(placing.connector_arguments["_stdin"]) if stdin is None else stdin
    return subprocess.run(
        ["sh", "-c", placing.get_raw_value()], input=sent, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "content",
    [Hidden("s3cret: 'ü'\n"), "text: 'ü'\n", b"\x00\xff binary", b"", b"x" * 200_000],
    ids=["secret", "text", "binary", "empty", "long"],
)
@pytest.mark.parametrize("name", ["plain", "it's a $HOME `name`"])
def test_it_writes_exactly_the_content(tmp_path: Path, content: Hidden | bytes | str, name: str) -> None:
    path = tmp_path / name
    done = run(command(File(str(path), content, mode=0o640)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert path.read_bytes() == File("", content).data
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_all_files_and_their_folders_in_one_command(tmp_path: Path) -> None:
    release = tmp_path / "main" / "releases" / "b-2"
    files = [
        File(f"{release}/unit", "[Unit]\n"),
        File(f"{release}/secrets.yaml", Hidden("api-key: x\n"), mode=0o600),
        File(f"{tmp_path}/lib/agent.pyz", b"PK\x03\x04", mode=0o755),
    ]
    done = run(command(*files))
    assert (done.returncode, done.stderr) == (0, "")
    for file in files:
        assert Path(file.path).read_bytes() == file.data
        assert Path(file.path).stat().st_mode & 0o777 == file.mode
    assert release.stat().st_mode & 0o777 == 0o755


def test_what_the_way_to_root_reads_comes_first(tmp_path: Path) -> None:
    host = FakeHost({"_stdin": ["password\n"]})
    assert command(File(f"{tmp_path}/a", "b"), host=host).connector_arguments["_stdin"][0] == "password\n"


@pytest.mark.parametrize("lost", [0, 1, 40])
def test_a_standard_input_that_did_not_arrive_whole_writes_nothing(tmp_path: Path, lost: int) -> None:
    placing = command(File(f"{tmp_path}/a", "a" * 100), File(f"{tmp_path}/secret", Hidden("s3cret")))
    sent = "".join(placing.connector_arguments["_stdin"])
    done = run(placing, sent[: len(sent) // 2 - lost] if lost else "")
    assert done.returncode == 1
    assert "did not arrive whole" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_content_shows_nowhere(tmp_path: Path) -> None:
    file = File(str(tmp_path / "secret"), Hidden("s3cret"), mode=0o600)
    placing = command(file)
    sent = "".join(placing.connector_arguments["_stdin"])
    shown = f"{file!r} {placing} {placing!r} {placing.get_raw_value()} {placing.get_masked_value()}"
    shown += f"{placing.connector_arguments!r}"
    assert "s3cret" not in shown
    assert sent not in shown
