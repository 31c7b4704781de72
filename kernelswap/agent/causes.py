"""Why a server failed: the earliest real error of the last start in its log, matched against the table of known ones.

A failure is certain if the process could not live on (an uncaught exception, a line that says so, the kernel, systemd).
What else looks like an error counts until the server goes on. Lines that only follow from another error never win.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Sequence, Set, Tuple

from kernelswap.agent import logs
from kernelswap.agent.logs import Line
from kernelswap.agent.redaction import redact
from kernelswap.agent.signatures import Signature, Table
from kernelswap.protocol import Cause

QUOTE = 300  # characters of the log that a cause quotes
BODY = 80  # lines of an exception's message that are read
MOST = 1000  # failures that are looked at; the earliest wins
REACH = 500  # lines within which a traceback must come to its exception


_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = re.compile(r"(?:During handling of|The) (?:the )?above exception")
# An exception where one is due, and one that stands alone.
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|\w*error)(?::(?:\s|$)|$)")
_LONE = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|OutOfResources|Timeout|KeyboardInterrupt)(?::(?:\s|$)|$)"
)
_CODE = re.compile(r"File \".*\", line \d+|raise |assert ")  # also of a traceback that has lost its indents
_MUTE = re.compile(r"[\w.]+")  # an exception without a message
_QUIET = ("DEBUG", "INFO", "WARNING", "WARN")


@dataclass
class _Failure:
    """One failure as the log tells it: the exceptions of a chain, root first, with their messages.

    waiting: its next exception has not been read yet. depth: how much more than a guess it is: 2 an exception, 1 a line
    of its own that matches a signature, 0 a line that only says ERROR. code: what the traceback shows.
    """

    certain: bool = False
    handled: bool = False
    waiting: bool = False
    chained: bool = False
    depth: int = 2
    begin: Tuple[int, str] = (0, "")
    exceptions: List[Tuple[int, str]] = field(default_factory=list)
    lines: List[Tuple[int, str]] = field(default_factory=list)
    code: List[str] = field(default_factory=list)

    def add(self, line: Line, exception: bool) -> None:
        text = line.text.strip()
        if exception and _MUTE.fullmatch(text) and self.code:
            text = f"{text} ({self.code[-1]})"
        if len(self.lines) < BODY or exception:
            self.lines.append((line.number, text))
        if exception:
            self.exceptions.append(self.lines[-1])
            self.waiting = self.chained = False


@dataclass(frozen=True)
class _Verdict:
    """What one failure comes to. grade: 0 a cause, 1 often only a consequence, 2 nothing but a consequence."""

    number: int
    text: str
    signature: Optional[Signature]
    grade: int
    certain: bool
    depth: int


class _Story:
    """What the log has told so far of its last start."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.memory: Set[str] = set()  # the advice that earlier starts came to
        self.begin()

    def begin(self) -> None:
        self.failures: List[_Failure] = []
        self.open: Dict[Tuple[str, str], _Failure] = {}  # (source, rank) -> the failure that its next lines belong to
        self.stopped = self.ready = self.dead = self.unsure = False
        self.before = (0, "")

    def read(self, line: Line) -> None:
        table, text = self.table, line.text.strip()
        if table.start.search(text) and not line.rank:
            found = self.best()
            if found and found.signature:
                self.memory.add(found.signature.memory)
            self.begin()
        elif not self.stopped and table.stop.search(text):
            self.stopped = True
            self.failures = [failure for failure in self.failures if failure.exceptions]
        elif not self.stopped and (self._due(line, text) or not table.innocent.search(text)):
            self._read(line, text)
        elif self.unsure and table.alive.search(text):
            self.alive()
        self.ready = self.ready or bool(table.ready.search(text))
        self.before = (line.number, text)
        if self.open:  # a log line ends the message of an exception, but not a traceback that others' lines interrupt
            ends = line.logged and not _indented(line)
            self.open = {
                key: failure
                for key, failure in self.open.items()
                if line.number - failure.begin[0] < REACH and (failure.waiting or key[0] != line.source or not ends)
            }

    def _due(self, line: Line, text: str) -> bool:
        """Whether this is the exception that a certain failure waits for: whatever it says, it is the failure."""
        current = self.open.get(_key(line))
        return bool(current and current.certain and current.waiting and _EXCEPTION.match(text) and not _indented(line))

    def alive(self) -> None:
        """The server goes on: what was not certain was no failure."""
        self.failures = [failure for failure in self.failures if failure.certain]
        self.unsure = False

    def _read(self, line: Line, text: str) -> None:
        key = _key(line)
        current = self.open.get(key)
        if line.level not in _QUIET and self.table.alone.search(text):
            failure = self._append(line, certain=True)
            if not line.logged:
                self.open[key] = failure
            self.dead = True
        elif _TRACEBACK in text:
            self._traceback(line, text, key, current)
        elif _CHAINED.match(text):
            if current:
                current.chained = True
        elif current and current.waiting and _EXCEPTION.match(text) and not _indented(line):
            current.add(line, exception=True)
        elif current and current.waiting and (_indented(line) or _CODE.match(text)):
            self._code(text, current)
        elif current and not line.logged and not _LONE.match(line.text):
            current.add(line, exception=False)
        elif line.level not in _QUIET:
            self._single(line, text, key, current)
        elif self.unsure and self.table.alive.search(text):
            self.alive()
        if self.table.died.search(text):
            self.dead = True
            if not self.failures:
                self._append(line, certain=True)

    def _traceback(self, line: Line, text: str, key: Tuple[str, str], current: Optional[_Failure]) -> None:
        header = text.split(_TRACEBACK)[0].strip()
        if not header and current and current.chained:
            current.waiting = True
            return
        if not header and line.number - self.before[0] <= 2:
            header = self.before[1]
        certain = line.rank.startswith("rank") or bool(self.table.uncaught.search(header))
        handled = not certain and bool(self.table.handled.search(header))
        failure = _Failure(certain=certain, handled=handled, waiting=True, begin=(line.number, text))
        self._keep(failure)
        # Its next lines may come with the same prefix, or bare.
        self.open[key] = self.open[line.source, ""] = failure

    def _code(self, text: str, failure: _Failure) -> None:
        if text.strip("^~ ") and len(failure.code) < REACH:
            failure.code.append(text)
        if self.table.uncaught.search(text):
            failure.certain, failure.handled = True, False

    def _single(self, line: Line, text: str, key: Tuple[str, str], current: Optional[_Failure]) -> None:
        """A line outside a traceback, or the exception of one that was mixed with another's."""
        if self.unsure and self.table.alive.search(text):
            self.alive()
        elif len(self.failures) >= MOST or _CODE.match(text):
            return
        elif _LONE.match(text) and not _indented(line):
            waiting = next((f for f in reversed(self.failures) if f.waiting), None)
            if waiting:
                waiting.add(line, exception=True)
                self.open[key] = waiting
            else:
                certain = line.rank.startswith("rank") or bool(current and current.certain and not line.logged)
                self.open[key] = self._append(line, certain)
        elif any(row.pattern.search(text) for row in self.table.signatures if not row.within):
            self._append(line, certain=False, depth=1)
        elif line.level in ("ERROR", "CRITICAL", "FATAL"):
            self._append(line, certain=False, depth=0)

    def _append(self, line: Line, certain: bool, depth: int = 2) -> _Failure:
        failure = _Failure(certain=certain, depth=depth, begin=(line.number, line.text.strip()))
        failure.add(line, exception=True)
        self._keep(failure)
        return failure

    def _keep(self, failure: _Failure) -> None:
        if len(self.failures) < MOST:
            self.failures.append(failure)
            self.unsure = self.unsure or not failure.certain

    def best(self) -> Optional[_Verdict]:
        """The failure that explains this start."""
        found = [
            self._judge(failure)
            for failure in self.failures
            if (failure.exceptions or failure.certain) and not failure.handled
        ]
        found.sort(key=lambda verdict: verdict.number)
        causes = [verdict for verdict in found if verdict.grade == 0]
        first = next((v for v in causes if v.certain), None) or next((v for v in causes if v.depth == 2), None)
        if first is None or first.signature is None:
            # What a line said before an exception that we do not know may explain it.
            hints = [
                v for v in causes if v.signature and (v.number < first.number if first else self.dead or not self.ready)
            ]
            first = next(iter(hints), first)
        for grade, depth in ((1, 1), (0, 0), (2, 2)):
            first = first or next((v for v in found if v.grade == grade and v.depth >= depth), None)
        return first

    def _follows(self, text: str) -> bool:
        return bool(self.table.secondary.search(text) or self.table.died.search(text))

    def _judge(self, failure: _Failure) -> _Verdict:
        lines = failure.lines or [failure.begin]
        own = [line for line in lines if not self._follows(line[1])]
        known = [
            (index, number, text, row)
            for number, text in lines
            for index, row in enumerate(self.table.signatures)
            if row.pattern.search(text) and (row.alone or (number, text) in own) and _is_within(failure, row)
        ]
        root = next((exception for exception in failure.exceptions if exception in own), None)
        if len(failure.exceptions) > 1 and all(row.weak for *_, row in known):
            known = [match for match in known if root == (match[1], match[2])]
        if known:
            _, number, text, row = min(known, key=lambda match: (match[3].weak, match[0], match[1]))
            return _Verdict(number, text, row, int(row.weak), failure.certain, failure.depth)
        number, text = root or next(iter(failure.exceptions), failure.begin)
        return _Verdict(number, text, None, 0 if root else 2, failure.certain, failure.depth)


