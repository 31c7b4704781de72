"""kernelswap render: the unit and the command line of a server, before anything is done with them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from kernelswap.errors import KernelswapError
from kernelswap.inventory import DEFAULT_INVENTORY, library_folder, load_inventory
from kernelswap.library import load_library
from kernelswap.protocol import unit_name
from kernelswap.render import Release, preview
from kernelswap.servers import ServerSpec
from kernelswap.spec import host_specs, server_spec
from kernelswap.wording import nearest


@click.command()
@click.argument("host", required=False)
@click.option("--inventory", type=click.Path(path_type=Path), default=Path(DEFAULT_INVENTORY), show_default=True)
@click.option("--model", help="Without HOST: the model to render.")
@click.option("--profile", help="The profile to render; with HOST, instead of the inventory's.")
@click.option("--templates", type=click.Path(path_type=Path), default=Path("templates"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print units, command lines and environments as JSON.")
def command(
    host: str | None, inventory: Path, model: str | None, profile: str | None, templates: Path, as_json: bool
) -> None:
    """Show the unit and the command line of a server.

    Give a HOST of the inventory, or --model and --profile. Secrets are not read. Contacts no host.
    """
    if (host is None) == (model is None) or (host is None and profile is None):
        raise click.UsageError("give HOST, or --model and --profile")
    try:
        releases = [preview(spec, templates) for spec in _specs(host, inventory, model, profile)]
    except KernelswapError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps([_as_json(release) for release in releases], ensure_ascii=False, indent=2))
    else:
        click.echo("\n".join(map(_as_text, releases)), nl=False)


def _specs(host: str | None, inventory: Path, model: str | None, profile: str | None) -> Sequence[ServerSpec]:
    library = load_library(library_folder(inventory))
    if model is not None:
        return [server_spec(library, "main", model, profile or "", where="command line")]
    hosts = {each.name: each for each in load_inventory(str(inventory))}
    if host not in hosts:
        raise KernelswapError(f"{inventory}: there is no host `{host}`; {nearest(str(host), hosts)}")
    return host_specs(library, hosts[str(host)].data, f"{inventory}: {host}", profile, str(host))


def _as_json(release: Release) -> dict[str, object]:
    plan = release.plan
    return {
        "instance": plan.instance,
        "model": plan.model,
        "profile": plan.profile,
        "release": release.name,
        "argv": [plan.python, *plan.argv],
        "environment": plan.environment,
        "secrets": list(plan.secret_flags),
        "unit": release.files[unit_name(plan.instance)],
    }


def _as_text(release: Release) -> str:
    plan = release.plan
    secrets = f"# secrets: {', '.join(plan.secret_flags)}\n" if plan.secret_flags else ""
    return (
        f"# {unit_name(plan.instance)}, release {release.name}\n{secrets}"
        f"# {shlex.join([plan.python, *plan.argv])}\n{release.files[unit_name(plan.instance)]}"
    )
