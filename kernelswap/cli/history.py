"""kernelswap history: the swaps that a host remembers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import click

from kernelswap import verdict
from kernelswap.cli.host import answer_of
from kernelswap.decide import when
from kernelswap.fleet import look
from kernelswap.inventory import DEFAULT_INVENTORY
from kernelswap.protocol import HostState, Report
from kernelswap.table import table

HEADINGS = ("ENDED", "INSTANCE", "RESULT", "RELEASE", "BEFORE", "SECONDS", "WHO", "WHY")


@click.command()
@click.argument("host")
@click.option("--inventory", default=DEFAULT_INVENTORY, show_default=True, help="The inventory file that names HOST.")
@click.option("--json", "as_json", is_flag=True, help="Print the reports as JSON.")
def command(host: str, inventory: str, as_json: bool) -> None:
    """Show who swapped what on HOST and why, how it ended and what was measured; the oldest first."""
    reports = reports_of(answer_of(host, inventory, lambda: look(inventory, [host])))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(report) for report in reports], ensure_ascii=False, indent=2))
    elif reports:
        click.echo(describe(reports))
    else:
        click.echo(f"{host} remembers no swap")


def reports_of(state: HostState) -> list[Report]:
    return sorted((r for instance in state.instances for r in instance.history), key=lambda report: report.ended)


def describe(reports: list[Report]) -> str:
    """The table, and below each swap its measurements, its notes, and why it failed."""
    head, *lines = table(HEADINGS, [_cells(report) for report in reports]).split("\n")
    text = [head]
    for line, report in zip(lines, reports, strict=True):
        text += [line, *(f"    {note}" for note in _notes(report))]
    return "\n".join(text)


def _cells(report: Report) -> tuple[str, ...]:
    request = report.request
    result = f"{report.outcome} (rollback)" if request.action == "rollback" else report.outcome
    seconds = f"{report.ended - report.started:.1f}"
    before = report.previous or ""
    return when(report.ended), request.instance, result, request.release, before, seconds, request.who, request.reason


def _notes(report: Report) -> Iterator[str]:
    for step in report.steps:
        if step.numbers:
            yield f"{step.name}: " + ", ".join(f"{name} {value:g}" for name, value in sorted(step.numbers.items()))
    yield from (f"note: {note}" for note in report.notes)
    if report.cause:
        yield verdict.headline(report)
        yield from verdict.details(report)
