"""What is known of SGLang's log: failures with their remedies, and what marks a start, a stop, life and progress.

All of it is data: knowledge/crash_signatures.json.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Dict, Iterable, Optional, Pattern, Tuple

from kernelswap.agent import knowledge

_PATTERNS = ("start", "stop", "ready", "alive", "secondary", "died", "innocent", "handled", "uncaught")


@dataclass(frozen=True)
class Signature:
    """One known failure: a pattern over one log line and what it means. source: where it was reported.

    retry: the same release may work on a second try as it is. alone: a line that matches this says it all, wherever it
    stands; otherwise the pattern counts in an exception. within: it counts only below a traceback with such a line.
    weak: often follows from another failure, which then wins. fatal: the server will not come up even if it does not
    exit. memory: whether `more` or `less` of it for the static pool is the advice.
    """

    id: str
    pattern: Pattern[str]
    todo: str
    blame: str
    source: str
    retry: bool = False
    alone: Optional[Pattern[str]] = None
    within: Optional[Pattern[str]] = None
    weak: bool = False
    fatal: bool = False
    memory: str = ""


@dataclass(frozen=True)
class Table:
    """All that we know of SGLang's log. Earlier signatures win over later ones within one failure.

    secondary: what only follows from an earlier error. died: so does this, and the server has died. innocent: what is
    no failure. handled: what introduces a traceback that the server survives. uncaught: what introduces, or begins,
    one that it does not. For speed: worth_reading: words of which a line that matters has at least one; boring: words
    of the lines that a healthy server writes by the million.
    """

    signatures: Tuple[Signature, ...]
    squeeze: Signature
    alone: Pattern[str]
    progress: Tuple[Pattern[str], ...]
    start: Pattern[str]
    stop: Pattern[str]
    ready: Pattern[str]
    alive: Pattern[str]
    secondary: Pattern[str]
    died: Pattern[str]
    innocent: Pattern[str]
    handled: Pattern[str]
    uncaught: Pattern[str]
    worth_reading: Tuple[str, ...]
    boring: Tuple[str, ...]

    def signature(self, name: str) -> Optional[Signature]:
        return next((row for row in (*self.signatures, self.squeeze) if row.id == name), None)

    def is_fatal(self, name: str) -> bool:
        row = self.signature(name)
        return row is not None and row.fatal


@cache
def load() -> Table:
    """The table of knowledge/crash_signatures.json."""
    data = json.loads(knowledge.read("crash_signatures.json"))
    rows = [_signature(row) for row in (*data["signatures"], data["squeeze"])]
    fields: Dict[str, Any] = {name: _one_of(row["pattern"] for row in data[name]) for name in _PATTERNS}
    fields.update({name: tuple(data[name]) for name in ("worth_reading", "boring")})
    alone = _one_of(row.alone.pattern for row in rows if row.alone)
    progress = tuple(re.compile(row["pattern"]) for row in data["progress"])
    return Table(tuple(rows[:-1]), rows[-1], alone, progress, **fields)


def _one_of(patterns: Iterable[str]) -> Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _signature(row: Dict[str, Any]) -> Signature:
    alone = row["pattern"] if row.get("alone") is True else row.get("alone")
    patterns = {"pattern": row["pattern"], "alone": alone, "within": row.get("within")}
    compiled = {name: re.compile(pattern) if pattern else None for name, pattern in patterns.items()}
    return Signature(**{**row, **compiled})
