"""SGLang's flags: the one place where a `flags:` map becomes words of a command line.

true is a bare flag; false and null mean "not given"; a list is several words; a map is JSON; anything else is its text.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from kernelswap import sglang
from kernelswap.sglang import canonical, newest, turned_off

FlagValue: TypeAlias = "bool | int | float | str | list[FlagValue] | dict[str, FlagValue] | None"

# A fault's place below `flags`, what is wrong, what to do.
Finding: TypeAlias = tuple[tuple[str | int, ...], str, str]

MAX_WORD = 128 * 1024 - 1  # bytes; the kernel refuses a longer argument

# Flags that Kernelswap writes itself, and the key that sets them.
OWNED = {
    "model-path": "set `path:` of the model instead",
    "served-model-name": "set `served-name:` of the model instead",
    "host": "set `host:` of the model instead",
    "port": "set `port:` of the model or instance instead",
    "config": "write the flags themselves here",
    "api-key": "secrets go under `secrets:`, as {env: NAME} or {file: PATH}",
    "admin-api-key": "secrets go under `secrets:`, as {env: NAME} or {file: PATH}",
    "ssl-keyfile-password": "end TLS in a proxy before the server",
}

SECRETS = ("api-key", "admin-api-key")

_UNSUPPORTED = json.loads((sglang.KNOWLEDGE / "refused.json").read_text(encoding="utf-8"))
REFUSED: Mapping[str, str] = {flag: row["todo"] for row in _UNSUPPORTED["refused"] for flag in row["flags"]}
_HARMLESS: Mapping[str, str] = _UNSUPPORTED["harmless"]


def groups(flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, ...]]:
    """The words of each flag that is given, sorted by name: the same set of flags is the same server."""
    yield from filter(None, (spell(name, flags[name]) for name in sorted(flags)))


def spell(name: str, value: FlagValue) -> tuple[str, ...]:
    if value is None or value is False:
        return ()
    if value is True:
        return (f"--{name}",)
    if isinstance(value, list):
        return (f"--{name}", *words(value))
    word = text(value)
    # argparse takes a separate word that starts with a dash for another flag.
    return (f"--{name}={word}",) if word.startswith("-") else (f"--{name}", word)


def words(value: FlagValue) -> list[str]:
    """The words after a flag that is given; none after a bare one."""
    if value is True:
        return []
    return [text(item) for item in value] if isinstance(value, list) else [text(value)]


def text(value: FlagValue) -> str:
    """One word: numbers as they were written, maps as compact JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list | bool) or value is None:
        return _json(value)
    return str(getattr(value, "text", None) or repr(value))


def display(flags: Mapping[str, FlagValue]) -> dict[str, str]:
    """The flags as strings by their canonical names, for people and for whoever asks what a server was told."""
    shown = {}
    for name in sorted(flags):
        value = flags[name]
        if value is not None and value is not False:
            given = value if value is not True else not turned_off(name)
            shown[canonical(name)] = shlex.join(map(text, given)) if isinstance(given, list) else text(given)
    return shown


def schedulers(flags: Mapping[str, FlagValue]) -> int:
    """How many scheduler processes, hence GPUs, these flags ask for."""
    count = _number(flags, "tp-size") * _number(flags, "pp-size")
    return count if flags.get("enable-dp-attention") is True else count * _number(flags, "dp-size")


def findings(flags: Mapping[Any, Any]) -> Iterator[Finding]:
    """Everything wrong with a `flags:` map that can be seen without SGLang."""
    seen: dict[str, str] = {}
    for name, value in flags.items():
        finding = _name_finding(name)
        if finding:
            yield (str(name),), *finding
            continue
        yield from value_findings((name,), value)
        if value is None or value is False:
            continue
        refused = next((flag for flag in _meant(name) if flag in REFUSED), None)
        if refused and words(value) != [_HARMLESS.get(refused)]:
            what = "is beyond what Kernelswap supports"
            yield (name,), what if refused == name else f"is `{refused}`, which {what}", REFUSED[refused]
        first = seen.setdefault(canonical(name), name)
        if first != name:
            yield (name,), f"is another spelling of `{first}`, which is given too", "keep one of the two"


