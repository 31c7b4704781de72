"""Deletes what an instance need not keep: old releases with all that is known of them, evidence, lines of the history.

What stays is decided by ledger.kept_releases and ledger.kept_reports. To be killed in the middle harms nothing: a
folder goes by a rename first, and the next prune deletes what was renamed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import AbstractSet, Iterable, List, Sequence

from kernelswap import ledger
from kernelswap.agent import files, host
from kernelswap.agent.host import Folders
from kernelswap.protocol import Report, Request, Retention, decode, encode

GONE = ".gone-"  # begins the name of a folder that is being deleted
GRACE = 86400.0  # seconds for which what no swap has asked for is left: it may be put here right now
UPLOAD = re.compile(r"\..+\.new-.+")  # see put.py


def prune(folders: Folders) -> None:
    """To be called while no swap is open and the known-good serves. What cannot be deleted waits for the next time.

    Nothing is done where the history does not end on the known-good, as when it was lost: it tells what is needed.
    """
    good = host.known_good(folders)
    with contextlib.suppress(OSError, ValueError):
        history = host.history(folders)
        if good and ledger.commits(history)[-1:] == [good] and not folders.journal.exists():
            _prune(folders, good, history, host.read_plan(folders, good).retention)


def _prune(folders: Folders, good: str, history: Sequence[Report], policy: Retention) -> None:
    swaps = _folders_in(folders.evidence(""))  # first: a swap that begins has written its request before
    request = decode(Request, files.read(folders.request) or "")
    known = {name for report in history for name in (report.previous, report.request.release, report.request.swap)}

    def keep(wanted: AbstractSet[str], paths: Sequence[Path]) -> None:
        _delete(path for path in paths if path.name not in wanted and (path.name in known or not _is_fresh(path)))

    releases = {*ledger.kept_releases(history, set(host.staged(folders)), good, policy), request.release}
    reports, evidence = ledger.kept_reports(history, releases, policy)
    keep(releases, _folders_in(folders.releases))
    keep({*evidence, request.swap}, swaps)
    left = _folders_in(folders.releases)
    _drop_uploads(left)
    _forget(folders, {path.name for path in left})
    if len(reports) < len(history):
        files.write(folders.tally, encode(host.tally(folders, history)) + "\n")  # first, so that none is counted twice
        files.write(folders.history, "".join(encode(report) + "\n" for report in reports))


def _folders_in(parent: Path) -> List[Path]:
    """The real folders in a real folder, without those that are being deleted, which are now."""
    if parent.is_symlink() or not parent.is_dir():
        return []
    with os.scandir(parent) as entries:
        found = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    for path in found:
        if path.name.startswith(GONE):
            shutil.rmtree(path, ignore_errors=True)
    return [path for path in found if not path.name.startswith(".")]


def _delete(paths: Iterable[Path]) -> None:
    """No link is followed, not even one that takes a folder's place meanwhile."""
    for path in paths:
        with contextlib.suppress(OSError):
            gone = path.with_name(f"{GONE}{path.name}")
            path.rename(gone)
            files.sync_folder(path.parent)  # else a power cut may bring the name back over half of what was below it
            shutil.rmtree(gone)


def _is_fresh(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime < GRACE


def _drop_uploads(releases: Iterable[Path]) -> None:
    """What a controller that was killed has left half written; it may hold secrets."""
    for folder in releases:
        for path in folder.iterdir():
            if UPLOAD.fullmatch(path.name) and not path.is_dir() and not _is_fresh(path):
                files.remove(path)


def _forget(folders: Folders, releases: AbstractSet[str]) -> None:
    """What is known of releases that are gone."""
    _delete(path for path in _folders_in(folders.measured("")) if path.name not in releases)
    resolved = folders.resolved("any").parent
    for path in () if resolved.is_symlink() else resolved.glob("*.json"):
        if path.stem not in releases:
            files.remove(path)
