"""A systemd unit as the command that it starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from kernelswap.importing import knowledge
from kernelswap.importing.words import Command, Source, Word, interpolate, split


@dataclass(frozen=True)
class Setting:
    key: str
    value: str
    line: int


def settings(text: str) -> list[Setting]:
    """`Key=value` lines; a continued value keeps its newlines, each for a backslash and a newline."""
    found: list[Setting] = []
    lines = text.replace("\r\n", "\n").split("\n")
    index = 0
    while index < len(lines):
        first, line = index, lines[index].strip()
        index += 1
        if not line or line[0] in "#;[":
            continue
        while line.endswith("\\") and index < len(lines):
            following = lines[index]
            index += 1
            # A comment within a continued value is left out, and the value goes on.
            comment = following.lstrip()[:1] in ("#", ";")
            line = line[:-1] + "\n" + (" \\" if comment else following.strip())
        key, equals, value = line.partition("=")
        if equals:
            found.append(Setting(key.strip(), value.strip(), first + 1))
    return found


def commands(text: str, source: Source, variables: Mapping[str, str]) -> tuple[list[Command], Word | None]:
    """The commands of ExecStart=, and the unit's user."""
    unit = settings(text)
    user = next((Word(item.value, item.line) for item in unit if item.key == "User" and item.value), None)
    specifiers = _specifiers(source.name, user)
    environment: dict[str, Word] = {}
    folder = None
    starts: list[tuple[Word, ...]] = []
    for item in unit:
        if item.key == "Environment":
            environment = _environment(item, environment, specifiers, source)
        elif item.key == "EnvironmentFile" and item.value:
            knowledge.say(source, item.line, f"`{item.key}={item.value}`", knowledge.setting("container", "env-file"))
        elif item.key == "WorkingDirectory" and item.value.startswith("/"):
            folder = item.value
        elif item.key == "ExecStart":
            starts = [*starts, _words(item, specifiers, source)] if item.value else []
        elif item.key not in knowledge.table()["unit"]["quiet"]:
            shown = item.value.split("\n")[0]
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            knowledge.say(source, item.line, f"`{item.key}={shown}`", _known(item))
    _lint({item.key: item for item in unit}, source)

    def lookup(name: str) -> str | None:
        return environment[name].text if name in environment else variables.get(name)

    found = []
    used = {name for words in starts for word in words for name in re.findall(r"\$\{?([A-Za-z_]\w*)", word.text)}
    kept = {name: word for name, word in environment.items() if name not in used or knowledge.is_setting(name)}
    for words in starts:
        expanded = [part for word in words for part in _expand(word, lookup)]
        found.append(Command(tuple(expanded), kept, folder))
    return found, user


def _known(item: Setting) -> knowledge.Lint:
    """What is known of a setting; of the command that it runs, if there is more to say of that."""
    program = knowledge.killer(item.value) or PurePath(item.value.lstrip("-@:+!").split(" ")[0]).name
    if item.key.startswith("Exec") and program in knowledge.table()["lint"] and program not in ("docker", "podman"):
        return knowledge.lint(program)
    return knowledge.setting("unit", item.key)


def _expand(word: Word, lookup: Callable[[str], str | None]) -> list[Word]:
    """systemd's own variables: `$X` alone is split at blanks, `${X}` is not."""
    if match := re.fullmatch(r"\$([A-Za-z_]\w*)", word.text):
        value = lookup(match[1])
        if value is not None:
            return [replace(part, line=word.line) for part in split(value, word.line, escapes=True, relaxed=True)]
    return [interpolate(word, lookup, lambda name: None)]


def _words(item: Setting, specifiers: Mapping[str, str], source: Source) -> tuple[Word, ...]:
    try:
        words = list(split(item.value, item.line, escapes=True))
    except ValueError as error:
        source.refuse(item.line, f"`{item.key}=` has {error}", "close it")
        return ()
    if words and item.key == "ExecStart":
        program = words[0].text.lstrip("-@:+!|")
        # After @ the second word is the name that the process is given.
        words[:2] = [replace(words[0], text=program), *words[2 if "@" in words[0].text[: -len(program)] else 1 : 2]]
    return tuple(_specified(word, specifiers) for word in words)


