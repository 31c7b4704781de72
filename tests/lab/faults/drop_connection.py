"""Runs on a host and kills the sshd that serves whoever follows a swap there."""

import os
import signal
from pathlib import Path


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def name(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


def words(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


for entry in Path("/proc").glob("[0-9]*"):
    try:
        argv = words(entry.name)
        follows = argv[0].endswith("python3") and argv[1].endswith("/agent.pyz") and argv[2] == "swap"
    except (OSError, IndexError):
        continue
    if follows:
        pid = int(entry.name)
        while pid and name(pid) != "sshd":
            pid = parent(pid)
        if pid:
            os.kill(pid, signal.SIGKILL)
