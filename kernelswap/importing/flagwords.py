"""SGLang's own words as flags and values, read as argparse would, with what it would refuse told or mended."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from kernelswap.flags import ALIASES
from kernelswap.importing.words import Source, Word


@dataclass(frozen=True)
class Flag:
    """One flag in today's spelling. values: none for a bare flag."""

    name: str
    word: Word
    values: tuple[Word, ...] = ()


NEWEST = "0.5.23"
_OLDER = ("0.5.18", "0.5.13", "0.5.4")


@cache
def schema(version: str = NEWEST) -> Mapping[str, Mapping[str, Any]]:
    """Every spelling of every flag of a release -> how it is read."""
    folder = files("kernelswap").joinpath("knowledge/sglang")
    flags = json.loads(folder.joinpath(f"flags-{version}.json").read_text("utf-8"))["flags"]
    found: dict[str, Mapping[str, Any]] = {}
    for name, row in flags.items():
        for spelling in (name, *row.get("aliases", ()), *row.get("negations", ())):
            found[spelling] = {**row, "name": name}
    return found


@cache
def changes() -> Mapping[str, Any]:
    """What was renamed, what only forks have, what is another engine's: `knowledge/sglang/renames.json`."""
    return dict(json.loads(files("kernelswap").joinpath("knowledge/sglang/renames.json").read_text("utf-8")))


def change(kind: str, flag: str, value: str | None = None) -> Mapping[str, str]:
    """What is known last of a flag, or of a value of it; empty if nothing is."""
    for row in reversed(changes()[kind]):
        if row.get("flag", flag) == flag and row.get("value") == value and ("flag" in row or value is not None):
            return dict(row)
    return {}


def variable(name: str) -> Mapping[str, str]:
    """What is known of an environment variable that SGLang renamed or removed."""
    for row in changes()["renames"]:
        if fnmatchcase(name, row.get("environment", "")):
            return dict(row)
    return {}


def flags(words: Sequence[Word], source: Source) -> list[Flag]:
    """The flags of a launch line, each once: the last one counts, as for argparse."""
    found: dict[str, Flag] = {}
    for flag in _read(_settled(words, source), source):
        known = schema().get(flag.name)
        key = str(known["name"]) if known else flag.name
        if key in found and found[key].values != flag.values:
            first = found[key].word.line
            source.find(
                flag.word.line,
                f"--{flag.name} is given twice (first in line {first})",
                "the last one was taken, as SGLang does",
            )
        found.pop(key, None)
        found[key] = flag
    return list(found.values())


def _settled(words: Sequence[Word], source: Source) -> list[Word]:
    """Without what copying from a page does to words: typographic dashes and quotes."""
    settled = []
    for word in words:
        text = re.sub(r"^(\u2014|\u2013\u2013|\u2013-|-\u2013|\u2013)(?=[A-Za-z])", "--", word.text)
        if re.search("[\u201c\u201d\u2018\u2019]", text):
            text = re.sub("[\u201c\u201d]", '"', text)
            text = re.sub("[\u2018\u2019]", "'", text)
            if len(text) > 1 and text[0] == text[-1] == "'":
                text = text[1:-1]
        if text != word.text:
            source.find(
                word.line,
                f"`{word.text}` has typographic dashes or quotes, which no shell knows",
                "plain ones were taken",
            )
        settled.append(replace(word, text=text))
    return settled


def _read(words: Sequence[Word], source: Source) -> Iterator[Flag]:
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _is_flag(word):
            _stray(word, source, "remove it, or write its flag before it")
            continue
        name, equals, value = word.text.lstrip("-").partition("=")
        values = [replace(word, text=value, raw=word.raw.partition("=")[2])] if equals else []
        while index < len(words) and not _is_flag(words[index]):
            values.append(words[index])
            index += 1
        flag, became = _known(name, word, source)
        if became is not None:
            values = [replace(word, text=became), *values]
        given, strays = _arity(flag, word, values, bool(equals), source)
        yield Flag(flag, word, given)
        for stray in strays:
            _stray(stray, source, f"--{flag} takes {_takes(flag)}; quote what belongs together")


def _is_flag(word: Word) -> bool:
    return (
        word.text.startswith("-")
        and len(word.text) > 1
        and not re.fullmatch(r"-\d*\.?\d+([eE]-?\d+)?", word.text)
        and " " not in word.text.partition("=")[0]
    )


