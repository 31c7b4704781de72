"""Files that survive a crash or a power cut: whole or not at all, and on the disk before we go on."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Iterator, List, Optional


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file by an atomic rename; content and rename are on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
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


def link(path: Path, target: str) -> None:
    """Point a symbolic link at a target, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(target)
    temporary.replace(path)
    sync_folder(path.parent)


def append(path: Path, line: str) -> None:
    """Add one line. A torn line left by a power cut is closed first, so that it spoils only itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync_folder(path.parent)


def read(path: Path) -> Optional[str]:
    """The text of a file, or None if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None


def read_lines(path: Path) -> List[str]:
    text = read(path)
    return text.splitlines() if text else []


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def lock(path: Path, patience: float = math.inf) -> Iterator[None]:
    """Hold a lock, waiting for it; the kernel gives it up when we die, however we die.

    Raises TimeoutError after `patience` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + patience
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"{path} is locked by another process: see `fuser {path}`") from None
                time.sleep(0.1)
        yield


def is_locked(path: Path) -> bool:
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
