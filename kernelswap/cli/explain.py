"""kernelswap explain: why a server failed, from its log."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import BinaryIO

import click

from kernelswap.agent import causes, logs, signatures
from kernelswap.protocol import Cause


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("--json", "as_json", is_flag=True, help="Print the cause as JSON; null if the log shows no failure.")
def command(file: BinaryIO, as_json: bool) -> None:
    """Say why the server failed whose log is FILE (- for standard input), and what to try.

    Any log of SGLang, its journal (also as JSON), docker's, or the kernel's. The last start in it counts. Secrets are
    taken out. The exit code is 0 if the cause is known, 1 if it is not or if there is no failure, 2 if FILE cannot be
    read.
    """
    where = getattr(file, "name", "<stdin>")
    try:
        cause = causes.find(logs.read(file), signatures.load(), where)
    except OSError as error:
        raise click.UsageError(f"{where}: cannot be read: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(cause), "source": source(cause)} if cause else None))
    else:
        click.echo(describe(cause) if cause else f"{where}: no failure in the last start of this log")
    sys.exit(0 if cause and cause.signature != "unknown" else 1)


def describe(cause: Cause) -> str:
    rows = {
        "cause": cause.what,
        "where": f"{cause.where}:{cause.line}",
        "signature": cause.signature,
        "try": cause.todo,
        "again": cause.again,
        "blame": cause.blame,
        "source": source(cause),
    }
    return "\n".join(f"{name + ':':<10} {value}" for name, value in rows.items() if value)


def source(cause: Cause) -> str:
    """Where the failure was reported before."""
    row = signatures.load().signature(cause.signature)
    return row.source if row else ""
