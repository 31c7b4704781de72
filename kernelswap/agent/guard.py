"""The last look before systemd starts a server: the ExecStartPre of every unit that we render.

A swap starts its candidate without it, as the agent has looked itself a moment before. What it cannot see is no dirt:
only a host that was seen not to be clean keeps a committed server down.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Optional

from kernelswap.agent import clean, files, gpus, host, units
from kernelswap.agent.host import Folders
from kernelswap.protocol import AGENT_PATH, Plan

FAULTS = (OSError, ValueError, host.JournalLost, units.UnitError)  # of our own files, or of systemd


def guard(instance: str) -> None:
    """Wait until the host is clean for this instance. Raises clean.Dirty if it was seen not to get so in time."""
    folders = Folders(instance)
    indices = ""
    try:
        indices = _prove(folders)
    except clean.Dirty as dirty:
        if not dirty.blind:
            raise
        _say(f"not guarded: {dirty}: {dirty.todo}")
    except FAULTS as error:
        _say(f"not guarded: {error}")
    finally:
        number_gpus(folders, indices)


def without(unit: str, instance: str) -> str:
    """A unit's text less its guard."""
    ours = re.compile(rf"{re.escape(AGENT_PATH)} guard {re.escape(instance)}(?![\w-])")
    return "".join(line for line in unit.splitlines(keepends=True) if not ours.search(line))


def _prove(folders: Folders) -> str:
    """Prove the host clean; returns today's indices of the GPUs that the instance names, if it may use them."""
    plan = _plan(folders)
    if plan is None:
        return ""
    proof = clean.prove(folders, plan, plan.timeouts.clean)
    return gpus.numbering(proof.gpus, plan.gpus) if plan.gpus else ""


def _say(text: str) -> None:
    """Not in the words of main, which tell why a server was not started."""
    print(f"kernelswap guard: {text}", file=sys.stderr)


def number_gpus(folders: Folders, indices: str) -> None:
    """Tell the server its GPUs by today's indices, which an EnvironmentFile= of the unit reads; "": by UUID."""
    try:
        if indices:
            files.write(folders.gpu_indices, f"CUDA_VISIBLE_DEVICES={indices}\n")
        else:
            files.remove(folders.gpu_indices)
    except OSError as error:  # a full /run must not keep a server down, which takes UUIDs as well
        _say(f"the server gets its GPUs by UUID: {error}")
        with contextlib.suppress(OSError):
            files.remove(folders.gpu_indices)


def _plan(folders: Folders) -> Optional[Plan]:
    """The plan of what is about to start: a candidate while its unit lies under /run, else the known-good."""
    journal = host.read_journal(folders)
    candidate = journal.request.release if journal and folders.candidate_unit.exists() else None
    release = candidate or host.known_good(folders)
    return host.read_plan(folders, release) if release else None
