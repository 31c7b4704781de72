"""A disk whose power can be cut: what a program has done to a folder, and what of it was safe at every moment.

Python's own audit events and `os.fsync` mark the moments. A file's content is safe as of its last fsync; a name (made,
renamed or removed) is safe once its folder was fsynced; nothing else is.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import pytest


@dataclass(frozen=True)
class File:
    content: bytes
    mode: int


@dataclass(frozen=True)
class Folder:
    names: Mapping[str, Node] = field(default_factory=dict)


Node = Union[File, Folder, str]  # noqa: UP007 - evaluated, so Python 3.9's; a string is a symbolic link's target

CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.chmod", "os.truncate"}
_watching: Disk | None = None


@dataclass(frozen=True)
class Moment:
    """One moment: what a reader saw, what was safe, and whatever else `remember` gave for it. call: what came next.

    torn: all names as the reader saw them, and half of what was not synced under each.
    """

    call: str
    now: Folder
    safe: Folder
    torn: Folder
    memory: Any

    def after_power_cut(self) -> Iterator[tuple[str, Folder]]:
        """The trees that a boot may find: file systems may write more than they must, and one earlier than another."""
        yield "unsynced lost", self.safe
        yield "unsynced kept", self.now
        yield "unsynced torn", self.torn
        yield "/etc kept, rest lost", Folder({**self.safe.names, "etc": self.now.names["etc"]})
        yield "/etc lost, rest kept", Folder({**self.now.names, "etc": self.safe.names["etc"]})


class Disk:
    """Watches one folder. remember: called at every moment, for what is not on the disk."""

    def __init__(self, root: Path, remember: Callable[[], Any]) -> None:
        self.root = root
        self.remember = remember
        self.moments: list[Moment] = []
        self._ids: dict[int, int] = {}  # inode -> a number that is never used again
        self._last = 0
        self._nodes: dict[int, Any] = {}
        self._safe: dict[int, Any] = {}
        self._busy = False
        self._look()
        self._safe = dict(self._nodes)

    @contextlib.contextmanager
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
        """Note every moment until the end of the block."""
        global _watching
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", self._fsync)
            _watching = self
            try:
                yield self
                self.note("the end")
            finally:
                _watching = None

    def note(self, call: str) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            self._look()
            torn = {number: _torn(node, self._safe[number]) for number, node in self._nodes.items()}
            trees = [self._tree(nodes) for nodes in (self._nodes, self._safe, torn)]
            self.moments.append(Moment(call, *trees, self.remember()))
        finally:
            self._busy = False

    def _fsync(self, handle: int) -> None:
        self.note("fsync")
        inode = os.fstat(handle).st_ino
        if inode in self._ids:
            number = self._ids[inode]
            self._safe[number] = self._nodes[number]

    def _look(self) -> None:
        found: dict[int, int] = {}
        nodes: dict[int, Any] = {}

        def number(inode: int) -> int:
            if inode not in self._ids:
                self._last += 1
                self._ids[inode] = self._last
            found[inode] = self._ids[inode]
            return found[inode]

        def visit(path: Path) -> int:
            state = path.lstat()
            this = number(state.st_ino)
            mode = stat.S_IMODE(state.st_mode)
            unwritten: Any = File(b"", mode)  # what is there under a name that is safe alone
            if stat.S_ISDIR(state.st_mode):
                nodes[this], unwritten = {entry.name: visit(entry) for entry in sorted(path.iterdir())}, {}
            elif stat.S_ISLNK(state.st_mode):
                nodes[this] = unwritten = str(path.readlink())
            else:
                nodes[this] = File(path.read_bytes(), mode)
            self._safe.setdefault(this, unwritten)
            return this

        self._top = visit(self.root)
        self._ids, self._nodes = found, nodes

    def _tree(self, nodes: Mapping[int, Any]) -> Folder:
        def build(number: int) -> Node:
            node = nodes[number]
            return Folder({name: build(child) for name, child in node.items()}) if isinstance(node, dict) else node

        tree = build(self._top)
        assert isinstance(tree, Folder)
        return tree


def _torn(now: Any, safe: Any) -> Any:
    if not isinstance(now, File) or now == safe:
        return now
    kept = len(safe.content) if now.content.startswith(safe.content) else 0
    return File(now.content[: (kept + len(now.content)) // 2], now.mode)


def put(tree: Folder, path: Path) -> None:
    """Make a tree real."""
    path.mkdir()
    for name, node in tree.names.items():
        if isinstance(node, Folder):
            put(node, path / name)
        elif isinstance(node, str):
            (path / name).symlink_to(node)
        else:
            (path / name).write_bytes(node.content)
            (path / name).chmod(node.mode)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is None or event not in CHANGES:
        return
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
        return
    _watching.note(f"{event} {arguments[0]}")


sys.addaudithook(_hook)
