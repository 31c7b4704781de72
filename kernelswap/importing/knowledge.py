"""What is known of launch lines, from `knowledge/sglang/import.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kernelswap.importing.words import Source

# Text that can hold a launch line at all.
LAUNCH = re.compile(r"\bsglang(\.launch_server|[\s\"',]+serve|/launch_server\.py)\b|\blaunch_server\.py\b")
MODULES = ("sglang.launch_server", "sglang.srt.entrypoints.http_server")


@dataclass(frozen=True)
class Lint:
    """What is to be said about a thing of a launch line. what is empty where there is nothing to say."""

    what: str = ""
    todo: str = ""
    values: tuple[str, ...] = ()


@cache
def table() -> Mapping[str, Any]:
    text = files("kernelswap").joinpath("knowledge/sglang/import.json").read_text("utf-8")
    return dict(json.loads(text))


def entry(row: Mapping[str, Any]) -> Lint:
    return Lint(row.get("what", ""), row.get("todo", ""), tuple(row.get("values", ())))


def lint(name: str) -> Lint:
    rows = table()["lint"]
    return entry(rows.get(name, rows["other"]))


def killer(text: str) -> str | None:
    """What ends processes by pattern in a command, also within what it hands to a shell or another host."""
    match = re.search(r"(?<![\w.-])(pkill|killall)(?![\w.-])", text)
    return match[1] if match else None


def wrapper(name: str) -> Lint | None:
    row = table()["wrappers"].get(name)
    return None if row is None else entry(row)


def setting(kind: str, name: str) -> Lint:
    """A setting of a `container` or a `unit`."""
    rows = table()[kind]["settings"]
    return entry(rows.get(name, rows["other"]))


def is_setting(variable: str) -> bool:
    """Whether a variable is one that a server reads, rather than a script's own."""
    return re.match(table()["setting"], variable) is not None


def of_profile(flag: str) -> bool:
    """Whether a flag is a choice of kernels, which a profile makes; the rest is the model's."""
    return any(re.fullmatch(pattern, flag) for pattern in table()["profile-flags"])


def variable_of_profile(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in table()["profile-variables"])


def say(source: Source, line: int, thing: str, known: Lint) -> None:
    if known.what:
        source.find(line, f"{thing} {known.what}" if thing else known.what, known.todo)
