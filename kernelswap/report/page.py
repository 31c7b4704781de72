"""The report as one HTML page that needs nothing else: no script, no other file, no network."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kernelswap import __version__
from kernelswap.decide import when
from kernelswap.report import charts, words
from kernelswap.report.charts import Series
from kernelswap.report.data import LATENCIES, OUTPUT, PERCENTILES, Metric, Story

MARK = '<meta name="generator" content="kernelswap report'  # by which a page is known to be ours


def page(story: Story) -> str:
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            story=story,
            report=story.report,
            words=words,
            when=when,
            version=__version__,
            figures=tuple(words.figures(story)),
            drift=tuple(words.drift_rows(story)),
            concurrencies=[
                (mark, list(rows)) for mark, rows in groupby(story.compared, key=lambda row: row.concurrency)
            ],
            charts=tuple(_charts(story)),
            timeline=charts.timeline(story.samples, story.server, story.phases, story.report.started),
            brief=[row for row in story.compared if row.metric.name in words.BRIEF],
            total=max((step.start + step.seconds for step in story.steps), default=0.0) or 1.0,
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("kernelswap.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _charts(story: Story) -> Iterator[Markup]:
    sides = (("known-good", "before"), ("candidate", "after"))
    rate = [_series(story, OUTPUT, name, side, side) for name, side in sides]
    found = [charts.against_concurrency("Output", "tok/s", rate)]
    for title in LATENCIES.values():
        lines = [
            _series(story, Metric(f"{title} {percentile}", "ms"), f"{name} {percentile}", side, f"{side} {percentile}")
            for name, side in sides
            for percentile in PERCENTILES
        ]
        found.append(charts.against_concurrency(title, "ms", lines, width=360))
    yield from filter(None, found)


def _series(story: Story, metric: Metric, name: str, side: str, style: str) -> Series:
    rows = [(row.concurrency, getattr(row, side)) for row in story.compared if row.metric == metric]
    return Series(name, style, {mark: value for mark, value in rows if value is not None})
