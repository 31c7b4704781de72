"""kernelswap check: every fault of the models, the profiles and an inventory."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from kernelswap import rollout_file
from kernelswap.errors import ConfigError, Fault
from kernelswap.host_names import many
from kernelswap.inventory import Host, library_folder, load_inventory
from kernelswap.library import Library, read_library
from kernelswap.router import router_spec
from kernelswap.servers import NEVER, Note, ServerSpec
from kernelswap.spec import host_specs, server_spec


@click.command()
@click.argument("inventory", required=False, type=click.Path(path_type=Path))
@click.option("--library", "root", type=click.Path(path_type=Path), help="Folder of models/ and profiles/.")
@click.option("--json", "as_json", is_flag=True, help="Print the faults as JSON.")
def command(inventory: Path | None, root: Path | None, as_json: bool) -> None:
    """Check models, profiles and an inventory; report every fault at once.

    Exits with 1 if there is a fault; a warning is none. Contacts no host.
    """
    found = check(inventory, root or library_folder(inventory))
    if as_json:
        lists = {"faults": found.faults, "warnings": found.warnings}
        shown = {name: [dataclasses.asdict(item) for item in items] for name, items in lists.items()}
        click.echo(json.dumps(shown, ensure_ascii=False))
    else:
        for item in found.warnings:
            click.echo(f"warning: {item}", err=True)
        for item in found.faults:
            click.echo(str(item), err=True)
        click.echo(many(len(found.faults), "fault") if found.faults else found.summary, err=bool(found.faults))
    sys.exit(1 if found.faults else 0)


@dataclass(frozen=True)
class Found:
    """summary: one line about what was found to be right."""

    faults: tuple[Fault, ...]
    warnings: tuple[Fault, ...] = ()
    summary: str = ""


def check(inventory: Path | None, root: Path) -> Found:
    library, library_faults = read_library(root)
    faults: list[Fault] = list(library_faults)
    specs: list[ServerSpec] = []
    hosts: tuple[Host, ...] = ()
    try:
        hosts = load_inventory(str(inventory)) if inventory else ()
    except ConfigError as error:
        faults += error.faults
    pairs = _pairs(library, faults)
    faults += rollout_file.faults(
        {f"{inventory}: {h.name}": h.data.get("rollout") for h in hosts}, [h.name for h in hosts]
    )
    for host in hosts:
        try:
            router_spec(host.data, f"{inventory}: {host.name}")
        except ConfigError as error:
            faults += error.faults
    if not library_faults:
        for host in hosts:
            try:
                specs += host_specs(library, host.data, f"{inventory}: {host.name}", name=host.name)
            except ConfigError as error:
                faults += error.faults
    notes = [*_pair_notes(pairs), *(note for spec in specs for note in spec.notes)]
    warnings = tuple(dict.fromkeys(note.fault for note in notes if note.blocks == NEVER))
    faults += [note.fault for note in notes if note.blocks != NEVER]
    summary = f"{len(library.models)} models and {len(library.profiles)} profiles are right"
    if inventory:
        summary += f"; {len(hosts)} hosts with {len(specs)} servers"
    if warnings:
        summary += f"; {many(len(warnings), 'warning')}"
    return Found(tuple(dict.fromkeys(faults)), warnings, summary)


def _pairs(library: Library, faults: list[Fault]) -> list[ServerSpec]:
    """Each profile laid over each model, for what only shows then. What others extend need not be complete."""
    specs: list[ServerSpec] = []
    for model in library.models:
        for profile in library.profiles:
            if {f"models/{model}", f"profiles/{profile}"} & library.extended:
                continue
            try:
                specs.append(server_spec(library, "main", model, profile))
            except ConfigError as error:
                faults += error.faults
    return specs


def _pair_notes(pairs: Sequence[ServerSpec]) -> Iterator[Note]:
    """Not every pair is meant: what goes wrong with some models and profiles only is no fault of either."""
    pairs_of = Counter(half for spec in pairs for half in _halves(spec))
    blocked = Counter((half, where) for spec in pairs for where in _blocked(spec) for half in _halves(spec))
    for spec in pairs:
        for note in spec.notes:
            hopeless = any(blocked[half, note.fault.where] == pairs_of[half] for half in _halves(spec))
            if note.combined and note.blocks != NEVER and not hopeless:
                what = f"{note.fault.what} (model `{spec.model}` with profile `{spec.profile}`)"
                yield replace(note, fault=replace(note.fault, what=what), blocks=NEVER)
            else:
                yield note


def _halves(spec: ServerSpec) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("model", spec.model), ("profile", spec.profile)


def _blocked(spec: ServerSpec) -> set[str]:
    return {note.fault.where for note in spec.notes if note.blocks != NEVER}
