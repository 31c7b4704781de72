"""kernelswap check: every fault of the models, the profiles and an inventory."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

from kernelswap.errors import ConfigError, Fault
from kernelswap.inventory import Host, load_inventory
from kernelswap.profile import Library, load_library
from kernelswap.spec import host_specs, server_spec


@click.command()
@click.argument("inventory", required=False, type=click.Path(path_type=Path))
@click.option("--library", "root", type=click.Path(path_type=Path), help="Folder of models/ and profiles/.")
@click.option("--json", "as_json", is_flag=True, help="Print the faults as JSON.")
def command(inventory: Path | None, root: Path | None, as_json: bool) -> None:
    """Check models, profiles and an inventory; report every fault at once.

    Exits with 1 if there is a fault. Contacts no host.
    """
    faults, summary = check(inventory, root or library_folder(inventory))
    if as_json:
        click.echo(json.dumps({"faults": [dataclasses.asdict(fault) for fault in faults]}, ensure_ascii=False))
    else:
        for fault in faults:
            click.echo(str(fault), err=True)
        click.echo(f"{len(faults)} fault{'s' * (len(faults) != 1)}" if faults else summary, err=bool(faults))
    sys.exit(1 if faults else 0)


def library_folder(inventory: Path | None) -> Path:
    """models/ and profiles/ lie next to the inventory file."""
    return inventory.parent if inventory else Path("inventory")


def check(inventory: Path | None, root: Path) -> tuple[tuple[Fault, ...], str]:
    """All faults, and one line about what was found to be right."""
    faults: list[Fault] = []
    library: Library | None = None
    hosts: tuple[Host, ...] = ()
    try:
        library = load_library(root)
        faults += _pair_faults(library)
    except ConfigError as error:
        faults += error.faults
    try:
        hosts = load_inventory(str(inventory)) if inventory else ()
    except ConfigError as error:
        faults += error.faults
    if library is None:
        return tuple(faults), ""
    servers = 0
    for host in hosts:
        try:
            servers += len(host_specs(library, host.data, f"{inventory}: {host.name}"))
        except ConfigError as error:
            faults += error.faults
    summary = f"{len(library.models)} models and {len(library.profiles)} profiles are right"
    if inventory:
        summary += f"; {len(hosts)} hosts with {servers} servers"
    return tuple(dict.fromkeys(faults)), summary


def _pair_faults(library: Library) -> list[Fault]:
    """Faults that only show when a profile is laid over a model. What others extend need not be complete itself."""
    faults: list[Fault] = []
    for model in library.models:
        for profile in library.profiles:
            if {f"models/{model}", f"profiles/{profile}"} & library.extended:
                continue
            try:
                server_spec(library, "main", model, profile)
            except ConfigError as error:
                faults += error.faults
    return faults