def _known(written: str, word: Word, source: Source) -> tuple[str, str | None]:
    """A flag as Kernelswap spells it: dashes, written out, today's name; with the value that a bare one became."""
    name = written.replace("_", "-")
    if name != written:
        source.find(word.line, f"--{written} is spelled with underscores, which SGLang refuses", f"--{name} was taken")
    if not word.text.startswith("--"):
        source.find(word.line, f"`{word.text}` has one dash", f"--{name} was taken")
    row = change("renames", name)
    renamed, _, value = row.get("renamed_to", "").partition(": ")
    if name in schema():
        if row:
            source.find(word.line, f"--{name} is deprecated", f"write {row['renamed_to']}" if renamed else "remove it")
    elif renamed in schema() and (bool(value) or _takes(renamed) == _takes(name)):
        what = f"--{name} is now --{renamed}{' ' * bool(value)}{value}"
        source.find(word.line, f"{what} (since SGLang {row['since']})", "today's spelling was taken")
        return renamed, value or None
    elif row:
        todo = f"use {row['renamed_to']}" if renamed else "remove it"
        source.find(word.line, f"--{name} is gone since SGLang {row['since']}", todo)
    else:
        return _guess(name, word, source), None
    return name, None


def _guess(name: str, word: Word, source: Source) -> str:
    """A flag that SGLang does not know by this name."""
    candidates = [known for known in schema() if known.startswith(name)]
    whole = {str(schema()[known]["name"]) for known in candidates}
    foreign, fork = change("foreign", name), change("forks", name)
    if foreign:
        todo = f"the nearest is {foreign['renamed_to']}" if foreign.get("renamed_to") else "remove it"
        engine = foreign["source"].removesuffix(" command line")
        source.find(word.line, f"--{name} is {engine}, not SGLang's", todo)
    elif fork:
        source.find(
            word.line,
            f"--{name} is only in a fork ({fork['source']})",
            "see that the hosts have that fork, or remove it",
        )
    elif name in ALIASES:
        return ALIASES[name]
    elif len(whole) == 1:
        source.find(word.line, f"--{name} is an abbreviation", f"--{candidates[0]} was taken")
        return candidates[0]
    elif candidates:
        choice = " or ".join("--" + each for each in candidates[:4])
        source.find(word.line, f"--{name} may mean {choice}", "write the one that is meant")
    else:
        close = get_close_matches(name, schema(), n=1, cutoff=0.7)
        todo = f"did you mean --{close[0]}?" if close else "see that the SGLang of the hosts has it (a fork may)"
        source.find(word.line, f"--{name} is no flag of SGLang {NEWEST}", todo)
    return name


def _takes(flag: str) -> str:
    """How many values a flag takes, in the newest release that knows it."""
    row = schema().get(flag) or next((known[flag] for known in map(schema, _OLDER) if flag in known), {})
    return "no value" if row.get("bare") else "one value"


def _arity(
    flag: str, word: Word, values: Sequence[Word], equals: bool, source: Source
) -> tuple[tuple[Word, ...], list[Word]]:
    """The values that belong to a flag, and those that do not."""
    row = schema().get(flag)
    given = list(values)
    if row is None:
        return tuple(given), []
    if row.get("bare"):
        if given and (equals or re.fullmatch(r"(?i)true|false|1|0|yes|no", given[0].text)):
            what = f"--{flag} takes no value, so SGLang would refuse `{given[0].text}`"
            source.find(given[0].line, what, "the flag alone was taken; leave it out if it is not wanted")
            given = given[1:]
        return (), given
    if row.get("nargs") in ("+", "*") and not equals:
        # JSON lists of LoRA adapters and the like hold blanks, too.
        return tuple(given), []
    if not given and row.get("nargs") not in ("?", "*"):
        source.refuse(word.line, f"--{flag} has no value", "write it")
        return (), []
    if given and (mended := _json(flag, word, given, source)):
        return (mended,), []
    return tuple(given[:1]), given[1:]


def _stray(word: Word, source: Source, todo: str) -> None:
    """A word where a flag should stand."""
    if word.bare:
        what = f"`{word.text}` is not set in this text, so nothing was taken for it"
        source.find(word.line, what, "add by hand the flags that it holds")
    elif word.text.strip():
        source.refuse(word.line, f"`{word.text}` belongs to no flag, so SGLang would refuse the line", todo)


def _json(flag: str, word: Word, given: Sequence[Word], source: Source) -> Word | None:
    """JSON whose quotes the shell took away, as it was meant."""
    first = given[0]
    if first.unknown or not re.match(r"[\s'\"]*[{\[]", first.text) or _is_json(first.text):
        return None
    got = " ".join(each.text for each in given)
    written = " ".join(each.raw for each in given)
    # A variable that was written in it is not what it stands for.
    for text in (written, got) if not re.search(r"[$`]", written) else (got,):
        for meant in (text.strip("\"'"), text.strip("\"'").replace('\\"', '"'), text.replace("'", '"')):
            if _is_json(meant):
                what = f"--{flag}: the quotes of this JSON do not come through as meant, and SGLang gets `{got}`"
                source.find(first.line, what, "put single quotes around it; what is meant was taken")
                return replace(first, text=meant)
    if schema().get(flag, {}).get("type") == "json" or first.text.startswith("{"):
        source.refuse(first.line, f"--{flag}: `{got}` is no JSON", "put single quotes around the JSON")
        return first
    return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
