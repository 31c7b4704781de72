"""kernelswap status: what the hosts serve."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from kernelswap.agent import gpus
from kernelswap.decide import when
from kernelswap.errors import KernelswapError
from kernelswap.fleet import Seen, instances_of, look
from kernelswap.inventory import DEFAULT_INVENTORY
from kernelswap.protocol import HostState, InstanceState, Plan
from kernelswap.table import table

HEADINGS = ("HOST", "INSTANCE", "RELEASE", "SINCE", "STATE", "GPU MEMORY", "SWAP")


@dataclass(frozen=True)
class Row:
    """One instance, or a host that could not be read. ok: it serves what was committed and answers."""

    cells: tuple[str, ...]
    ok: bool


@click.command()
@click.argument("inventory", default=DEFAULT_INVENTORY)
@click.option("--limit", multiple=True, metavar="HOST", help="Only these hosts or groups; may be given again.")
@click.option("--drift", "drifted", is_flag=True, help="Say where hosts differ from what was declared and committed.")
@click.option("--json", "as_json", is_flag=True, help="Print all that is known, as JSON.")
def command(inventory: str, limit: tuple[str, ...], drifted: bool, as_json: bool) -> None:
    """Show what the hosts of INVENTORY serve. Exits with 1 if something is not as it should be.

    With --drift: in what they are not as the inventory declares and as it was committed, once for all hosts that have
    the same. Exits with 1 on drift, 2 where a host or a part of it could not be looked at, else 0.

    Reads only; a host that does not answer is listed with the reason.
    """
    if drifted:
        _drift(inventory, limit, as_json)
    try:
        seen = look(inventory, limit, health=True, gpus=True)
    except KernelswapError as error:
        raise click.ClickException(str(error)) from None
    rows = [row for host in seen for row in rows_of(host)]
    if as_json:
        click.echo(json.dumps([as_data(host) for host in seen], ensure_ascii=False, indent=2))
    else:
        click.echo(table(HEADINGS, [row.cells for row in rows]))
    sys.exit(0 if all(row.ok for row in rows) else 1)


def _drift(inventory: str, limit: tuple[str, ...], as_json: bool) -> NoReturn:
    from kernelswap.cli import drift  # it reads people's files, which the plain status does without

    try:
        found = drift.look(inventory, limit)
    except KernelswapError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    click.echo(drift.as_json(found) if as_json else drift.as_text(found))
    sys.exit(found.exit_code)


def rows_of(seen: Seen[HostState]) -> Iterator[Row]:
    if seen.state is None:
        yield Row((seen.host, "", "", "", f"unreachable: {seen.problem or 'no answer'}", "", ""), ok=False)
        return
    for name in instances_of(seen.data):
        known = next((item for item in seen.state.instances if item.instance == name), InstanceState(name))
        problem = problem_of(known)
        cells = (
            seen.host,
            name,
            known.known_good or "none",
            when(known.unit_since) if known.unit_since else "",
            problem or ("swapping" if known.running else "ok"),
            gpu_memory(seen.state, known.plan),
            swap_text(known),
        )
        yield Row(cells, ok=not problem)


def problem_of(known: InstanceState) -> str:
    """What is wrong with an instance; "" if it serves its committed release and answers, or a swap is at it."""
    if known.running:
        return "" if known.running.active else f"a swap was cut short at {known.running.step}"
    if known.known_good is None:
        return "nothing committed"
    if known.unit_state != "active":
        return f"unit is {known.unit_state}"
    if known.health != "ok":
        return known.health or "health unknown"
    if not known.unit_intact:
        return "unit is not as it was committed"
    return ""


def gpu_memory(state: HostState, plan: Plan | None) -> str:
    if state.gpu_error:
        return state.gpu_error
    mine = gpus.assigned(state.gpus, plan.gpus if plan else ())
    used, total = sum(gpu.memory_used or 0 for gpu in mine), sum(gpu.memory_total or 0 for gpu in mine)
    memory = [f"{used / 1024:.1f}/{total / 1024:.0f} GiB"] if total else []
    return "; ".join(memory + [f"{gpus.label(gpu)}: {gpu.error}" for gpu in mine if gpu.error])


def swap_text(known: InstanceState) -> str:
    """The swap that runs, or how the last one ended if that was no success."""
    if known.running:
        request = known.running.request
        return f"{request.action} to {request.release} by {request.who}, at {known.running.step}"
    last = known.history[-1] if known.history else None
    if last is None or last.outcome == "committed":
        return ""
    return f"last: {last.request.release} {last.outcome} {when(last.ended)}"


def as_data(seen: Seen[HostState]) -> dict[str, Any]:
    """For --json. The host's key is for nobody's eyes."""
    state = dataclasses.asdict(seen.state) if seen.state else None
    if state:
        state.pop("key")
    rows = list(rows_of(seen))
    problem = "; ".join(row.cells[4] for row in rows if not row.ok)
    return {"host": seen.host, "ok": all(row.ok for row in rows), "problem": problem, "state": state}