def _name_finding(name: Any) -> tuple[str, str] | None:
    if not isinstance(name, str):
        return "a flag's name is not text", "quote it"
    plain = name.lstrip("-").replace("_", "-")
    meant = list(_meant(plain))
    if owned := next((flag for flag in meant if flag in OWNED), None):
        return f"Kernelswap sets --{owned} itself", OWNED[owned]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", plain):
        return "is not a flag's name", "write it as on SGLang's command line, without the dashes in front"
    if plain != name:
        refused = next((REFUSED[flag] for flag in meant if flag in REFUSED), None)
        return "is not spelled as Kernelswap spells flags", f"write `{plain}`" + (f", but {refused}" if refused else "")
    return None


def _meant(name: str) -> Iterator[str]:
    """The flags that SGLang takes a name for: itself, or what it is short for in some release."""
    if name in OWNED or name in REFUSED:
        yield name
    elif (exact := newest().spellings.get(name)) is not None:
        yield exact
    elif len(name) > 1:
        yield from sglang.names(name)


def value_findings(loc: tuple[str | int, ...], value: Any) -> Iterator[Finding]:
    if isinstance(value, list):
        if not value:
            yield loc, "is an empty list", "use true for a flag without words, null to remove it"
        for index, item in enumerate(value):
            place = (*loc, index)
            if item is None or isinstance(item, bool | list):
                yield place, "is not one word", "write text, a number or a map; quote `true` if the word is meant"
            else:
                yield from value_findings(place, item)
                if isinstance(item, str) and item.startswith("-"):
                    yield place, "starts with a dash, so SGLang would take it for a flag", "choose another value"
        return
    if isinstance(value, dict):
        faulty = list(_json_findings(loc, value))
        yield from faulty
        if faulty:
            return
    elif not isinstance(value, bool | int | float | str | None):
        yield loc, f"is a {type(value).__name__}", "use text, a number, true, null, a list or a map"
        return
    elif isinstance(value, float) and not math.isfinite(value):
        yield loc, "is not a finite number", "write a number, or quote it if it is text"
        return
    if problem := word_problem(text(value)):
        yield loc, *problem


def _json_findings(loc: tuple[str | int, ...], value: Any) -> Iterator[Finding]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield loc, f"the JSON key {key!r} is not text", "quote it"
            else:
                yield from _json_findings((*loc, key), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _json_findings((*loc, index), item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield loc, "is not a finite number, which JSON cannot hold", "write a number, or quote it if it is text"
    elif not isinstance(value, bool | int | float | str | None):
        yield loc, f"is a {type(value).__name__}, which JSON cannot hold", "use text, numbers, lists and maps"


def word_problem(word: str) -> tuple[str, str] | None:
    """Why a word cannot be passed to a process at all."""
    if "\0" in word:
        return "holds a NUL byte", "remove it"
    try:
        size = len(word.encode())
    except UnicodeEncodeError:
        return "holds half of a surrogate pair", "write the character itself"
    if size > MAX_WORD:
        return f"is {size} bytes long, and Linux passes at most {MAX_WORD}", "shorten it, or name a file"
    return None


def _json(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(str(key))}:{_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    written = getattr(value, "text", "")
    if re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", written):
        return str(written)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(int(value))
    return json.dumps(float(value) if isinstance(value, float) else value, ensure_ascii=False)


def _number(flags: Mapping[str, FlagValue], name: str) -> int:
    for given, value in flags.items():
        if canonical(given) == name and isinstance(value, int | str) and not isinstance(value, bool):
            try:
                return max(1, int(value))
            except ValueError:
                return 1
    return 1
