"""Look at the hosts of an inventory, all at once, through the same fact as a deploy. Changes nothing on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kernelswap.errors import ConfigError, Fault
from kernelswap.inventory import pyinfra_inventory
from kernelswap.protocol import Evidence, HostDrift, HostReleases, HostState
from kernelswap.servers import DEFAULT_INSTANCE, is_router_only

if TYPE_CHECKING:
    from pyinfra.api.config import Config
    from pyinfra.api.host import Host
    from pyinfra.api.inventory import Inventory

DRIFT_PATIENCE = 180  # seconds for one host that looks for drift
PATIENCE = 90  # seconds for one host; a server's health alone may take 30
T = TypeVar("T")


@dataclass(frozen=True)
class Seen(Generic[T]):
    """One host and what was asked of it. state is None where it could not be read, and problem then says why."""

    host: str
    data: Mapping[str, Any]
    state: T | None
    problem: str = ""


def look(path: str, limit: Sequence[str] = (), health: bool = False, gpus: bool = False) -> tuple[Seen[HostState], ...]:
    """What every host of an inventory file says, in its order. Raises ConfigError for the inventory's own faults."""

    def read(host: Host) -> HostState | None:
        from kernelswap.facts import host_state

        return host_state.read(host, instances_of(data_of(host)), [], health, gpus, PATIENCE)

    return _each(path, limit, read)


def look_at_releases(
    path: str, hosts: Sequence[str], running: Collection[str], gpus: Collection[str]
) -> tuple[Seen[HostReleases], ...]:
    """What is staged on these hosts and, where asked for, what runs there and their GPUs. Raises ConfigError."""

    def read(host: Host) -> HostReleases | None:
        from kernelswap.facts import host_releases

        instances = instances_of(data_of(host))
        return host_releases.read(host, instances, host.name in running, host.name in gpus, PATIENCE)

    return _each(path, hosts, read)


def look_for_drift(
    path: str, limit: Sequence[str], users: Mapping[str, Collection[str]]
) -> tuple[Seen[HostDrift], ...]:
    """In what every host is not as it should be, as it can see that itself. users: of each host's servers.

    Raises ConfigError.
    """

    def read(host: Host) -> HostDrift | None:
        from kernelswap.facts import host_drift

        return host_drift.read(host, instances_of(data_of(host)), users.get(host.name, ()), DRIFT_PATIENCE)

    return _each(path, limit, read)


def evidence(
    path: str, limit: Sequence[str], instance: str | None = None, swap: str = ""
) -> tuple[Seen[Evidence], ...]:
    """What hosts have kept of the swap whose id begins with `swap`; "": of the newest. Raises ConfigError."""

    def read(host: Host) -> Evidence | None:
        from kernelswap.facts import swap_evidence

        instances = [instance] if instance else instances_of(data_of(host))
        return swap_evidence.read(host, instances, swap, PATIENCE)

    return _each(path, limit, read)


def _each(path: str, limit: Sequence[str], read: Callable[[Host], T | None]) -> tuple[Seen[T], ...]:
    from gevent import monkey  # type: ignore[import-untyped]

    monkey.patch_all()
    from pyinfra.api.connect import connect_all, disconnect_all
    from pyinfra.api.exceptions import PyinfraError
    from pyinfra.api.state import State, StateStage
    from pyinfra.context import ctx_config, ctx_host, ctx_state

    inventory = pyinfra_inventory(path)
    hosts = _limited(inventory, limit)
    complaints = _Complaints()
    config = _config()
    state = State(inventory, config, initial_limit=hosts)
    states: dict[str, T | None] = {}

    def visit(host: Host) -> None:
        # PyinfraError is raised when the last host fails.
        with ctx_state.use(state), ctx_config.use(config), ctx_host.use(host), suppress(PyinfraError):
            states[host.name] = read(host)

    with ctx_state.use(state), ctx_config.use(config):
        with suppress(PyinfraError):  # no host could be reached
            state.set_stage(StateStage.Connect)
            connect_all(state)
        state.set_stage(StateStage.Prepare)
        for greenlet in [state.pool.spawn(visit, host) for host in hosts if host.connected]:
            greenlet.get()
        disconnect_all(state)
    return tuple(Seen(h.name, data_of(h), states.get(h.name), complaints.about(h.name)) for h in hosts)


def instances_of(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a host's instances."""
    if is_router_only(data):
        return ()
    return tuple(map(str, data.get("instances") or (DEFAULT_INSTANCE,)))


def is_chosen(name: str, groups: Collection[str], limit: Sequence[str]) -> bool:
    """Whether --limit leaves a host, as pyinfra's own does; an empty one leaves all."""
    return not limit or any(pattern in groups or fnmatch(name, pattern) for pattern in limit)


def _limited(inventory: Inventory, limit: Sequence[str]) -> list[Host]:
    chosen = [host for host in inventory if is_chosen(host.name, host.groups, limit)]
    if not chosen:
        what = f"no host is called {', '.join(limit)}"
        raise ConfigError([Fault("--limit", what, f"choose from {', '.join(sorted(h.name for h in inventory))}")])
    return chosen


def _config() -> Config:
    """As pyinfra's command does, take settings from config.py in the working directory."""
    from pyinfra.api.config import Config
    from pyinfra.api.state import State
    from pyinfra.context import ctx_config, ctx_state
    from pyinfra_cli.util import exec_file  # type: ignore[import-untyped]

    config = Config()  # type: ignore[no-untyped-call]
    if Path("config.py").is_file():
        with ctx_state.use(State()), ctx_config.use(config):
            exec_file("config.py")
    return config


def data_of(host: Host) -> dict[str, Any]:
    data: dict[str, Any] = host.data.dict()  # type: ignore[no-untyped-call]
    return data


class _Complaints(logging.Handler):
    """What pyinfra logs as errors, by host: it has no other way of telling why a host could not be read."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[tuple[str, str]] = []
        logger = logging.getLogger("pyinfra")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        before, mark, text = record.getMessage().partition("] ")
        host, text = (before.strip().removeprefix("["), text) if mark else ("", before)
        self.note(host, text.strip())

    def note(self, host: str, text: str) -> None:
        self.lines.append((host, text))

    def about(self, host: str) -> str:
        """The last line that the host or the connection said; pyinfra's own summary comes after it."""
        own = [text for name, text in self.lines if name == host and text and not text.startswith("Error: ")]
        return own[-1] if own else ""
