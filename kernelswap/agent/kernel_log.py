"""What the kernel says of the GPUs: the driver's Xid lines since the boot, and what helps against each."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence

from kernelswap.agent import clock, knowledge
from kernelswap.protocol import Gpu, HostFault

FILE = Path("/var/log/kern.log")  # beside the journal, which has what no syslog daemon writes there
LINE = re.compile(
    r"^(?P<at>\d+\.\d+|\d{4}-\S+|\w{3} [ \d]\d [\d:]{8}) .*?"
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-f]+:[0-9a-f]+:[0-9a-f]+)[^)]*\): (?P<code>\d+)(?:, )?(?P<text>.*)",
    re.IGNORECASE,
)
ACTIONS = ("reboot", "reset", "restart", "watch")  # the stronger first


@dataclass(frozen=True)
class Xid:
    """One error of a GPU. at: epoch seconds; pci: the GPU's address, as in protocol.Gpu; text: the rest of the line."""

    at: float
    pci: str
    code: int
    text: str


def xids(since: float = 0.0) -> List[Xid]:
    """The errors of this boot since then (epoch seconds), oldest first; none if the log cannot be read."""
    boot = next(
        float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
    )
    found = parse(_journal(), time.time())
    with contextlib.suppress(OSError), FILE.open(encoding="utf-8", errors="replace") as lines:
        found += parse(lines, time.time())
    once = {(int(xid.at), xid.pci, xid.code): xid for xid in found if xid.at >= max(since, boot)}
    return sorted(once.values(), key=lambda xid: xid.at)


def _journal() -> List[str]:
    command = ["journalctl", "--dmesg", "--boot", "--output=short-unix", "--no-pager", "--quiet"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
        return done.stdout.decode("utf-8", "replace").splitlines()
    return []


def parse(lines: Iterable[str], now: float) -> List[Xid]:
    """The Xid lines of a kernel log with the journal's or a syslog daemon's times. now: for times without a year."""
    found = []
    for line in lines:
        match = LINE.match(line) if "Xid" in line else None
        at = _time(match["at"], now) if match else None
        if match and at is not None:
            domain, bus, device = (int(part, 16) for part in match["pci"].split(":"))
            found.append(Xid(at, f"{domain:04x}:{bus:02x}:{device:02x}", int(match["code"]), match["text"].strip()))
    return found


def _time(text: str, now: float) -> Optional[float]:
    with contextlib.suppress(ValueError):
        return float(text)
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    year = time.localtime(now).tm_year
    for each in (year, year - 1):  # the latest that is not to come
        with contextlib.suppress(ValueError):
            at = time.mktime(time.strptime(f"{each} {text}", "%Y %b %d %H:%M:%S"))
            if at <= now + 86400:
                return at
    return None


def of(gpu: Gpu, gpus: Iterable[Gpu], errors: Iterable[Xid]) -> List[Xid]:
    """The errors of one GPU; of one that cannot say where it is, those at an address that no other one has."""
    if gpu.pci:
        return [xid for xid in errors if xid.pci == gpu.pci]
    others = {other.pci for other in gpus}
    return [xid for xid in errors if xid.pci not in others]


@cache
def load() -> Dict[str, Any]:
    data: Dict[str, Any] = json.loads(knowledge.read("xid.json"))
    return data


def _row(xid: Xid) -> Optional[Dict[str, Any]]:
    """What is known of an error. A text is looked for at the end, where Xid 154 says what is asked for now."""
    rows = [row for row in load()["xids"] if row["xid"] == xid.code]
    return next((row for row in rows if row.get("text", "") in xid.text[-len(row.get("text", "")) - 2 :]), None)


def fails(xid: Xid) -> bool:
    """Whether it stands against a server that was started before it; others are only told."""
    return not (_row(xid) or {}).get("note", False)


def blames_host(xid: Xid) -> bool:
    """Whether the GPU itself failed, whatever ran on it."""
    row = _row(xid)
    return row is not None and row["blame"] == "host" and fails(xid)


def describe(xid: Xid) -> str:
    row = _row(xid)
    what = row["what"] if row else xid.text[:80] or "not in our table"
    return f"Xid {xid.code} at {clock.shown(xid.at)} ({what})"


def gravest(gpu: Gpu, errors: Sequence[Xid]) -> Optional[HostFault]:
    """The gravest of a GPU's errors, and what helps; None if none is known."""
    known = [(ACTIONS.index(row["action"]), -xid.at, xid) for xid in errors if (row := _row(xid))]
    if not known:
        return None
    rank, _, error = min(known, key=lambda item: item[:2])
    return HostFault(f"the kernel log has {describe(error)}", action(ACTIONS[rank], gpu))


def action(name: str, gpu: Gpu) -> str:
    """What to do, for people: one of ACTIONS."""
    return str(load()["actions"][name]).format(index=gpu.index)
