"""What SGLang would say to the flags and the environment of a server, as far as that is known without SGLang."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from kernelswap import backends, sglang
from kernelswap.backends import ordinal
from kernelswap.flags import FlagValue, text, words
from kernelswap.sglang import Flag, Release


@dataclass(frozen=True)
class Opinion:
    """loc: a place below the server, e.g. ("flags", "tp-size"). refused: SGLang ends on it, else it is worth knowing.
    combined: it is right in itself, and goes wrong together with something else."""

    loc: tuple[str | int, ...]
    what: str
    todo: str
    refused: bool
    combined: bool = False


def opinions(
    flags: Mapping[str, FlagValue], environment: Mapping[str, str], version: str, architectures: Sequence[str] = ()
) -> Iterator[Opinion]:
    """version: SGLang's; "" is the newest that is known; one that is not known is taken for the last one before it."""
    release = sglang.nearest_to(version) if version else sglang.newest()
    written = {name: value for name, value in flags.items() if value is not None and value is not False}
    named: dict[str, str] = {}
    for name, value in written.items():
        yield from _opinions_of_flag(release, name, value)
        named.setdefault(release.name(name) or name, name)
    for name in environment:
        yield from _opinions_of_variable(release, name)
    plain = {flag: " ".join(words(written[name])) or text(not sglang.turned_off(name)) for flag, name in named.items()}
    for architecture in architectures or ("",):
        for advice in backends.advice(plain, environment, architecture, "", version or release.version):
            kind, name = advice.place
            refused = advice.severity == backends.REFUSE
            yield Opinion((kind, named.get(name, name)), advice.what, advice.todo, refused, combined=True)


def _opinions_of_flag(release: Release, name: str, value: FlagValue) -> Iterator[Opinion]:
    loc = ("flags", name)
    meant = release.meant(name)
    if fork := _fork(name, None):
        yield Opinion(loc, f"is known from {fork} only", "keep it if that is what the host has", refused=False)
    elif not meant:
        yield Opinion(
            loc, f"SGLang {release.version} has no such flag{_elsewhere(name)}", _instead(release, name), True
        )
    elif len(meant) > 1:
        todo = _successor(release, name) or f"write one of: {', '.join(meant)}"
        yield Opinion(loc, f"is ambiguous: SGLang {release.version} has {_some(meant)}", todo, refused=True)
    else:
        flag = release.flag(meant[0])
        if meant[0] != name:
            todo = f"write `{meant[0]}`: other releases may have more flags that begin so"
            yield Opinion(loc, f"is short for `{meant[0]}`", todo, refused=False)
        if flag.error:
            yield Opinion(loc, f"SGLang {release.version} refuses it", flag.error, refused=True)
        elif flag.deprecated:
            todo = _successor(release, flag.name) or "remove it"
            yield Opinion(loc, f"is deprecated in SGLang {release.version}", todo, refused=False)
        yield from _opinions_of_value(release, flag, loc, value)


def _opinions_of_value(release: Release, flag: Flag, loc: tuple[str, str], value: FlagValue) -> Iterator[Opinion]:
    given = words(value)
    if flag.bare:
        if value is not True:
            off = text(value).lower() in ("false", "0", "no", "off")
            yield Opinion(loc, "is a bare flag, which takes no value", f"write {'false' if off else 'true'}", True)
    elif value is True:
        if flag.nargs not in ("?", "*"):
            yield Opinion(loc, "needs a value", f"write {_wanted(flag)}", refused=True)
    elif not _fits(flag.nargs, len(given)):
        todo = "write it as JSON, in quotes" if flag.type.startswith("json") else f"write {_wanted(flag)}"
        count = "one value" if flag.nargs in (None, "?") else f"{flag.nargs} values"
        yield Opinion(loc, f"takes {count}, and {len(given)} are given", todo, refused=True)
    else:
        for index, word in enumerate(given):
            place = (*loc, index) if isinstance(value, list) else loc
            yield from _opinions_of_word(release, flag, place, word)


def _opinions_of_word(release: Release, flag: Flag, loc: tuple[str | int, ...], word: str) -> Iterator[Opinion]:
    if fork := _fork(flag.name, word):
        yield Opinion(loc, f"`{word}` is known from {fork} only", "keep it if that is what the host has", refused=False)
    elif not TYPES[flag.type][0](word):
        yield Opinion(loc, f"`{_cut(word)}` is not {TYPES[flag.type][1]}", f"write {_wanted(flag)}", refused=True)
    elif not _chosen(flag, word):
        what = f"SGLang {release.version} has no choice `{_cut(word)}` here{_elsewhere(flag.name, word)}"
        todo = (
            _successor(release, flag.name, word)
            or _foreign(flag.name, word)
            or _nearest(word, [str(choice) for choice in flag.choices])
        )
        choices = f"it takes {', '.join(map(str, flag.choices))}"
        yield Opinion(loc, what, f"{todo}; {choices}" if todo else choices, refused=True)
    elif row := _renamed(release, flag.name, word):
        todo = f"write `{row['renamed_to']}`"
        yield Opinion(loc, f"`{word}` is an old name in SGLang {release.version}", todo, refused=False)


