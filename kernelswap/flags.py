"""SGLang's flags: the one place where a `flags:` map becomes words of a command line."""

from __future__ import annotations

from typing import TypeAlias

FlagValue: TypeAlias = "bool | int | float | str | list[FlagValue] | dict[str, FlagValue] | None"
