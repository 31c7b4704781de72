"""Text in columns."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, empty ones left out."""
    kept = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    lines = [[line[i] for i in kept] for line in (headings, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(kept))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
