"""The hosts of a pyinfra inventory, read with pyinfra's own loader.

Importing pyinfra's command line applies gevent's monkey patch to this process, so it is imported inside the function.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelswap.errors import ConfigError, Fault

if TYPE_CHECKING:
    from pyinfra.api.host import Host as PyinfraHost
    from pyinfra.api.inventory import Inventory

DEFAULT_INVENTORY = "inventory/gpu.py"


@dataclass(frozen=True)
class Host:
    """A host's name, its merged data (pyinfra's own keys such as ssh_user included) and its groups."""

    name: str
    data: Mapping[str, Any]
    groups: tuple[str, ...] = ()


def load_inventory(path: str) -> tuple[Host, ...]:
    """The hosts of an inventory file, in its order. Raises ConfigError."""
    return tuple(_host(host) for host in pyinfra_inventory(path))


def _host(host: PyinfraHost) -> Host:
    return Host(host.name, host.data.dict(), tuple(host.groups))  # type: ignore[no-untyped-call]


def pyinfra_inventory(path: str) -> Inventory:
    """The same as pyinfra's own object, for commands that connect. Raises ConfigError."""
    if not Path(path).is_file():
        raise ConfigError([Fault(path, "is not an inventory file", f"name one, e.g. {DEFAULT_INVENTORY}")])
    logging.getLogger("pyinfra").setLevel(logging.ERROR)
    from pyinfra.api.state import State
    from pyinfra.context import ctx_state
    from pyinfra_cli.inventory import make_inventory  # type: ignore[import-untyped]

    try:
        with ctx_state.use(State()):  # the loader notes there which file it executes
            inventory: Inventory = make_inventory(path, cwd=str(Path.cwd()))
    except Exception as error:  # an inventory is Python: anything can come out of it
        reason = getattr(error, "exception", error)
        line = _line(reason, path)
        what = f"fails: {type(reason).__name__}: {reason}"
        raise ConfigError([Fault(f"{path}:{line}" if line else path, what, "correct the inventory")]) from error
    if not len(inventory):
        raise ConfigError([Fault(path, "names no host", f"add a list of hosts, as in {DEFAULT_INVENTORY}")])
    return inventory


def library_folder(inventory: Path | None) -> Path:
    """models/ and profiles/ lie next to the inventory file."""
    return inventory.parent if inventory else Path(DEFAULT_INVENTORY).parent


def _line(error: BaseException, path: str) -> int | None:
    """The inventory's own line that an error came from."""
    if isinstance(error, SyntaxError):
        return error.lineno
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
