"""kernelswap status --drift: in what hosts are not as the inventory has them; once for all that have the same."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelswap.config_drift import findings, grouped
from kernelswap.errors import ConfigError, Fault
from kernelswap.fleet import is_chosen, look_for_drift
from kernelswap.host_names import shortened
from kernelswap.inventory import library_folder, load_inventory
from kernelswap.library import load_library
from kernelswap.protocol import Finding
from kernelswap.servers import ServerSpec
from kernelswap.spec import host_specs


@dataclass(frozen=True)
class Drift:
    """Every host with its findings; looked: where all of them looked for other ways to a server."""

    hosts: Mapping[str, Sequence[Finding]]
    looked: Mapping[str, Sequence[str]]

    @property
    def exit_code(self) -> int:
        """1 with drift, else 2 where something could not be told, else 0."""
        found = [finding for each in self.hosts.values() for finding in each]
        return 1 if any(not finding.unknown for finding in found) else 2 if found else 0


def look(inventory: str, limit: Sequence[str], templates: Path = Path("templates")) -> Drift:
    """Raises ConfigError for what people wrote, before any host is asked."""
    specs = declared(inventory, limit)
    seen = look_for_drift(inventory, limit, {host: {spec.user for spec in each} for host, each in specs.items()})
    return Drift(
        {host.host: findings(host, specs[host.host], templates, os.environ) for host in seen},
        {host.host: host.state.looked for host in seen if host.state},
    )


def declared(inventory: str, limit: Sequence[str]) -> dict[str, tuple[ServerSpec, ...]]:
    """The servers of every host that is looked at. Raises ConfigError with the faults of all."""
    library = load_library(library_folder(Path(inventory)))
    specs: dict[str, tuple[ServerSpec, ...]] = {}
    faults: list[Fault] = []
    for host in load_inventory(inventory):
        if not is_chosen(host.name, host.groups, limit):
            continue
        try:
            specs[host.name] = host_specs(library, host.data, f"{inventory}: {host.name}", name=host.name)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return specs


def as_text(drift: Drift) -> str:
    groups = grouped(drift.hosts)
    sound = [host for host, found in drift.hosts.items() if not found]
    lines = [line for group in groups for line in _lines(shortened(group.hosts), group.finding)]
    if sound:
        lines.append(f"{shortened(sound)}: as declared and as committed")
    for places, hosts in _looked(drift).items():
        lines += ["", f"looked on {shortened(hosts)} for other ways to a server: {'; '.join(places)}"]
    return "\n".join(lines)


def _lines(hosts: str, finding: Finding) -> Iterator[str]:
    instance = f"instance {finding.instance}: " if finding.instance else ""
    yield f"{hosts}: {'unknown: ' if finding.unknown else ''}{finding.kind}: {instance}{finding.where}"
    yield f"    expected: {finding.expected}"
    yield f"    found: {finding.found}"
    if finding.detail:
        yield f"    detail: {finding.detail}"
    yield f"    do: {finding.todo}"


def _looked(drift: Drift) -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for host, places in drift.looked.items():
        found.setdefault(tuple(places), []).append(host)
    return found


def as_json(drift: Drift) -> str:
    told = [
        {
            "host": host,
            "ok": not found,
            "drift": sum(not finding.unknown for finding in found),
            "unknown": sum(finding.unknown for finding in found),
            "findings": [dataclasses.asdict(finding) for finding in found],
            "looked": list(drift.looked.get(host, ())),
        }
        for host, found in drift.hosts.items()
    ]
    return json.dumps(told, ensure_ascii=False, indent=2)
