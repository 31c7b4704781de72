"""Faults in what people wrote, reported all at once and each with its way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Fault:
    """One thing wrong with an input.

    where: `file:line: key` as far as known, e.g. `inventory/profiles/trtllm.yaml:12: flags/tp-size`.
    what: the fault, in lower case, without a full stop.
    todo: what to do about it.
    """

    where: str
    what: str
    todo: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.todo}"


class KernelswapError(Exception):
    """Raised for everything that the user can act on; its text is what the user reads."""


class ConfigError(KernelswapError):
    """All the faults that were found in the inventory, models and profiles."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(dict.fromkeys(faults))
        super().__init__("\n".join(map(str, self.faults)))
