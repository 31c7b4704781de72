"""Two servers, flag by flag: what is declared and, where it is known, what SGLang made of that. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from kernelswap.agent.redaction import MARK, hide_secrets
from kernelswap.agent.served import DRAWN
from kernelswap.commandline import Words, flags_of
from kernelswap.flags import SECRETS
from kernelswap.protocol import LiveServer, Plan, Resolved

FLAGS, ENVIRONMENT, SERVER, RESOLVED, LIMITS = "flags", "environment", "server", "resolved only", "limits"

# Fields of a plan that judge the server but are no part of it; all others and the flags make another release.
LIMIT_FIELDS = (
    "expose", "memory_margin", "disk_free", "end_foreign", "engine_version", "requires", "verify", "timeouts",
    "retention",
)  # fmt: skip
SERVER_FIELDS = {
    "python": "engine",
    "model": "model",
    "model_path": "model path",
    "served_name": "served name",
    "address": "address",
    "port": "port",
    "gpus": "gpus",
    "gpu_count": "GPUs needed",
    "schedulers": "schedulers",
    "user": "user",
}
# Flags that are fields of the server, with SGLang's default.
_SERVER_FLAGS = {"model-path": "", "served-model-name": "", "host": "127.0.0.1", "port": "30000"}
_CREDENTIALS = re.compile(r"/run/credentials/[^/]+/secrets\.yaml")
# Arguments that differ by themselves: chosen anew at each start (serving_hook.py), or a server's field.
_NO_DIFFERENCE = {*DRAWN, "model_path", "served_model_name", "tokenizer_path", "host", "port"}


@dataclass(frozen=True)
class Side:
    """One of the two. What it does not know is not compared: limits and resolved may be None, a field may be missing.

    flags: by canonical name, as words. secrets: names of flags. resolved: SGLang's arguments by name, each as JSON.
    """

    flags: Mapping[str, Words] = field(default_factory=dict)
    secrets: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    server: Mapping[str, str] = field(default_factory=dict)
    resolved: Mapping[str, str] | None = None
    limits: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Value:
    """What is declared, None if nothing; what SGLang made of it, None if that is not known or the same."""

    declared: str | None
    resolved: str | None = None

    def __str__(self) -> str:
        if self.declared is None:
            return "(unset)" if self.resolved is None else f"(unset: {self.resolved})"
        return self.declared if self.resolved is None else f"{self.declared} ({self.resolved})"


@dataclass(frozen=True)
class Change:
    """One difference. section: one of the five above."""

    section: str
    name: str
    before: Value
    after: Value

    def __str__(self) -> str:
        if self.section == RESOLVED:
            return f"{self.name}: {self.before.resolved} -> {self.after.resolved}"
        return f"{self.name}: {self.before} -> {self.after}"

    @property
    def line(self) -> str:
        """The same where no heading says its section."""
        return f"environment {self}" if self.section == ENVIRONMENT else str(self)


def of_plan(plan: Plan, resolved: Resolved | None = None) -> Side:
    flags = _without_server(flags_of(_unnamed(hide_secrets(plan.argv), plan.release)))
    server = {label: _text(getattr(plan, name)) for name, label in SERVER_FIELDS.items()}
    return Side(
        flags=flags,
        secrets=frozenset(plan.secret_flags),
        environment=_environment(plan.environment, plan.release),
        server={**server, **_version(resolved)},
        resolved=resolved.values if resolved else None,
        limits=_limits(plan),
    )


def of_server(live: LiveServer, plan: Plan | None = None) -> Side:
    """A server as it runs. plan: of the release that its unit was written for."""
    flags = flags_of(_unnamed(live.server.argv, live.release))
    secrets = {name for name in SECRETS if flags.pop(name, None)}
    # The unit hands the release's secrets over in this file.
    if plan and _CREDENTIALS.fullmatch(" ".join(flags.get("config", ()))):
        del flags["config"]
        secrets |= set(plan.secret_flags)
    told = {name: " ".join(flags.get(name, ())) or default for name, default in _SERVER_FLAGS.items()}
    server = {
        "engine": live.python,
        "model path": told["model-path"],
        "served name": told["served-model-name"] or told["model-path"],
        "address": told["host"],
        "port": told["port"],
        "user": live.server.user,
    }
    return Side(
        flags=_without_server(flags),
        secrets=frozenset(secrets),
        environment=_environment(live.environment, live.release),
        server={**{label: value for label, value in server.items() if value}, **_version(live.resolved)},
        resolved=live.resolved.values if live.resolved else None,
    )


def compare(before: Side, after: Side) -> tuple[Change, ...]:
    """Everything that is known to differ, section by section, by name."""
    return (
        *_flag_changes(before, after),
        *_changes(FLAGS, *(dict.fromkeys(side.secrets, "(secret)") for side in (before, after))),
        *_changes(ENVIRONMENT, before.environment, after.environment),
        *_common_changes(SERVER, before.server, after.server),
        *_resolved_changes(before, after),
        *(() if before.limits is None or after.limits is None else _changes(LIMITS, before.limits, after.limits)),
    )


def _flag_changes(before: Side, after: Side) -> Iterator[Change]:
    old, new = before.flags, after.flags
    for name in sorted(old.keys() | new.keys()):
        words = old.get(name), new.get(name)
        made = [(side.resolved or {}).get(name.replace("-", "_")) for side in (before, after)]
        same_words = _declared(words[0]) == _declared(words[1])
        same_made = None in made or _parsed(made[0]) == _parsed(made[1])
        if not (same_words and same_made):
            yield Change(FLAGS, name, _value(words[0], made[0]), _value(words[1], made[1]))


def _resolved_changes(before: Side, after: Side) -> Iterator[Change]:
    old, new = before.resolved or {}, after.resolved or {}
    shown = {name.replace("-", "_") for name in (*before.flags, *after.flags)}
    for name in sorted((old.keys() & new.keys()) - shown - _NO_DIFFERENCE):
        if not name.startswith("_") and _parsed(old[name]) != _parsed(new[name]):
            yield Change(RESOLVED, name, *(Value(None, _plain(values[name])) for values in (old, new)))


def _changes(section: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield Change(section, name, Value(old.get(name)), Value(new.get(name)))


def _common_changes(section: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """The same for what only counts where both know it; "" is nothing."""
    for name in (name for name in old if name in new):
        if old[name] != new[name]:
            yield Change(section, name, Value(old[name] or None), Value(new[name] or None))


def _value(words: Words | None, made: str | None) -> Value:
    if words is None:
        return Value(None, None if made is None else _plain(made))
    text = shlex.join(words) if len(words) > 1 else (words[0] if words else "true")
    return Value(text, None if made is None or _same(words, made) else _plain(made))


def _same(words: Words, made: str) -> bool:
    """Whether SGLang left a flag as it was declared. It keeps some maps as their text."""
    declared, value = _declared(words), _parsed(made)
    return value in (declared, [declared]) or (isinstance(value, str) and _word(value) == declared)


def _declared(words: Words | None) -> Any:
    """A flag's words in a form that is equal for what means the same: 0.90 and 0.9, maps in any order."""
    if words is None:
        return None
    if not words:
        return True
    return _word(words[0]) if len(words) == 1 else [_word(word) for word in words]


