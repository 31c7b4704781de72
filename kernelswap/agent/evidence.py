"""What was kept of one swap, for a report: read, bounded, changed in nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from kernelswap.agent import host
from kernelswap.agent.host import Folders, Journal
from kernelswap.measured import ACCURACY_FILE, BENCH_FILE, DRIFT_FILE, GPU_FILE, METRICS_FILE, THROUGHPUT_FILE
from kernelswap.protocol import Evidence, Report

SWAPS_SHOWN = 50
WHOLE = (THROUGHPUT_FILE, DRIFT_FILE, ACCURACY_FILE)
SERIES = (GPU_FILE, METRICS_FILE)  # a heading, then rows, of each GPU one at every instant
TAILS = ("events.jsonl", BENCH_FILE, "server.log")
ROWS = {GPU_FILE: 4000, METRICS_FILE: 1000, "events.jsonl": 2000, BENCH_FILE: 500, "server.log": 60}
LINE = 2000  # characters of a line of a log; longer ones are cut
SIZE = 1024 * 1024  # bytes of one file; of a longer one its end, or nothing where only the whole has a meaning


def find(folders: Sequence[Folders], swap: str) -> Evidence:
    """The swap of these instances whose id begins with `swap`; "": the newest that has ended."""
    ended = sorted(((r, f) for f in folders for r in _ended(f)), key=lambda pair: pair[0].ended)
    open_ = tuple(journal.request for journal in map(_journal, folders) if journal)
    found = [pair for pair in ended if pair[0].request.swap.startswith(swap)] if swap else ended[-1:]
    exact = [pair for pair in found if pair[0].request.swap == swap]
    if len(exact or found) != 1:
        return Evidence(swaps=tuple(report for report, _ in (found or ended)[-SWAPS_SHOWN:]), unfinished=open_)
    report, where = (exact or found)[0]
    return _of(where, report)


def _ended(folders: Folders) -> List[Report]:
    """As the history tells, and the one that could not be written to it."""
    reports = {report.request.swap: report for report in host.history(folders)}
    if last := host.unrecorded(folders):
        reports.setdefault(last.request.swap, last)
    return list(reports.values())


def _journal(folders: Folders) -> Optional[Journal]:
    try:
        return host.read_journal(folders)
    except (OSError, host.JournalLost):
        return None


def _of(folders: Folders, report: Report) -> Evidence:
    folder = folders.evidence(report.request.swap)
    releases = [name for name in (report.previous, report.request.release) if name]
    texts: Dict[str, str] = {}
    rows: Dict[str, int] = {}
    for name in (*WHOLE, *SERIES, *TAILS):
        read = _read(folder / name)
        if read is None:
            continue
        texts[name], count = read
        if count:
            rows[name] = count
    return Evidence(
        report=report,
        files=texts,
        rows=rows,
        plans=tuple(filter(None, (host.plan_or_none(folders, name) for name in releases))),
        resolved=tuple(filter(None, (host.resolved(folders, name) for name in releases))),
    )


def _read(path: Path) -> Optional[Tuple[str, int]]:
    """The text of a file within its bounds, and how many rows it has if some were left out; None: nothing to tell."""
    limit = ROWS.get(path.name)
    try:
        if limit is None:
            text = path.read_text(encoding="utf-8", errors="replace")
            return (text, 0) if len(text) <= SIZE else None
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = [line[:LINE].rstrip("\n") for line in file]
    except OSError:
        return None
    kept = thin(lines, limit) if path.name in SERIES else lines[-limit:]
    while sum(map(len, kept)) > SIZE:
        kept = thin(kept, len(kept) // 2) if path.name in SERIES else kept[len(kept) // 2 :]
    return "\n".join(kept), len(lines) if len(kept) < len(lines) else 0


def thin(lines: Sequence[str], limit: int) -> List[str]:
    """The heading and at most `limit` rows, evenly over time; the rows of one instant stay together."""
    if len(lines) - 1 <= limit:
        return list(lines)
    instants = list(_instants(lines[0], lines[1:]))
    wanted = max(1, limit * len(instants) // (len(lines) - 1))
    kept = (instants[place * len(instants) // wanted] for place in range(wanted))
    return [lines[0], *itertools.islice(itertools.chain.from_iterable(kept), limit)]


def _instants(heading: str, rows: Sequence[str]) -> Iterator[List[str]]:
    """Rows of one instant: until a GPU comes again. Those without a GPU are each one by themselves."""
    columns = heading.split(",")
    place = columns.index("index") if "index" in columns else None
    instant: Dict[str, str] = {}
    for row in rows:
        gpu = "" if place is None else "".join(row.split(",")[place : place + 1])
        if gpu in instant:
            yield list(instant.values())
            instant = {}
        instant[gpu] = row
    if instant:
        yield list(instant.values())
