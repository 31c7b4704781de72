"""SGLang's command line, release by release: what lab/extract_flags.py read from its parsers, and what was renamed."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kernelswap.backends import ordinal

KNOWLEDGE = Path(__file__).parent / "knowledge" / "sglang"
_NUMBER = re.compile(r"-\d*\.?\d+([eE]-?\d+)?")


@dataclass(frozen=True)
class Flag:
    """One flag as argparse knows it, see lab/extract_flags.py.

    type: int, float, human_readable_int (128k), json, json-or-file or str. words: argparse's nargs; None is one word.
    deprecated: taken with a warning; use: what to write instead; error: why it is not taken any more.
    """

    name: str
    aliases: Sequence[str] = ()
    negations: Sequence[str] = ()
    bare: bool = False
    type: str = "str"
    nargs: int | str | None = None
    choices: Sequence[str | int] = ()
    default: Any = None
    required: bool = False
    deprecated: bool = False
    use: str = ""
    error: str = ""


@dataclass(frozen=True)
class Release:
    """The command line of one SGLang release."""

    version: str
    described: Mapping[str, Mapping[str, Any]]

    @cached_property
    def spellings(self) -> Mapping[str, str]:
        """Every long option without its dashes, and the flag that it stands for."""
        return {
            spelling: name
            for name, flag in self.described.items()
            for spelling in (name, *flag.get("aliases", ()), *flag.get("negations", ()))
            if len(spelling) > 1
        }

    @cached_property
    def _sorted(self) -> Sequence[str]:
        return sorted(self.spellings)

    def flag(self, spelling: str) -> Flag:
        name = self.spellings[spelling]
        return Flag(name, **self.described[name])

    def meant(self, written: str) -> Sequence[str]:
        """The spellings that argparse takes a word for: itself, or else all that begin with it; several are refused."""
        if written in self.spellings:
            return (written,)
        first = bisect_left(self._sorted, written)
        last = bisect_left(self._sorted, written + "\U0010ffff")
        return self._sorted[first:last] if written else ()

    def name(self, written: str) -> str | None:
        """The flag that a word stands for beyond doubt."""
        meant = self.meant(written)
        return self.spellings[meant[0]] if len(meant) == 1 else None


@cache
def versions() -> tuple[str, ...]:
    """The releases whose command line is known, the oldest first."""
    names = (path.stem.removeprefix("flags-") for path in KNOWLEDGE.glob("flags-*.json"))
    return tuple(sorted(names, key=ordinal))


@cache
def release(version: str) -> Release:
    return Release(version, json.loads((KNOWLEDGE / f"flags-{version}.json").read_text())["flags"])


def newest() -> Release:
    return release(versions()[-1])


def nearest_to(version: str) -> Release:
    """The release itself, else the last known one before it, else the first one known."""
    earlier = [known for known in versions() if ordinal(known) <= ordinal(version)]
    return release(version if version in versions() else earlier[-1] if earlier else versions()[0])


def names(written: str) -> Iterator[str]:
    """The flags that a word stands for in any release: the newest first."""
    yield from filter(None, (release(version).name(written) for version in reversed(versions())))


def canonical(written: str) -> str:
    """One name for all spellings of a flag, as far as the newest release knows it."""
    return newest().name(written) or written


def is_flag(word: str) -> bool:
    """Whether argparse takes a word for a flag and not for a value: `-1` and `-0.5` are numbers, and a space before any
    `=` makes it a text."""
    plain = word.partition("=")[0]
    return len(word) > 1 and plain.startswith("-") and " " not in plain and not _NUMBER.fullmatch(word)


def turned_off(written: str) -> bool:
    """Whether a word stands for a flag by its negation: `no-enable-tf32-matmul`."""
    known = newest()
    return any(each in known.described[known.spellings[each]].get("negations", ()) for each in known.meant(written)[:1])


def takers(takes: Callable[[Release], bool]) -> str:
    """The releases that take something, as people say it: `0.5.4 to 0.5.19`; "" if none does."""
    having = [version for version in versions() if takes(release(version))]
    if not having:
        return ""
    return having[0] if len(having) == 1 else f"{having[0]} to {having[-1]}"


@cache
def renames() -> Mapping[str, Sequence[Mapping[str, str]]]:
    """The tables of renames.json, see its `about`."""
    tables: Mapping[str, Sequence[Mapping[str, str]]] = json.loads((KNOWLEDGE / "renames.json").read_text())
    return tables