def _word(word: str) -> Any:
    if word == "false":
        return False
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", word):
        return _number(word)
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)(?:([KMGT])i|([kMGT]))", word):  # --context-length 128k
        step, letter = (1024, match[2]) if match[2] else (1000, match[3].upper())
        return _number(str(Decimal(match[1]) * step ** ("KMGT".index(letter) + 1)))
    return _parsed(word) if word.lstrip().startswith(("{", "[")) else word


def _parsed(text: str | None) -> Any:
    try:
        return json.loads(text or "", parse_int=_number, parse_float=_number)
    except ValueError:  # a redaction may have broken it
        return text


def _number(text: str) -> tuple[Decimal]:
    # Not bare: Decimal(1) would equal True.
    return (Decimal(text).normalize(),)


def _plain(made: str) -> str:
    """A value of SGLang's, which is JSON, as a flag would have it."""
    value = _parsed(made)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return shlex.join(value)
    return made


def _without_server(flags: Mapping[str, Words]) -> dict[str, Words]:
    return {name: words for name, words in flags.items() if name not in _SERVER_FLAGS}


def _unnamed(words: Sequence[str], release: str) -> list[str]:
    """A path into the release's own folder differs in name only."""
    return [word.replace(release, "RELEASE") for word in words] if release else list(words)


def _environment(values: Mapping[str, str], release: str) -> dict[str, str]:
    words = hide_secrets(f"{name}={value}" for name, value in values.items())
    pairs = (word.split("=", 1) for word in _unnamed(words, release))
    return {name: "(secret)" if value == MARK else value for name, value in pairs}


def _version(resolved: Resolved | None) -> dict[str, str]:
    return {"SGLang": resolved.version} if resolved and resolved.version else {}


def _limits(plan: Plan) -> dict[str, str]:
    return {key: text for name in LIMIT_FIELDS for key, text in _flat(name, getattr(plan, name)) if text}


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from _flat(f"{name}.{each.name}", getattr(value, each.name))
    else:
        yield name, _text(value)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is None or value == {} else str(value)