def _is_within(failure: _Failure, row: Signature) -> bool:
    return row.within is None or any(row.within.search(code) for code in failure.code)


def _worth_reading(raw: str, table: Table) -> bool:
    if _has(raw, table.boring) and "rror" not in raw and "raceback" not in raw:
        return False
    return _has(raw, table.worth_reading)


def _has(text: str, words: Sequence[str]) -> bool:
    for word in words:  # noqa: SIM110 - runs for every line, and any() takes twice as long
        if word in text:
            return True
    return False


def _key(line: Line) -> Tuple[str, str]:
    return line.source, line.rank


def _indented(line: Line) -> bool:
    return line.text.startswith((" ", "\t"))


def find(lines: Iterable[str], table: Table, where: str) -> Optional[Cause]:
    """The earliest real error of any rank in the last start of the log; None if it shows none. Secrets are out."""
    story = _Story(table)
    for number, raw in enumerate(lines, 1):
        if story.open or _worth_reading(raw, table):
            for line in logs.parse(number, raw):
                story.read(line)
        elif story.unsure and table.alive.search(raw):
            story.alive()
    found = story.best()
    if found is None:
        return None
    row = found.signature
    what = _quote(found.text, row)
    if row is None:
        todo = f"this failure is not in the table of known ones: read the log from line {found.number} on"
        return Cause(what, where, todo, blame="release", line=found.number)
    if row.memory and story.memory | {row.memory} >= {"more", "less"}:
        row = table.squeeze
    return Cause(what, where, row.todo, row.id, row.blame, row.retry, found.number)


