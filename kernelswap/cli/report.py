"""kernelswap report: one swap on one page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from kernelswap.cli.host import answer_of
from kernelswap.decide import when
from kernelswap.fleet import evidence
from kernelswap.inventory import DEFAULT_INVENTORY
from kernelswap.protocol import Evidence
from kernelswap.report.data import Story, story
from kernelswap.report.page import MARK, page
from kernelswap.report.text import data, text
from kernelswap.table import table


@click.command()
@click.argument("host")
@click.argument("swap", default="")
@click.option("--inventory", default=DEFAULT_INVENTORY, show_default=True, help="The inventory file that names HOST.")
@click.option("--instance", help="Only swaps of this instance of HOST.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page's file.  [default: report-HOST-SWAP.html]",
)
@click.option("--text", "as_text", is_flag=True, help="Print the report as text instead.")
@click.option("--json", "as_json", is_flag=True, help="Print all that the page shows as JSON instead.")
def command(
    host: str, swap: str, inventory: str, instance: str | None, output: Path | None, as_text: bool, as_json: bool
) -> None:
    """Write what happened in a swap on HOST, and what was measured, as one HTML page.

    SWAP is the beginning of a swap's id; without it, the newest that has ended.
    """
    if sum((as_text, as_json, output is not None)) > 1:
        raise click.UsageError("choose one of --output, --text and --json")
    told = find(host, swap, inventory, instance)
    if as_json:
        click.echo(json.dumps(data(told), ensure_ascii=False, indent=2))
    elif as_text:
        click.echo(text(told), nl=False)
    else:
        click.echo(write(output or Path(default_name(told)), page(told)))


def find(host: str, swap: str, inventory: str, instance: str | None) -> Story:
    kept = answer_of(host, inventory, lambda: evidence(inventory, [host], instance, swap))
    if kept.report is None:
        raise click.ClickException(not_one(host, swap, kept))
    return story(host, kept)


def not_one(host: str, swap: str, kept: Evidence) -> str:
    """Why there is no single swap to report, and which there are."""
    runs = [request for request in kept.unfinished if request.swap.startswith(swap)]
    if runs and not any(report.request.swap.startswith(swap) for report in kept.swaps):
        again = runs[0].command or "the same command"
        return f"swap {runs[0].swap} to {runs[0].release} has not ended: `{again}` follows it"
    if not kept.swaps:
        return f"{host} remembers no swap"
    rows = [(r.request.swap, r.request.instance, when(r.ended), r.outcome, r.request.release) for r in kept.swaps]
    what = "begins the id of none or of several of its swaps" if swap else "names no swap"
    return f"{host}: `{swap}` {what}; name one of\n{table(('SWAP', 'INSTANCE', 'ENDED', 'RESULT', 'RELEASE'), rows)}"


def default_name(told: Story) -> str:
    return "report-" + re.sub(r"[^\w.-]+", "_", f"{told.host}-{told.report.request.swap}") + ".html"


def write(path: Path, html: str) -> Path:
    """Never over a file that is no report."""
    try:
        if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:400]:
            raise click.ClickException(f"{path} is there and is no report: name another file with --output")
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None
    return path
