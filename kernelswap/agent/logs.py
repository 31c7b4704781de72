"""Reads a server's log in whatever wrapping it comes: plain, the journal's, Docker's, Ray's, the kernel's."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import BinaryIO, Iterator, Tuple

LIMIT = 1 << 16  # bytes; of a longer line the beginning and the end are kept


@dataclass(frozen=True)
class Line:
    """One line without its wrapping.

    number: 1-based, in the input. source: the process or container that wrote it, "" if unknown. rank: `TP3`, `rank3`
    or "". logged: a logger wrote it, not print() or a traceback. level: as the line itself names it.
    """

    number: int
    source: str
    rank: str
    logged: bool
    level: str
    text: str


_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_LEVELS = "DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL"
_DATE = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?"
_CTIME = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}"
# What writes a program's lines down again, each in its own way; one may stand in another.
_WRAPPINGS = tuple(
    re.compile(pattern)
    for pattern in (
        # the journal, syslog
        r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|\d{9,}\.\d+"
        rf"|(?:[A-Z][a-z]{{2}} )?{_DATE}(?: ?[+-]\d\d:?\d\d|Z| [A-Z]{{3,5}})?)"
        r" [\w.-]+ (?P<source>[^\s\[\]:]+\[\d+\]|kernel|systemd): ?(?P<text>.*)",
        # dmesg
        rf"(?:<\d+>)?(?P<source>)\[(?:{_CTIME}|[ \d]{{5,}}\.\d{{6}})\] ?(?P<text>.*)",
        # Kubernetes, docker logs -t, CI; Google's and Kibana's exports
        rf"(?P<source>)(?:[A-Z]+ )?{_DATE}(?:Z|[+-]\d\d:\d\d) (?:(?:stdout|stderr) [FP] )?(?P<text>.*)",
        r"(?P<source>)[A-Z][a-z]{2} \d+, \d{4} @ \d\d:\d\d:\d\d\.\d+ +(?P<text>.*)",
        # docker compose, kubectl --prefix
        rf"(?P<source>(?!(?:{_LEVELS}) )[A-Za-z][\w.-]*) +\| ?(?P<text>.*)",
        r"(?P<source>\[pod/[^\]]+\]) (?P<text>.*)",
        # Ray, mpirun, srun --label
        r"(?P<source>\((?:[\w.:]+ )?(?:rank=\d+ )?pid=\d+[^)]*\)) ?"
        r"(?P<text>.*?)(?: \[repeated \d+x across cluster\])?$",
        rf"(?:{_CTIME})?(?P<source>\[\d+,\d+\])<std(?:out|err)>: ?(?P<text>.*)",
        r"(?P<source>\d+): (?P<text>.*)",
        # a program that starts SGLang and logs each of its lines again, at a level of its own
        rf"(?P<source>){_DATE} - (?:[\w.]+ - )?(?:INFO|DEBUG) - (?P<text>(?:\[{_DATE}|(?:ERROR|WARNING) ).*)",
        rf"(?P<source>){_DATE} \| [A-Z]+ \| std(?:out|err) \| ?(?P<text>.*)",
        # a quotation
        r"(?P<source>)> (?P<text>.*)",
    )
)
_LOGGED = re.compile(rf"\[(?:{_DATE}|(?:\d\d-\d\d )?\d\d:\d\d:\d\d)([^\]]*)\] ?(.*)")
_RANK = re.compile(r"\[(rank\d+)\]: ?(.*)")
_LEVEL = re.compile(
    rf"(?:{_DATE} ?(?:-|\|)? ?)?({_LEVELS})(?::\s+|\s*\|\s*|\s+(?:- )?)"
    r"(?:\d\d-\d\d \d\d:\d\d:\d\d )?(?:\[[\w./]+:\d+\] ?)?(.*)"
)
_NAMED_LEVEL = re.compile(rf"{_DATE} - (?:[\w.]+ - )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) - (.*)")
_GLOG = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] ?(.*)")
_GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "FATAL"}
_WARNING = re.compile(r"\S+\.py:\d+: \w*Warning: ")
# Where a second log line begins in the middle of one: after a progress bar, or when two processes wrote at once.
_GLUED = re.compile(rf"(?<=[^\s])(?=\[{_DATE}[^\]]*\] )|(?<=it/s\])(?=Traceback )|(?<=s/it\])(?=Traceback )")


def read(stream: BinaryIO) -> Iterator[str]:
    """The lines of a file of any size, in memory that does not grow with it."""
    while True:
        line = stream.readline(LIMIT)
        if not line:
            return
        tail = line
        while len(tail) == LIMIT and not tail.endswith(b"\n"):
            tail = stream.readline(LIMIT)
        text = line if tail is line else line + b"\r" + tail
        yield text.decode("utf-8", "replace")


def parse(number: int, raw: str) -> Iterator[Line]:
    """What one line of the input says; more than one if it is a progress bar, JSON, or two lines glued together."""
    raw = raw.rstrip("\n")
    source = ""
    if raw.startswith("{"):
        source, raw = _from_json(raw)
    if "\x1b" in raw:
        raw = _ANSI.sub("", raw)
    for piece in re.split(r"[\r\n]+", raw):
        for text in _GLUED.split(piece):
            if text.strip():
                yield _unwrap(number, source, text.rstrip())


def _from_json(raw: str) -> Tuple[str, str]:
    """Who wrote it and what, of a line of `journalctl -o json` or of Docker's json-file; ("", the line) of others."""
    try:
        entry = json.loads(raw)
    except ValueError:
        return "", raw
    if "log" in entry and isinstance(entry["log"], str):
        return "", entry["log"]
    message = entry.get("MESSAGE", entry.get("message"))
    if isinstance(message, list):  # the journal gives text that is not plain as its bytes
        message = bytes(byte for byte in message if isinstance(byte, int) and 0 <= byte < 256).decode(
            "utf-8", "replace"
        )
    if not isinstance(message, str):
        return "", raw
    return f"{entry.get('SYSLOG_IDENTIFIER', '')}[{entry.get('_PID', '')}]", message


def _unwrap(number: int, source: str, text: str) -> Line:
    while match := next(filter(None, (wrapping.match(text) for wrapping in _WRAPPINGS)), None):
        source, text = match["source"] or source, match["text"]
    rank, level, logged = "", "", False
    match = _RANK.match(text)
    if match:
        rank, text = match[1], match[2]
    match = _LOGGED.match(text)
    if match:
        logged, rank, text = True, " ".join(match[1].split()) or rank, match[2]
    match = _NAMED_LEVEL.match(text) or _LEVEL.match(text) or _GLOG.match(text)
    if match:
        logged, level, text = True, _GLOG_LEVELS.get(match[1], match[1]), match[2]
    elif _WARNING.match(text):
        level = "WARNING"
    return Line(number, source, rank, logged, level, text)