def _opinions_of_variable(release: Release, name: str) -> Iterator[Opinion]:
    for row in sglang.renames()["renames"]:
        pattern = row.get("environment", "")
        if not fnmatchcase(name, pattern) or ordinal(release.version) < ordinal(row["since"]):
            continue
        what = "has no effect" if row["action"] == "gone" else "is an old name"
        new = row.get("renamed_to", "")
        new = name.replace(pattern[:-1], new[:-1], 1) if pattern.endswith("*") else new
        todo = f"write `{new}`" + ("" if new.isupper() else " under `flags`") if new else "remove it"
        yield Opinion(("environment", name), f"{what} in SGLang {release.version}", todo, refused=False)
        return


def _is_json(word: str) -> bool:
    try:
        json.loads(word)
    except ValueError:
        return False
    return True


def _converts(kind: type[int] | type[float]) -> Callable[[str], bool]:
    def check(word: str) -> bool:
        try:
            kind(word)
        except ValueError:
            return False
        return True

    return check


def _is_readable_int(word: str) -> bool:
    return _converts(int)(word) or bool(re.fullmatch(r"[0-9]+(\.[0-9]+)?[kMGT]|[0-9]+[KMGT]i", word.strip()))


# Which words a type takes, and what it is called.
TYPES: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "str": (lambda word: True, "text"),
    "int": (_converts(int), "a whole number"),
    "float": (_converts(float), "a number"),
    "human_readable_int": (_is_readable_int, "a whole number, such as 4096 or 128k"),
    "json": (_is_json, "JSON"),
    "json-object": (lambda word: _is_json(word) and isinstance(json.loads(word), dict), "a JSON object"),
    "json-text": (lambda word: not word or _is_json(word), "JSON"),
    "json-or-file": (lambda word: not word.lstrip().startswith(("{", "[")) or _is_json(word), "JSON"),
}


def _fits(nargs: int | str | None, count: int) -> bool:
    if isinstance(nargs, int):
        return count == nargs
    return count >= 1 if nargs in ("+", "*") else count == 1


def _wanted(flag: Flag) -> str:
    several = flag.nargs in ("+", "*")
    if flag.choices:
        return f"{'some' if several else 'one'} of: {', '.join(map(str, flag.choices))}"
    return "a list, each item " + TYPES[flag.type][1] if several else TYPES[flag.type][1]


def _chosen(flag: Flag, word: str) -> bool:
    if not flag.choices:
        return True
    return (int(word) if flag.type == "int" else word) in flag.choices


def _rows(flag: str, value: str | None) -> Iterator[Mapping[str, str]]:
    """What was renamed or removed, the newest first."""
    for row in reversed(sglang.renames()["renames"]):
        if row.get("flag") == flag and row.get("value") == value:
            yield row


def _renamed(release: Release, flag: str, value: str) -> Mapping[str, str] | None:
    rows = (row for row in _rows(flag, value) if row["action"] != "gone")
    return next((row for row in rows if ordinal(row["since"]) <= ordinal(release.version)), None)


def _successor(release: Release, flag: str, value: str | None = None) -> str:
    """What to write instead in this release, "" if nothing is known."""
    for row in _rows(flag, value):
        new = row.get("renamed_to", "")
        if value is not None and new and new in release.flag(flag).choices:
            return f"write `{new}`"
        if value is None and new and new.split(":")[0] in release.spellings:
            return f"write `{new}`"
    return ""


def _instead(release: Release, name: str) -> str:
    """What to do about a flag that a release does not have."""
    if todo := _successor(release, name):
        return todo
    older = (row["flag"] for row in sglang.renames()["renames"] if row.get("renamed_to", "").split(":")[0] == name)
    if old := next((flag for flag in older if flag in release.spellings), None):
        return f"write `{old}`, as it was called then"
    todo = _foreign(name) or _nearest(name, release.spellings)
    return todo or "remove it, or look for it in `python -m sglang.launch_server --help`"


def _foreign(flag: str, value: str | None = None) -> str:
    """What to write for another engine's flag, or its value of a flag; "" if it is none that is known."""
    for row in sglang.renames()["foreign"]:
        if row["flag"] == flag and row.get("value") == value:
            new = row.get("renamed_to")
            return f"it is vLLM's; write `{new}`" if new else "it is vLLM's; remove it"
    return ""


def _nearest(word: str, known: Sequence[str] | Mapping[str, str]) -> str:
    by_lower = {each.lower(): each for each in known}
    close = get_close_matches(word.lower(), by_lower, n=1)
    return f"did you mean `{by_lower[close[0]]}`?" if close else ""


def _elsewhere(flag: str, value: str | None = None) -> str:
    """Which other releases take it."""

    def takes(release: Release) -> bool:
        return flag in release.spellings and (value is None or _chosen(release.flag(flag), value))

    having = sglang.takers(takes)
    return f" ({having} {'do' if ' ' in having else 'does'})" if having else ""


def _fork(flag: str, value: str | None) -> str:
    for row in sglang.renames()["forks"]:
        if row.get("value") == value and row.get("flag", flag) == flag:
            return row["source"]
    return ""


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def _cut(word: str) -> str:
    return word if len(word) <= 60 else word[:57] + "..."
