from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from kernelswap.agent import files, processes, service


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


def _fork_and_hold(path: Path, ready: multiprocessing.synchronize.Event) -> None:
    with files.lock(path):
        if os.fork() == 0:
            ready.set()
        time.sleep(60)


def test_a_child_that_hangs_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    owner = context.Process(target=_fork_and_hold, args=(tmp_path / "lock", ready))
    owner.start()
    assert ready.wait(10)
    (child,) = [process for process in processes.table().values() if process.parent == owner.pid]
    try:
        assert files.holder(tmp_path / "lock") == owner.pid
        owner.kill()
        owner.join()
        assert processes.alive(child)
        assert not files.is_locked(tmp_path / "lock")
    finally:
        os.kill(child.pid, signal.SIGKILL)


def test_who_waits_is_told_who_holds_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    owner = context.Process(target=_hold, args=(tmp_path / "lock", ready))
    owner.start()
    told: list[int] = []
    try:
        assert ready.wait(10)
        with pytest.raises(files.Held) as held, files.lock(tmp_path / "lock", 0.5, told.append, every=0.1):
            pass
        assert {held.value.pid, *told} == {owner.pid}
        assert f"pid {owner.pid} of " in service.who_holds(held.value.pid)
        os.kill(held.value.pid, signal.SIGSTOP)
        until = time.monotonic() + 10
        while f"`kill -CONT {owner.pid}` lets it go on" not in service.who_holds(held.value.pid):
            assert time.monotonic() < until
    finally:
        owner.kill()
        owner.join()
    assert service.who_holds(owner.pid or 0) == f"process {owner.pid}, which is not to be seen from here"


def test_why_a_folder_or_file_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "unit"
    assert files.why_unchangeable(path) == ""
    assert not path.exists()
    path.write_text("old")
    assert files.why_unchangeable(path) == files.why_unwritable(tmp_path / "not" / "there") == ""
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reserve_takes_its_room_on_the_disk(tmp_path: Path) -> None:
    files.reserve(tmp_path / "deep" / "reserve", 1024 * 1024)
    files.reserve(tmp_path / "deep" / "reserve", 1024 * 1024)
    assert (tmp_path / "deep" / "reserve").stat().st_blocks * 512 >= 1024 * 1024


def test_a_line_that_is_no_end_of_a_line_for_us_stays_whole(tmp_path: Path) -> None:
    files.append(tmp_path / "history", "a\u2028b \ud800")
    assert files.read_lines(tmp_path / "history") == ["a\u2028b \\ud800", ""]


def test_no_lock_file_is_no_lock(tmp_path: Path) -> None:
    assert not files.is_locked(tmp_path / "lock")
