"""Why a server failed: the first real error in its log, matched against the table of known failures."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import List, Optional, Pattern, Sequence, Tuple

from kernelswap.agent import knowledge
from kernelswap.protocol import Cause


@dataclass(frozen=True)
class Signature:
    """One known failure: a pattern over one log line and what it means. source: where it was reported."""

    id: str
    pattern: Pattern[str]
    todo: str
    blame: str
    source: str


@dataclass(frozen=True)
class Table:
    """All that we know of SGLang's log. secondary: lines that only follow from an earlier error."""

    signatures: Tuple[Signature, ...]
    secondary: Tuple[Pattern[str], ...]
    progress: Tuple[Pattern[str], ...]


@cache
def load() -> Table:
    """The table of knowledge/crash_signatures.json."""
    data = json.loads(knowledge.read("crash_signatures.json"))
    return Table(
        signatures=tuple(
            Signature(row["id"], re.compile(row["pattern"]), row["todo"], row["blame"], row["source"])
            for row in data["signatures"]
        ),
        secondary=tuple(re.compile(pattern) for pattern in data["secondary"]),
        progress=tuple(re.compile(row["pattern"]) for row in data["progress"]),
    )


# The last line of a Python traceback, or a line that a logger marked as an error.
GENERIC = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception)\b(?::|$)|\berror: |^\[?\S* ?\S*\]? ?(?:ERROR|FATAL)\b")


def find(lines: Sequence[str], table: Table, where: str) -> Optional[Cause]:
    """The earliest real error of any rank; None if the log shows none."""
    unknown = None
    for line in lines:
        text = line.strip()
        if any(pattern.search(text) for pattern in table.secondary):
            continue
        for signature in table.signatures:
            if signature.pattern.search(text):
                return Cause(_short(text), where, signature.todo, signature.id, signature.blame)
        if unknown is None and GENERIC.search(text):
            unknown = text
    if unknown is None:
        return None
    return Cause(
        _short(unknown), where, "read the log; this failure is not in the table of known ones", blame="release"
    )


def progress(lines: Sequence[str], table: Table) -> List[str]:
    """The lines that show a start advancing: weights, JIT sessions, graph capture."""
    return [line.strip() for line in lines if any(pattern.search(line) for pattern in table.progress)]


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."