def _environment(
    item: Setting, before: dict[str, Word], specifiers: Mapping[str, str], source: Source
) -> dict[str, Word]:
    if not item.value:
        return {}
    found = dict(before)
    for word in _words(item, specifiers, source):
        name, equals, value = word.text.partition("=")
        if equals:
            unknown = tuple(re.findall(r"\$\w+|\$\{\w+\}", value))
            if unknown:
                what = f"systemd does not replace `{unknown[0]}` in Environment={name}=..."
                source.find(word.line, what, "write the value out")
            found[name] = replace(word, text=value, unknown=unknown)
        else:
            source.find(
                word.line,
                f"`{name}` in Environment= is no assignment, so systemd ignores it",
                "quote the whole NAME=value",
            )
    return found


def _specifiers(name: str, user: Word | None) -> dict[str, str]:
    """What `%` and a letter stand for, where the text tells it."""
    known = {
        "%": "%",
        "t": "/run",
        "S": "/var/lib",
        "C": "/var/cache",
        "L": "/var/log",
        "E": "/etc",
        "T": "/tmp",  # noqa: S108 - systemd's own word for it
        "V": "/var/tmp",  # noqa: S108
    }
    if user is None or user.text == "root":
        known |= {"h": "/root", "u": "root", "U": "0"}
    else:
        known["u"] = user.text
    if (path := PurePath(name)).suffix == ".service":
        prefix, _, instance = path.stem.partition("@")
        known |= {"n": path.name, "N": path.stem, "p": prefix}
        if instance:
            known |= {"i": instance, "I": instance}
    return known


def _specified(word: Word, specifiers: Mapping[str, str]) -> Word:
    unknown: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match[1] not in specifiers:
            unknown.append(match[0])
        return specifiers.get(match[1], match[0])

    text = re.sub(r"%([A-Za-z%])", value, word.text)
    return replace(word, text=text, unknown=(*word.unknown, *unknown))


def _lint(unit: Mapping[str, Setting], source: Source) -> None:
    rows = knowledge.table()["unit"]

    def say(key: str, row: str) -> None:
        item = unit[key]
        knowledge.say(source, item.line, f"`{key}={item.value}`", knowledge.entry(rows[row]))

    restart = unit.get("Restart")
    limit = unit.get("StartLimitBurst") or unit.get("StartLimitIntervalSec") or unit.get("StartLimitInterval")
    if restart and restart.value != "no" and (limit is None or limit.value == "0"):
        # Five starts in ten seconds are the default limit; a start that takes longer never meets it.
        say("Restart", "restart")
    kind = unit["Type"].value if "Type" in unit else "simple"
    if row := {"notify": "notify", "notify-reload": "notify", "oneshot": "oneshot", "forking": "forking"}.get(kind):
        say("Type", row)
    limit_key = next((key for key in ("TimeoutStartSec", "TimeoutSec") if key in unit), None)
    if limit_key:
        if 0 < _seconds(unit[limit_key].value) < _LONG_START:
            say(limit_key, "start-timeout")
    elif kind == "oneshot":
        pass  # its start has no limit
    elif key := next((key for key in ("ExecStartPre", "ExecStartPost") if key in unit), None):
        knowledge.say(
            source, unit[key].line, f"`{key}=` without `TimeoutStartSec=`", knowledge.entry(rows["default-timeout"])
        )
    elif kind in ("notify", "notify-reload", "forking", "dbus"):
        knowledge.say(
            source,
            unit["Type"].line,
            f"`Type={kind}` without `TimeoutStartSec=`",
            knowledge.entry(rows["default-timeout"]),
        )
    mode = unit.get("KillMode")
    if mode and mode.value in ("process", "none"):
        say("KillMode", "kill-mode")
    elif mode is None or mode.value == "control-group":
        item = mode or unit.get("ExecStart")
        if item and item.value and not re.search(r"\b(docker|podman)\b", item.value):
            shown = "`KillMode=control-group`" if mode else "a unit without `KillMode=`"
            knowledge.say(source, item.line, shown, knowledge.entry(rows["kill-group"]))


_LONG_START = 600  # seconds; large models load for longer than the usual few minutes
_UNITS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hr": 3600, "d": 86400}


def _seconds(text: str) -> float:
    """A time span as systemd writes it; 0 if it is none or has no end."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    return sum(float(number) * _UNITS.get(unit or "s", 0) for number, unit in parts)
