"""The report as plain text, and as data for --json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from kernelswap import verdict
from kernelswap.decide import when
from kernelswap.report import words
from kernelswap.report.data import Compared, Story
from kernelswap.table import table


def text(story: Story) -> str:
    """The verdict first; what was not measured is not in it, but for the figures beside the verdict."""
    return "\n\n".join(filter(None, _parts(story))) + "\n"


def _parts(story: Story) -> Iterator[str]:
    report = story.report
    yield f"{words.outcome(story)}: {report.request.release} on {story.host}\n{words.sentence(story)}"
    yield "\n".join(f"{f.label}: {f.value}{f' ({f.note})' if f.note else ''}" for f in words.figures(story))
    yield "\n".join(verdict.details(report))
    headings = ("CONCURRENT", "FIGURE", "KNOWN-GOOD", "SPREAD", "CANDIDATE", "SPREAD", "CHANGE", "")
    yield _table(headings, [_row(row) for row in story.compared])
    for finding in story.findings[:3]:
        yield "\n  ".join([finding.headline, *(f"next: {line}" for line in finding.next)])
    drift = [(row.name, row.value, row.limit, row.noise, row.judged) for row in words.drift_rows(story)]
    yield _table(("DRIFT", "MEASURED", "LIMIT", "NOISE", ""), drift)
    changed = [(change.name, str(change.before), str(change.after), change.section) for change in story.changes]
    yield _table(("DIFFERS", "BEFORE", "AFTER", ""), changed)
    steps = [
        (f"{'< ' if s.back else ''}{s.name}", words.duration(s.seconds), "" if s.ok else "FAILED", s.detail)
        for s in story.steps
    ]
    yield _table(("STEP", "TOOK", "", "WHAT"), steps)
    yield "\n".join(_who(story))


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return table(headings, rows) if rows else ""


def _row(row: Compared) -> tuple[str, ...]:
    sides = (words.UNKNOWN if side is None else words.amount(side.median) for side in (row.before, row.after))
    before, after = sides
    change = "" if row.change is None else f"{row.change:+.1%}"
    name = f"{row.metric.name}, {row.metric.unit}"
    judged = "within the spread" if row.judged == "same" else row.judged
    spreads = words.spread(row.before), words.spread(row.after)
    return str(row.concurrency), name, before, spreads[0], after, spreads[1], change, judged


def _who(story: Story) -> Iterator[str]:
    request = story.report.request
    yield f"why: {request.reason or 'no reason given'}"
    yield f"who: {request.who}, {when(story.report.started)}"
    if request.command:
        yield f"command: {request.command}"
    yield from (f"note: {note}" for note in story.notes)
    yield from (f"cannot be read: {line}" for line in story.unread)
    yield f"evidence: {story.host}:{story.report.evidence}"


def data(story: Story) -> dict[str, Any]:
    """All that the page shows, but the samples behind its curves."""
    known = dataclasses.asdict(story)
    for name in ("samples", "server", "phases"):
        known.pop(name)
    compared = [
        {**values, "change": row.change, "judged": row.judged}
        for values, row in zip(known.pop("compared"), story.compared, strict=True)
    ]
    return {"verdict": words.sentence(story), **known, "compared": compared}
