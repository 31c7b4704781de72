"""From a ServerSpec to a Release: the texts that go to the host, and their digest. Pure, except for reading secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernelswap.protocol import Plan
from kernelswap.spec import ServerSpec


class Hidden:
    """A text that no repr, log or diff shows."""

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "<hidden>"


@dataclass(frozen=True)
class Release:
    """A server rendered for a host. files: name -> text of the release's public files; secrets: `secrets.yaml`."""

    name: str
    plan: Plan
    files: Mapping[str, str] = field(default_factory=dict)
    secrets: Hidden | None = None


def resolve_secrets(spec: ServerSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The values of the spec's secrets, by flag name, read on the controller. Raises ConfigError for missing ones."""
    raise NotImplementedError


def render(spec: ServerSpec, secrets: Mapping[str, str], key: str, templates: Path) -> Release:
    """The release of a server. key: the host's random key, see KEY_PATH; needed only where there are secrets."""
    raise NotImplementedError
