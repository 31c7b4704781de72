from __future__ import annotations

import base64
import io
import json
import os
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelswap.agent import put


def test_it_replaces_a_file_and_never_changes_it_in_place(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    path.write_text("old")
    with path.open() as reader:
        put.put(path, b"new", 0o755, create=False)
        assert reader.read() == "old"
    assert path.read_text() == "new"


def test_create_keeps_what_somebody_else_has_made(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("theirs")
    with pytest.raises(FileExistsError):
        put.put(path, b"ours", 0o600, create=True)
    assert path.read_text() == "theirs"
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
    path.unlink()
    put.put(path, b"ours", 0o600, create=True)
    assert path.read_text() == "ours"


def test_a_file_has_its_name_only_when_it_is_whole_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        put.put(tmp_path / "plan.json", b"{}", 0o644, create=False)
    assert list(tmp_path.iterdir()) == []


def test_nobody_reads_a_secret_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(os, "fchmod", lambda handle, mode: modes.append(os.fstat(handle).st_mode & 0o777))
    put.put(tmp_path / "secrets.yaml", b"x", 0o600, create=False)
    assert modes == [0o600]


def test_what_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    path = f"{tmp_path}/file/below"  # a folder cannot be made there
    assert _main([{"path": path, "mode": 0o644, "size": 1, "create": False}], b"x", monkeypatch) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"kernelswap: could not write {path}: ")
    assert f"'{tmp_path}/file'" in told


def _main(header: Any, contents: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    packed = base64.b64encode(zlib.compress(json.dumps(header).encode() + b"\n" + contents))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(packed)))
    return put.main()
