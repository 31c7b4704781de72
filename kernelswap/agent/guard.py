"""The last look before systemd starts a server: the ExecStartPre of every unit that we render."""

from __future__ import annotations

import contextlib
import sys
from typing import Optional

from kernelswap.agent import clean, files, gpus, host
from kernelswap.agent.host import Folders
from kernelswap.protocol import Plan


def guard(instance: str) -> None:
    """Wait until the host is clean for this instance. Raises clean.Dirty if it does not get so in time."""
    folders = Folders(instance)
    try:
        plan = _plan(folders)
    except (OSError, ValueError, host.JournalLost) as error:
        # What cannot be read cannot be checked; that alone must not keep a committed server down.
        print(f"kernelswap: not guarded: {error}", file=sys.stderr)
        _number_gpus(folders, "")
        return
    if plan:
        clean.prove(folders, plan, plan.timeouts.clean)
        _number_gpus(folders, gpus.numbering(gpus.of_host(plan), plan.gpus) if plan.gpus else "")


def _number_gpus(folders: Folders, indices: str) -> None:
    """Tell the server its GPUs by today's indices, which an EnvironmentFile= of the unit reads; "": by UUID."""
    try:
        if indices:
            files.write(folders.gpu_indices, f"CUDA_VISIBLE_DEVICES={indices}\n")
        else:
            files.remove(folders.gpu_indices)
    except OSError as error:  # a full /run must not keep a server down, which takes UUIDs as well
        print(f"kernelswap: the server gets its GPUs by UUID: {error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            files.remove(folders.gpu_indices)


def _plan(folders: Folders) -> Optional[Plan]:
    """The plan of what is about to start: a candidate while its unit lies under /run, else the known-good."""
    journal = host.read_journal(folders)
    candidate = journal.request.release if journal and folders.candidate_unit.exists() else None
    release = candidate or host.known_good(folders)
    return host.read_plan(folders, release) if release else None