def _quote(text: str, row: Optional[Signature]) -> str:
    """The text without secrets, of a long one the part that was recognised."""
    what = redact(text)
    match = row.pattern.search(what) if row else None
    if match and match.end() > QUOTE:
        what = f"...{what[match.start() :]}"
    return what if len(what) <= QUOTE else what[: QUOTE - 3] + "..."


class Watch:
    """A starting server's log, looked at again and again. doom: why no server will come up, once that is sure."""

    def __init__(self, table: Table, where: str) -> None:
        self.doom: Optional[Cause] = None
        self._table = table
        self._where = where
        self._read = 0  # lines
        self._said: Set[Tuple[str, int, Tuple[Optional[str], ...]]] = set()
        self._suspect: Optional[Cause] = None

    def advanced(self, lines: Sequence[str]) -> bool:
        """Whether the log, given whole, shows progress since the last look; saying the same again is none.

        An error after which servers do not come up even if they do not exit dooms the start if the log has not
        advanced by the look after.
        """
        before = len(self._said)
        for raw in lines[self._read :]:
            for line in logs.parse(0, raw):
                for index, pattern in enumerate(self._table.progress):
                    match = pattern.search(line.text)
                    if match:
                        self._said.add((line.rank, index, match.groups()))
                        break
        self._read = len(lines)
        if len(self._said) > before:
            self._suspect = None
            return True
        found = find(lines, self._table, self._where)
        fatal = found if found and self._table.is_fatal(found.signature) else None
        self.doom = fatal if fatal == self._suspect else None
        self._suspect = fatal
        return False
