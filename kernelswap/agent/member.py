"""Keeps an instance in its routers: a router forgets its workers when it ends, and a swap may not have reached it.

It puts in what serves and nobody has sent away: the committed server, ready, while no swap is open.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Dict, List

from kernelswap.agent import client, files, host, routers
from kernelswap.agent.client import Client
from kernelswap.agent.host import Folders
from kernelswap.agent.routers import Member, RouterError
from kernelswap.protocol import AGENT_PATH, Plan

EVERY = 3.0  # seconds between two looks at the routers' lists
PATIENCE = 15.0  # seconds until a router lists a server that was put in
REPLACED = 75  # exit code after which systemd starts it again, from the agent's new file


def unit_name(instance: str) -> str:
    return f"kernelswap-member@{instance}.service"


def keep(instance: str) -> int:
    """Look after the instance's routers until it has none; returns the exit code."""
    folders, here = Folders(instance), Path(AGENT_PATH)
    file, said = here.stat().st_ino, ""
    while True:
        try:
            members = _members(folders)
            if not members:
                print(f"{instance} has no routers")
                return 0
            now = "; ".join(look(folders, members))
        except (OSError, ValueError) as error:
            now = str(error)
        if now != said:
            print(now or "listed by all routers")
            sys.stdout.flush()
            said = now
        time.sleep(EVERY)
        if here.stat().st_ino != file:
            return REPLACED


def _members(folders: Folders) -> List[Member]:
    traffic = host.traffic(folders)
    release = host.known_good(folders)
    port = host.read_plan(folders, release).port if release else 0
    return routers.members(traffic, port)


def look(folders: Folders, members: List[Member]) -> List[str]:
    """Put the server in where it is not listed; returns what stands in the way, a line each."""
    missing: Dict[str, Member] = {}
    problems = []
    for member in members:
        try:
            if not member.listed():
                missing[member.router.url] = member
        except RouterError as error:
            problems.append(str(error))
    if not missing:
        return problems
    release = host.known_good(folders)
    try:
        # Whoever swaps holds this lock, and an open journal means that one who did so has died: both send users away.
        with files.lock(folders.lock, patience=0):
            if release and not folders.journal.exists():
                problems += _put_in(folders, host.read_plan(folders, release), list(missing.values()))
    except files.Held:
        pass
    return problems


def _put_in(folders: Folders, plan: Plan, missing: List[Member]) -> List[str]:
    key = host.secrets(folders, plan.release).get("api-key", "")
    if not Client(client.base_url(plan), plan.served_name, key).ready():
        return []
    problems = []
    for member in missing:
        try:
            member.join(key, PATIENCE)
            print(f"put into router {member.router.url}")
        except RouterError as error:
            problems.append(str(error))
    return problems
