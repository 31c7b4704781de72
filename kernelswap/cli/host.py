"""A question to one host of an inventory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import click

from kernelswap.errors import KernelswapError
from kernelswap.fleet import Seen

T = TypeVar("T")


def answer_of(host: str, inventory: str, ask: Callable[[], Iterable[Seen[T]]]) -> T:
    """What it says. Raises ClickException where it is no host of the inventory, or cannot be read."""
    try:
        (seen,) = (item for item in ask() if item.host == host)
    except ValueError:
        raise click.ClickException(f"{host} is no host of {inventory}, see `kernelswap status`") from None
    except KernelswapError as error:
        raise click.ClickException(str(error)) from None
    if seen.state is None:
        raise click.ClickException(f"{host} is unreachable: {seen.problem or 'no answer'}")
    return seen.state
