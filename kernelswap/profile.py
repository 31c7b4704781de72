"""Models and profiles: YAML files, read strictly, with every fault of every file reported at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Library:
    """The models and profiles of an inventory folder."""

    root: Path


def load_library(root: Path) -> Library:
    """Reads `<root>/models/*.yaml` and `<root>/profiles/*.yaml`. Raises ConfigError with all their faults."""
    raise NotImplementedError
