"""kernelswap diff: two servers, flag by flag."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from kernelswap.decide import when
from kernelswap.differences import LIMITS, RESOLVED, Change, Side, compare, of_plan, of_server
from kernelswap.errors import ConfigError, Fault, KernelswapError
from kernelswap.fleet import Seen, instances_of, look_at_releases
from kernelswap.inventory import DEFAULT_INVENTORY, Host, library_folder, load_inventory
from kernelswap.library import Library, load_library
from kernelswap.protocol import Gpu, HostReleases, LiveServer, Releases, unit_name
from kernelswap.render import plan_of
from kernelswap.servers import ServerSpec, needs_pins, pin
from kernelswap.spec import host_specs, server_spec
from kernelswap.wording import nearest

RUNNING, KNOWN_GOOD, PREVIOUS = "running", "known-good", "previous"
HEADINGS = {
    RESOLVED: "resolved only (nobody declared them)",
    LIMITS: "limits (they need no restart)",
}
UNKNOWN = "what SGLang made of its flags is not known"
FORESEEN = "what SGLang makes of its flags is as its preflight foresaw it; it never ran here"


@dataclass(frozen=True)
class Name:
    """What people type. host: None for a profile of the library; what: a profile, a release, or one of the words."""

    text: str
    host: str | None
    what: str


@dataclass(frozen=True)
class Place:
    """Where to look for what a name means. spec: of a profile, as this host would have it."""

    name: Name
    host: Host
    instance: str
    spec: ServerSpec | None = None


@dataclass(frozen=True)
class Found:
    """What a name stands for. note: what is not known of it."""

    label: str
    side: Side
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """model: where the same two profiles are compared for several models."""

    before: Found
    after: Found
    model: str | None = None

    @property
    def changes(self) -> tuple[Change, ...]:
        return compare(self.before.side, self.after.side)


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--model", metavar="NAME", help="Of two profiles: for this model; without it for every model.")
@click.option(
    "--instance", "instances", multiple=True, metavar="NAME", help="Of a host with several; twice: A's and B's."
)
@click.option("--inventory", default=DEFAULT_INVENTORY, show_default=True, help="The inventory file that names hosts.")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
def command(a: str, b: str, model: str | None, instances: tuple[str, ...], inventory: str, as_json: bool) -> None:
    """Compare A and B flag by flag: declared and, in brackets, what SGLang made of it where that is known.

    Each is a PROFILE of the library, or on a host HOST:RELEASE (the beginning of its name is enough), HOST:known-good,
    HOST:previous or HOST:running. Two profiles contact no host. Exits with 0 if nothing differs, 1 if something does, 2
    on trouble.
    """
    names = _name(a), _name(b)
    if model and any(name.host for name in names):
        raise click.UsageError("--model is for two profiles: a host's inventory says which model it serves")
    if len(instances) > 2 or (instances and not any(name.host for name in names)):
        raise click.UsageError("--instance names the instance of a host, once or twice")
    try:
        if any(name.host for name in names):
            found = [_on_hosts(names, instances, inventory)]
        else:
            found = list(_of_profiles(names, load_library(library_folder(Path(inventory))), model))
    except KernelswapError as error:
        raise Trouble(str(error)) from None
    if as_json:
        click.echo(json.dumps([_as_data(each) for each in found], ensure_ascii=False, indent=2))
    else:
        click.echo("\n\n".join(map(_as_text, found)))
    sys.exit(1 if any(each.changes for each in found) else 0)


class Trouble(click.ClickException):
    """As diff has it: 1 is a difference."""

    exit_code = 2


def _name(text: str) -> Name:
    host, mark, what = text.rpartition(":")
    if mark and not (host and what):
        raise click.UsageError(f"{text}: write PROFILE, or HOST:RELEASE, HOST:{KNOWN_GOOD}, HOST:{RUNNING}")
    return Name(text, host or None, what)


def _of_profiles(names: Sequence[Name], library: Library, model: str | None) -> Iterator[Comparison]:
    if model and model not in library.models:
        raise ConfigError([Fault("--model", f"there is no model `{model}`", nearest(model, library.models))])
    for name in names:
        _known_profile(name, library)
    # What others extend need not be complete itself.
    complete = [each for each in library.models if f"models/{each}" not in library.extended]
    for each in [model] if model else complete:
        specs = [server_spec(library, "main", each, name.what, where=f"{name.text} with {each}") for name in names]
        before, after = (Found(name.text, of_plan(plan_of(spec))) for name, spec in zip(names, specs, strict=True))
        yield Comparison(before, after, each)


def _known_profile(name: Name, library: Library) -> None:
    if name.what not in library.profiles:
        todo = f"{nearest(name.what, library.profiles)} (on a host: {name.what}:{RUNNING}, {name.what}:RELEASE)"
        raise ConfigError([Fault(name.text, f"there is no profile `{name.what}`", todo)])


def _on_hosts(names: Sequence[Name], instances: tuple[str, ...], path: str) -> Comparison:
    """At least one of the two is on a host; a profile is laid over what the other's host declares."""
    hosts = {host.name: host for host in load_inventory(path)}
    for name in names:
        if name.host and name.host not in hosts:
            raise ConfigError([Fault(name.text, f"{path} has no host `{name.host}`", nearest(name.host, hosts))])
    home = next(name.host for name in names if name.host)
    places = [
        _place(name, hosts[name.host or home], instance, path)
        for name, instance in zip(names, (instances[:1] or ("",)) + (instances[-1:] or ("",)), strict=True)
    ]
    running = {place.host.name for place in places if place.name.host and place.name.what == RUNNING}
    pinned = {place.host.name for place in places if place.spec and needs_pins(place.spec)}
    told = {seen.host: seen for seen in look_at_releases(path, [p.host.name for p in places], running, pinned)}
    before, after = (_find(place, told[place.host.name]) for place in places)
    return Comparison(before, after)


