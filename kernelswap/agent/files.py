"""Files that survive a crash or a power cut: whole or not at all, and on the disk before we go on.

That holds for their names too: a folder that was made is synced into its parent, a name into its folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import Callable, Iterator, List, Optional

NEW = ".new-"  # in the name of a file that has not got its real one yet
FULL = (errno.ENOSPC, errno.EDQUOT)  # no space, no inode, or no quota left


def make_folder(path: Path) -> None:
    """Make a folder and those above it."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file by an atomic rename; content and rename are on the disk when this returns."""
    make_folder(path.parent)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}{NEW}", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
    sync_folder(path.parent)


def keep(path: Path, text: str, mode: int = 0o644) -> None:
    """Write what may be lost: a disk that takes nothing more loses it, and nothing else."""
    with contextlib.suppress(OSError):
        write(path, text, mode)


def drop_unfinished(folder: Path) -> None:
    """Remove what a crash in the middle of `write` or `link` has left in a folder."""
    for path in folder.glob(f".*{NEW}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def link(path: Path, target: str) -> None:
    """Point a symbolic link at a target, atomically."""
    temporary = path.with_name(f".{path.name}{NEW}{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(target)
    temporary.replace(path)
    sync_folder(path.parent)


def append(path: Path, line: str, synced: bool = True) -> None:
    """Add one line. A torn line left by a power cut is closed first, so that it spoils only itself."""
    make_folder(path.parent)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode("utf-8", "backslashreplace") + b"\n")
        file.flush()
        if synced:
            os.fsync(file.fileno())
    if synced:
        sync_folder(path.parent)


def remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync_folder(path.parent)


def reserve(path: Path, size: int) -> None:
    """Set space and an inode aside, to be given up by `remove` when the disk is full. size: bytes."""
    make_folder(path.parent)
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def read(path: Path) -> Optional[str]:
    """The text of a file, or None if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None


def read_lines(path: Path) -> List[str]:
    text = read(path)
    return text.split("\n") if text else []


def sync_folder(path: Path) -> None:
    """Bring a folder's names onto the disk, or a file's content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path, top: Path) -> None:
    """Bring a folder's files and names onto the disk, and its own name and those above it, up to `top`."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            sync_folder(path)
    for above in (folder, *folder.parents):
        sync_folder(above)
        if above == top:
            break


def why_unwritable(folder: Path) -> str:
    """Why no file can be made in a folder, in a few words; "" if one can. Tried, since no flag tells all reasons."""
    while not folder.is_dir():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 4096)
    except OSError as error:
        return f"{error.strerror}"
    return ""


def why_unchangeable(path: Path) -> str:
    """Why an existing file may not be changed or replaced; "" if it may, or is not there."""
    try:
        with path.open("r+b"):
            return ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{error.strerror}"


@contextlib.contextmanager
def lock(
    path: Path, patience: float = math.inf, waiting: Callable[[int], None] = lambda _pid: None, every: float = 15
) -> Iterator[None]:
    """Hold a lock, waiting for it; the kernel gives it up when we die, however we die.

    The lock is this process's alone: a child that outlives us has no part in it. Closing the file anywhere in this
    process gives it up, so nothing else opens it. waiting: told the holder's id every few seconds. Raises Held after
    `patience` seconds.
    """
    make_folder(path.parent)
    start = told = time.monotonic()
    with path.open("a") as file:
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now - start > patience:
                    raise Held(path, holder(path) or 0) from None
                if now - told >= every:
                    waiting(holder(path) or 0)
                    told = now
                time.sleep(0.1)
        yield


class Held(Exception):
    """A lock was not given up in time. pid: of its holder, 0 where that is not to be seen from here."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__(f"{path} is locked by process {pid}")
        self.path = path
        self.pid = pid


def holder(path: Path) -> Optional[int]:
    """The id of the process that holds a lock; None if nobody does. Not for a lock of our own, see `lock`."""
    # struct flock of 64-bit Linux: type, whence, start, length (0: all of it), process id.
    layout = "hhqqi4x"
    try:
        with path.open("r") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(layout, fcntl.F_RDLCK, 0, 0, 0, 0))
    except FileNotFoundError:
        return None
    kind, _, _, _, pid = struct.unpack(layout, answer)
    return None if kind == fcntl.F_UNLCK else int(pid)


def is_locked(path: Path) -> bool:
    return holder(path) is not None
