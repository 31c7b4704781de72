"""The hosts of a pyinfra inventory, read with pyinfra's own loader.

Importing pyinfra's CLI applies gevent's monkey patch, so both imports stay inside the functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyinfra.api.inventory import Inventory


@dataclass(frozen=True)
class Host:
    """A host's name, its merged data (ssh_* keys included) and its groups."""

    name: str
    data: Mapping[str, Any]
    groups: tuple[str, ...] = ()


def load_inventory(path: str) -> tuple[Host, ...]:
    """The hosts of an inventory file, in its order. Raises KernelswapError."""
    raise NotImplementedError


def pyinfra_inventory(path: str) -> Inventory:
    """The same as pyinfra's own object, for commands that connect."""
    raise NotImplementedError
