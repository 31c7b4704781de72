"""kernelswap import: an existing launch line as a model and a profile."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TextIO

import click

from kernelswap.errors import Fault
from kernelswap.importing import Imported, Refused, Wishes, read
from kernelswap.library import NAME


def _name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not NAME.fullmatch(value):
        raise click.BadParameter("use lower-case letters, digits, dots, dashes and underscores")
    return value


def _variables(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    if wrong := [item for item in value if "=" not in item]:
        raise click.BadParameter(f"{wrong[0]!r} is not NAME=VALUE")
    return {name: text for name, _, text in (item.partition("=") for item in value)}


def _absolute(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.startswith("/"):
        raise click.BadParameter("is not an absolute path; name the model's folder on the host")
    return value


@click.command()
@click.argument("file", type=click.File(encoding="utf-8-sig"))
@click.option("--model", callback=_name, help="Name of the model's file; after what is served by default.")
@click.option("--profile", callback=_name, help="Name of the profile's file; after its kernels by default.")
@click.option("--path", callback=_absolute, help="The model's folder on the host, whatever the line says.")
@click.option(
    "--set",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_variables,
    help="A variable that the text uses and does not set.",
)
@click.option("--line", type=int, help="Which launch line, if there are several: the line where it begins.")
@click.option(
    "--library", type=click.Path(path_type=Path), help="Write the files below this folder; they must not exist."
)
@click.option("--json", "as_json", is_flag=True, help="Print the files and the findings as JSON.")
def command(
    file: TextIO,
    model: str | None,
    profile: str | None,
    path: str | None,
    variables: dict[str, str],
    line: int | None,
    library: Path | None,
    as_json: bool,
) -> None:
    """Turn the launch line in FILE (- for standard input) into a model and a profile.

    A shell line or script, a systemd unit, `docker run` or a Compose file. Prints both files, or writes them below
    --library, and on standard error what cannot come along. Runs nothing. The exit code is 0 if it was imported, 1 if
    it was refused.
    """
    name = Path(getattr(file, "name", "<stdin>")).name
    try:
        text = file.read()
    except (OSError, UnicodeDecodeError):
        raise click.UsageError(f"{name}: is not a text that can be read") from None
    try:
        imported = read(text, name, Wishes(model, profile, path, line, variables))
    except Refused as refused:
        _refuse(refused, as_json)
        sys.exit(1)
    files = {
        f"models/{imported.model}.yaml": imported.model_text,
        f"profiles/{imported.profile}.yaml": imported.profile_text,
    }
    if library is not None:
        _write(library, files)
    if as_json:
        click.echo(json.dumps(_as_json(imported, files), ensure_ascii=False))
        return
    if library is None:
        click.echo("---\n".join(files.values()), nl=False)
    else:
        click.echo("\n".join(str(library / each) for each in files))
    for finding in imported.findings:
        click.echo(str(finding), err=True)


def _refuse(refused: Refused, as_json: bool) -> None:
    if as_json:
        click.echo(
            json.dumps({"faults": _rows(refused.faults), "findings": _rows(refused.findings)}, ensure_ascii=False)
        )
        return
    for fault in (*refused.findings, *refused.faults):
        click.echo(str(fault), err=True)
    click.echo("not imported", err=True)


def _write(library: Path, files: dict[str, str]) -> None:
    """All of them or none."""
    if there := [library / each for each in files if (library / each).exists()]:
        for path in there:
            click.echo(str(Fault(str(path), "exists already", "choose other names: --model, --profile")), err=True)
        sys.exit(1)
    written: list[Path] = []
    try:
        for path, text in ((library / each, text) for each, text in files.items()):
            path.parent.mkdir(parents=True, exist_ok=True)
            written.append(path)
            path.write_text(text, "utf-8")
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        todo = "see its permissions and the disk, or choose another --library"
        click.echo(str(Fault(str(error.filename or library), error.strerror or str(error), todo)), err=True)
        sys.exit(1)


def _rows(faults: tuple[Fault, ...]) -> list[dict[str, str]]:
    return [dataclasses.asdict(fault) for fault in faults]


def _as_json(imported: Imported, files: dict[str, str]) -> dict[str, object]:
    return {"model": imported.model, "profile": imported.profile, "files": files, "findings": _rows(imported.findings)}
