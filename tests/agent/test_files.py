from __future__ import annotations

import multiprocessing
import stat
from pathlib import Path

import pytest

from kernelswap.agent import files


def test_write_replaces_whole_files_with_their_mode(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secrets.yaml"
    files.write(path, "old", mode=0o600)
    files.write(path, "new", mode=0o600)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secrets.yaml"]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "unit"
    files.write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write(path, "new \ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["unit"]


def test_link_flips(tmp_path: Path) -> None:
    files.link(tmp_path / "known-good", "releases/a")
    files.link(tmp_path / "known-good", "releases/b")
    assert str((tmp_path / "known-good").readlink()) == "releases/b"


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b"new\n"), (b"old\n", b"old\nnew\n"), (b'old\n{"torn', b'old\n{"torn\nnew\n')],
)
def test_append_closes_a_torn_line(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(before)
    files.append(path, "new")
    assert path.read_bytes() == after


def _hold(path: Path, ready: multiprocessing.synchronize.Event) -> None:
    with files.lock(path):
        ready.set()
        multiprocessing.Event().wait(60)


def test_the_lock_of_a_killed_owner_is_free(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    owner = context.Process(target=_hold, args=(tmp_path / "lock", ready))
    owner.start()
    assert ready.wait(10)
    assert files.is_locked(tmp_path / "lock")
    owner.kill()
    owner.join()
    assert not files.is_locked(tmp_path / "lock")
    with files.lock(tmp_path / "lock"):
        pass


def test_no_lock_file_is_no_lock(tmp_path: Path) -> None:
    assert not files.is_locked(tmp_path / "lock")