def _place(name: Name, host: Host, instance: str, path: str) -> Place:
    known = instances_of(host.data)
    if instance and instance not in known:
        what = f"{host.name} has no instance `{instance}`"
        raise ConfigError([Fault("--instance", what, nearest(instance, known))])
    if not instance and len(known) > 1:
        what = f"{host.name} has the instances {', '.join(known)}"
        raise ConfigError([Fault(name.text, what, "choose with --instance NAME")])
    instance = instance or known[0]
    if name.host:
        return Place(name, host, instance)
    library = load_library(library_folder(Path(path)))
    _known_profile(name, library)
    specs = host_specs(library, host.data, f"{path}: {host.name}", name.what)
    return Place(name, host, instance, next(spec for spec in specs if spec.instance == instance))


def _find(place: Place, seen: Seen[HostReleases]) -> Found:
    if seen.state is None:
        raise KernelswapError(f"{seen.host} is unreachable: {seen.problem or 'no answer'}")
    if place.spec:
        return Found(f"{place.name.text} on {seen.host}", of_plan(plan_of(_pinned(place.spec, seen.state.gpus))))
    staged = next(item for item in seen.state.instances if item.instance == place.instance)
    if place.name.what == RUNNING:
        live = server_of(staged, seen.state.servers, instances_of(seen.data), place.name.text)
        return _live(place.name.text, live, staged)
    release = release_of(staged, place.name)
    plan = next(plan for plan in staged.plans if plan.release == release)
    resolved = next((item for item in staged.resolved if item.release == release), None)
    note = "" if resolved and resolved.served else FORESEEN if resolved else UNKNOWN
    label = place.name.text if place.name.what == release else f"{place.name.text} ({release})"
    return Found(label, of_plan(plan, resolved), note)


def _pinned(spec: ServerSpec, gpus: Sequence[Gpu]) -> ServerSpec:
    """GPUs by UUID as a deploy has them, where the host knows them."""
    try:
        return pin(spec, gpus)
    except KeyError:
        return spec


def release_of(staged: Releases, name: Name) -> str:
    """The staged release that a word, a name or the beginning of one means. Raises ConfigError."""
    known = sorted(plan.release for plan in staged.plans)
    words = {KNOWN_GOOD: staged.known_good, PREVIOUS: staged.previous}
    wanted = words.get(name.what, name.what)
    if wanted is None:
        what = "nothing was committed yet" if name.what == KNOWN_GOOD else "there is nothing to go back to"
        raise ConfigError([Fault(name.text, what, f"name a release: {', '.join(known) or 'none is staged'}")])
    found = [wanted] if wanted in known else [release for release in known if release.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError([Fault(name.text, "is the beginning of several releases", f"use one of: {', '.join(found)}")])
    names = {RUNNING, KNOWN_GOOD, PREVIOUS, *known, *(plan.profile for plan in staged.plans)}
    what = f"instance {staged.instance} has no release `{wanted}` that can be read"
    raise ConfigError([Fault(name.text, what, nearest(wanted, names))])


def server_of(staged: Releases, servers: Sequence[LiveServer], instances: Sequence[str], where: str) -> LiveServer:
    """The server of an instance: its unit's, or one outside our units on its port. Raises ConfigError."""
    own = [live for live in servers if live.server.unit == unit_name(staged.instance)]
    ours = {unit_name(instance) for instance in instances}
    others = [live for live in servers if live.server.unit not in ours]
    plan = next((plan for plan in staged.plans if plan.release == staged.known_good), None)
    on_port = [live for live in others if plan and live.server.port == plan.port]
    found = own or on_port or (others if len(instances) == 1 else [])
    if len(found) == 1:
        return found[0]
    if found:
        what = f"several servers run there: {'; '.join(map(_process, found))}"
        raise ConfigError([Fault(where, what, "stop all but one, or compare its launch line by hand")])
    raise ConfigError([Fault(where, "no SGLang server runs there", "see `kernelswap status`")])


def _live(text: str, live: LiveServer, staged: Releases) -> Found:
    plan = next((plan for plan in staged.plans if plan.release == live.release), None)
    note = f"{UNKNOWN}: {live.problem}" if live.problem else ""
    return Found(f"{text} ({_process(live)})", of_server(live, plan), note)


def _process(live: LiveServer) -> str:
    server = live.server
    place = server.container or server.unit or "no unit"
    return f"pid {server.pid} of {server.user}, {place}, since {when(server.started)}"


def _as_text(comparison: Comparison) -> str:
    before, after, changes = comparison.before, comparison.after, comparison.changes
    lines = [f"{before.label} -> {after.label}{f', model {comparison.model}' if comparison.model else ''}"]
    lines += [f"  note: {each.label}: {each.note}" for each in (before, after) if each.note]
    for section, rows in groupby(changes, lambda change: change.section):
        lines += [HEADINGS.get(section, section), *(f"  {row}" for row in rows)]
    return "\n".join(lines if changes else [*lines, "no difference"])


def _as_data(comparison: Comparison) -> dict[str, Any]:
    return {
        "model": comparison.model,
        **{
            name: {"label": found.label, "note": found.note}
            for name, found in (("before", comparison.before), ("after", comparison.after))
        },
        "changes": [dataclasses.asdict(change) for change in comparison.changes],
    }
