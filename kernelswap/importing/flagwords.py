"""SGLang's own words as flags and values, read as argparse would, with what it would refuse told or mended."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kernelswap import sglang
from kernelswap.importing.words import Source, Word
from kernelswap.sglang import Flag as SglangFlag
from kernelswap.sglang import Release


@dataclass(frozen=True)
class Flag:
    """One flag in today's spelling. values: none for a bare flag."""

    name: str
    word: Word
    values: tuple[Word, ...] = ()


def flags(words: Sequence[Word], source: Source, release: Release) -> list[Flag]:
    """The flags of a launch line as a release spells them, each once: the last one counts, as for argparse."""
    found: dict[str, Flag] = {}
    for flag in _read(_settled(words, source), source, release):
        first = found.pop(flag.name, flag)
        if [word.text for word in first.values] != [word.text for word in flag.values]:
            what = f"--{flag.name} is given twice, in line {first.word.line} with another value"
            source.find(flag.word.line, what, "the last one was taken, as SGLang does")
        found[flag.name] = flag
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
        # `{{ port }}`: what Ansible, Helm or just would fill in.
        settled.append(replace(word, text=text, unknown=(*word.unknown, *re.findall(r"\{\{[^{}\"]*\}\}", text))))
    return settled


def _read(words: Sequence[Word], source: Source, release: Release) -> Iterator[Flag]:
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not sglang.is_flag(word.text):
            _stray(word, source, "remove it, or write its flag before it")
            continue
        name, equals, value = word.text.lstrip("-").partition("=")
        values = [replace(word, text=value, raw=word.raw.partition("=")[2])] if equals else []
        while index < len(words) and not sglang.is_flag(words[index].text):
            values.append(words[index])
            index += 1
        flag, became = _known(name, word, bool(values), source, release)
        if became is not None:
            values = [replace(word, text=became), *values]
        given, strays = _arity(flag, word, values, bool(equals), source, release)
        if given is not None:
            yield Flag(flag, word, given)
        for stray in strays:
            _stray(
                stray, source, f"--{flag} takes {'no' if _is_bare(flag) else 'one'} value; quote what belongs together"
            )


def _known(written: str, word: Word, valued: bool, source: Source, release: Release) -> tuple[str, str | None]:
    """A flag as Kernelswap spells it: with dashes, written out, by the release's name; and the value it became.

    What SGLang does not know stays as it is: `kernelswap check` says what to do about it.
    """
    name = written.replace("_", "-")
    if name != written:
        source.find(word.line, f"--{written} has underscores, which SGLang refuses", f"--{name} was taken")
    if not word.text.startswith("--"):
        source.find(word.line, f"`{word.text}` has one dash, which SGLang refuses", f"--{name} was taken")
    if name in release.spellings:
        if name not in sglang.newest().spellings:
            what = f"--{name} is gone in SGLang {sglang.newest().version}"
            source.find(word.line, what, f"kept, for SGLang {release.version} has it; {_later(name)}")
        if name in release.flag(name).negations:
            return name, None
        today = sglang.canonical(name)
        return (today if today in release.spellings else release.spellings[name]), None
    for row in reversed(sglang.renames()["renames"]):
        renamed, _, value = row.get("renamed_to", "").partition(": ")
        if (row.get("flag"), row.get("value")) != (name, None) or renamed not in release.spellings:
            continue
        if value or _is_bare(renamed) != valued:
            today = f"--{renamed} {value}".rstrip()
            what = f"--{name} is {today} today (since SGLang {row['since']})"
            source.find(word.line, what, "today's spelling was taken")
            return renamed, value or None
    if meant := release.name(name):
        if not re.fullmatch(r"tp|pp|dp|ep", name):
            source.find(word.line, f"--{name} is short for --{meant}", f"--{meant} was taken")
        today = sglang.canonical(meant)
        return (today if today in release.spellings else meant), None
    return name, None


def _later(name: str) -> str:
    """What a newer release wants instead."""
    rows = (row for row in reversed(sglang.renames()["renames"]) if (row.get("flag"), row.get("value")) == (name, None))
    row = next(rows, {})
    return f"later write `{row['renamed_to']}`" if row.get("renamed_to") else "later remove it"


def _is_bare(flag: str) -> bool:
    """Whether a flag takes no value, in the newest release that knows it."""
    known = (sglang.release(version) for version in reversed(sglang.versions()))
    release = next((each for each in known if flag in each.spellings), None)
    return release is not None and release.flag(flag).bare


def _arity(
    flag: str, word: Word, values: Sequence[Word], equals: bool, source: Source, release: Release
) -> tuple[tuple[Word, ...] | None, list[Word]]:
    """The values that belong to a flag, and those that do not; None if it misses one."""
    given = list(values)
    if flag not in release.spellings:
        return tuple(given), []
    known = release.flag(flag)
    if known.bare:
        if given and (equals or re.fullmatch(r"(?i)true|false|1|0|yes|no", given[0].text)):
            what = f"--{flag} takes no value, so SGLang would refuse `{given[0].text}`"
            source.find(given[0].line, what, "the flag alone was taken; leave it out if it is not wanted")
            given = given[1:]
        return (), given
    if known.nargs in ("+", "*") and not equals:
        return tuple(given), []
    if not given and known.nargs not in ("?", "*"):
        source.refuse(word.line, f"--{flag} has no value", "write it")
        return None, []
    if given and (mended := _json(known, given, source)):
        return (mended,), []
    return tuple(given[:1]), given[1:]


def _stray(word: Word, source: Source, todo: str) -> None:
    """A word where a flag should stand."""
    if word.bare:
        what = f"`{word.text}` is not set in this text, so nothing was taken for it"
        source.find(word.line, what, "add by hand the flags that it holds")
    elif word.unknown and word.text in word.unknown:
        name = re.sub(r"\W", "", word.text)
        source.refuse(
            word.line, f"`{word.text}` cannot be known, nor whether it holds flags", f"give --set {name}=VALUE"
        )
    elif word.text.strip():
        source.refuse(word.line, f"`{word.text}` belongs to no flag, so SGLang would refuse the line", todo)


def _json(flag: SglangFlag, given: Sequence[Word], source: Source) -> Word | None:
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
                what = f"--{flag.name}: the quotes of this JSON do not come through as meant, and SGLang gets `{got}`"
                source.find(first.line, what, "put single quotes around it; what is meant was taken")
                return replace(first, text=meant)
    if flag.type == "json" or first.text.startswith("{"):
        source.refuse(first.line, f"--{flag.name}: `{got}` is no JSON", "put single quotes around the JSON")
        return first
    return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
