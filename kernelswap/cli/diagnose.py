"""kernelswap diagnose: what limits a server, from samples of its GPUs."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import click

from kernelswap import traces
from kernelswap.diagnosis import Finding, diagnose
from kernelswap.errors import Fault
from kernelswap.loads import apart
from kernelswap.measured import METRICS_FILE
from kernelswap.traces import Trace, Unreadable

CONTROLS = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # what a terminal would obey
FILE = click.Path(allow_dash=True, path_type=Path)


@click.command()
@click.argument("gpus", metavar="GPU.CSV", type=FILE)
@click.argument("bench", metavar="[BENCH.JSONL]", type=FILE, required=False)
@click.option(
    "--metrics", type=FILE, help="SGLang's counters, as a swap samples them; else metrics.csv beside GPU.CSV."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(gpus: Path, bench: Path | None, metrics: Path | None, as_json: bool) -> None:
    """Say what limits a server whose GPUs were sampled into GPU.CSV, by which figures, and what to try.

    GPU.CSV is a swap's gpu.csv, or what `nvidia-smi --query-gpu=... --format=csv -lms 500` prints; - is standard input.
    BENCH.JSONL is what SGLang's benchmark wrote meanwhile. It tells a hang from work, and slow work from good. The
    exit code is 0 if something was found, 1 if too little is known, 2 if a file cannot be read.
    """
    faults: list[Fault] = []
    if (times := [str(path) for path in (gpus, bench, metrics)].count("-")) > 1:
        faults.append(Fault("-", f"standard input is named {times} times", "name all but one as files"))
    trace = _read(gpus, traces.read_gpus, faults)
    runs = _read(bench, traces.read_bench, faults) if bench else Trace()
    counted = _read(metrics, traces.read_server, faults) if metrics else None
    for fault in faults:
        click.echo(str(fault), err=True)
    if faults:
        sys.exit(2)
    said = counted or _beside(gpus, trace)
    findings = diagnose(trace.samples, runs.runs, said.server)
    notes = [*trace.notes, *(f"{bench}: {note}" for note in runs.notes), *said.notes]
    if apart(trace.samples, said.server):
        notes.append("SGLang's counters are of another day than the samples and are left out")
    if not runs.runs:
        none = f"nothing in {bench}" if bench else "no BENCH.JSONL"
        notes.append(f"{none}: whether tokens came, and how many, is not known")
    if as_json:
        found = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"findings": found, "notes": notes}, ensure_ascii=False, indent=2))
    else:
        click.echo("\n\n".join(map(describe, findings)))
        if notes:
            click.echo("\n" + "\n".join(f"note: {note}" for note in notes))
    sys.exit(0 if findings[0].name != "unknown" else 1)


def _beside(gpus: Path, trace: Trace) -> Trace:
    """The server's counters where nobody has named a file of them: those beside the samples, else those among them."""
    path = gpus.parent / METRICS_FILE
    if str(gpus) == "-" or not path.is_file():
        return Trace(server=trace.server)
    faults: list[Fault] = []
    found = _read(path, traces.read_server, faults)
    return (
        Trace(server=trace.server, notes=tuple(f"{f.where} is left out: {f.what}" for f in faults)) if faults else found
    )


def _read(path: Path, reader: Callable[[str], Trace], faults: list[Fault]) -> Trace:
    try:
        with click.open_file(str(path), "rb") as file:
            data: bytes = file.read()
        # PowerShell's redirection writes UTF-16.
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", "replace")
        if "\0" in text:
            raise Unreadable("is no text", "save it as CSV or JSON lines in UTF-8")
        return reader(CONTROLS.sub("\ufffd", text))
    except Unreadable as error:
        faults.append(Fault(str(path), error.what, error.todo))
    except OSError as error:
        faults.append(Fault(str(path), f"cannot be read: {error.strerror}", "correct its path or its permissions"))
    except (OverflowError, csv.Error) as error:
        faults.append(Fault(str(path), f"has a cell that nothing can be made of: {error}", "sample again"))
    return Trace()


def describe(finding: Finding) -> str:
    """One finding, its name first."""
    rows = [(finding.name, finding.headline), ("phase", finding.phase)]
    rows.append(("evidence", "; ".join(map(str, finding.evidence))))
    rows += [("next" if not number else "", line) for number, line in enumerate(finding.next)]
    rows += [("or" if not number else "", line) for number, line in enumerate(finding.alternatives)]
    rows.append(("source", finding.source))
    return "\n".join(f"{name:<16} {text}" for name, text in rows if text)
