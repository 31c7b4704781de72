"""An existing launch line as a model and a profile: what `kernelswap import` does. Pure, except for reading knowledge.

text -> commands (shell, unit, compose) -> launch line (launch, container) -> flags (flagwords) -> keys (assemble)
-> YAML (write).
Whatever cannot be taken over is told as a finding; whatever cannot be known and matters is a refusal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kernelswap.agent.redaction import redact
from kernelswap.errors import ConfigError, Fault
from kernelswap.importing import assemble, launch, write
from kernelswap.importing.words import Source


@dataclass(frozen=True)
class Wishes:
    """What the caller says himself. line: of the launch line to take. variables: values that the text does not tell."""

    model: str | None = None
    profile: str | None = None
    path: str | None = None
    line: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Imported:
    """Names and YAML texts of a model and a profile, and what there is to say about the launch line."""

    model: str
    model_text: str
    profile: str
    profile_text: str
    findings: tuple[Fault, ...]


def read(text: str, name: str, wishes: Wishes) -> Imported:
    """The model and the profile of the one launch line in a text. Raises Refused."""
    source = Source(name)
    try:
        return _read(text, source, wishes)
    except ConfigError as error:
        raise Refused(tuple(map(_redacted, error.faults)), _tidy(source)) from None
    except RecursionError:
        fault = Fault(name, "is nested too deeply", "import the launch line alone")
        raise Refused((fault,), _tidy(source)) from None


class Refused(ConfigError):
    """Why a text cannot be imported; findings: what else there is to say about it."""

    def __init__(self, faults: tuple[Fault, ...], findings: tuple[Fault, ...]) -> None:
        super().__init__(faults)
        self.findings = findings


def _read(text: str, source: Source, wishes: Wishes) -> Imported:
    found = launch.launches(text, source, wishes.variables)
    source.raise_refusals()
    one = _choose(found, source, wishes)
    server = assemble.server(one, source, wishes.path)
    model = wishes.model or assemble.model_name(server)
    profile = wishes.profile or assemble.profile_name(server)
    model_text, profile_text = write.texts(server, source, model, profile)
    source.findings += write.faults(model, model_text, profile, profile_text)
    source.raise_refusals()
    return Imported(model, model_text, profile, profile_text, _tidy(source))


def _choose(found: list[launch.Launch], source: Source, wishes: Wishes) -> launch.Launch:
    if wishes.line is not None:
        chosen = [each for each in found if each.line == wishes.line or each.first == wishes.line]
        if chosen:
            return chosen[0]
    elif len({_content(each) for each in found}) == 1:
        return found[0]
    places = ", ".join(f"line {each.first}" + (f" ({each.label})" if each.label else "") for each in found)
    if wishes.line is not None:
        source.refuse(wishes.line, "no launch line begins here", f"choose one with --line: {places}")
    else:
        source.refuse(found[0].first, f"holds {len(found)} launch lines: {places}", "choose one with --line NUMBER")
    raise ConfigError(source.refusals)


def _content(each: launch.Launch) -> tuple[object, ...]:
    words = tuple(word.text for word in each.words)
    return words, tuple(sorted((name, word.text) for name, word in each.environment.items()))


def _tidy(source: Source) -> tuple[Fault, ...]:
    """Each finding once, by line."""

    def place(fault: Fault) -> int:
        match = re.search(r":(\d+)(:|$)", fault.where)
        return int(match[1]) if match else 0

    return tuple(sorted(dict.fromkeys(map(_redacted, source.findings)), key=place))


def _redacted(fault: Fault) -> Fault:
    """Findings quote what was written."""
    return Fault(fault.where, redact(fault.what), fault.todo)
