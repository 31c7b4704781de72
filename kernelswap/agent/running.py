"""The swap that an instance is in the middle of. Apart from service.py, as it is asked often."""

from __future__ import annotations

from typing import Optional

from kernelswap.agent import files, host, units
from kernelswap.agent.host import Folders
from kernelswap.protocol import Request, Running, decode


def service_name(instance: str) -> str:
    return f"kernelswap-swap-{instance}.service"


def running(folders: Folders) -> Optional[Running]:
    """The swap that has not ended on this host, if any that can be told."""
    try:
        journal = host.read_journal(folders)
    except host.JournalLost:
        journal = None
    active = units.status(service_name(folders.instance)).running
    if active and (text := files.read(folders.request)):
        request = decode(Request, text)
        if journal and journal.request.swap == request.swap:
            return Running(request, journal.started, journal.step, active=True)
        return Running(request, folders.request.stat().st_mtime, "waiting", active=True)
    if journal:
        return Running(journal.request, journal.started, journal.step, active=files.is_locked(folders.lock))
    return None
