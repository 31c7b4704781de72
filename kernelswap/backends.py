"""Which backends go with which GPU, quantisation, KV cache and environment; shared by the controller and the agent.

The rules are data: `knowledge/backends.json` and `knowledge/conflicts.json`. A rule holds if all conditions of its
`if` do:

    name: [values]              the value matches one of these (fnmatch patterns; null: not given)
    name: {"not": [values]}     it is given, and matches none of them; "=other" is another flag's value, or 1
    name: {"above": 1}          it is a number above this
    name: {"not dividing": "other"}     as a number it does not divide another flag's, which is 1 if not given
    name: {"no multiple of": "other"}   the other way round
    a|b: ...                    it holds for one of several flags
    a>b: ...                    as a; as b if a is not given

A name is SGLang's canonical flag, an environment variable, or one of two facts: `architecture` (sm90, sm100, sm120),
`quantization of the model` (by flag, else by the checkpoint). A condition on what is not known does not hold.
In a rule's texts {value} is the value of what is to be changed, {name} that of another name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from kernelswap.agent import knowledge

REFUSE, WARN = "refuse", "warn"
FILES = ("backends.json", "conflicts.json")


@dataclass(frozen=True)
class Advice:
    """What a rule says about a server. severity: `refuse` where SGLang raises before it loads, else `warn`.

    place: what to change, ("flags", name) or ("environment", name).
    """

    severity: str
    place: tuple[str, str]
    what: str
    todo: str
    source: str


def advice(
    flags: Mapping[str, str],
    environment: Mapping[str, str],
    architecture: str = "",
    quantization: str = "",
    version: str = "",
) -> tuple[Advice, ...]:
    """Every rule that holds. "" is what is not known.

    flags: canonical names without dashes; a bare flag is "true".
    quantization: the checkpoint's, `none` if it has none; the flag goes before it.
    version: SGLang's; a rule holds from the version on in which it was read. Without one the newest is meant.
    """
    facts = {
        **environment,
        **flags,
        "architecture": architecture,
        "quantization of the model": flags.get("quantization") or quantization,
    }
    known = {name: value for name, value in facts.items() if value != ""}
    found = []
    for rule in rules():
        if not _in_force(rule, version):
            continue
        holders = [_holder(name, wanted, known) for name, wanted in rule["if"].items()]
        if None not in holders:
            found.append(_advice(rule, holders, known, flags))
    return tuple(found)


@cache
def rules() -> tuple[dict[str, Any], ...]:
    return tuple(rule for name in FILES for rule in json.loads(knowledge.read(name))["rules"])


@cache
def ordinal(version: str) -> tuple[int, ...]:
    """Versions in order: 0.5.9 < 0.5.10 < 0.5.10.post1."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", version))


def _in_force(rule: Mapping[str, Any], version: str) -> bool:
    if not version:
        return "until" not in rule
    return ordinal(rule.get("since", "0")) <= ordinal(version) < ordinal(rule.get("until", "999"))


def _holder(name: str, wanted: Any, known: Mapping[str, str]) -> str | None:
    """The flag, variable or fact by which a condition holds, None if it does not."""
    if ">" in name:
        names = name.split(">")
        first = next((each for each in names if each in known), names[-1])
        return first if _holds(known.get(first), wanted, known) else None
    return next((each for each in name.split("|") if _holds(known.get(each), wanted, known)), None)


def _holds(value: str | None, wanted: Any, known: Mapping[str, str]) -> bool:
    if isinstance(wanted, list):
        return any(value is None if each is None else value is not None and fnmatchcase(value, each) for each in wanted)
    if value is None:
        return False
    ((relation, operand),) = wanted.items()
    if relation == "not":
        return not any(fnmatchcase(value, known.get(each[1:], "1") if each[0] == "=" else each) for each in operand)
    return _compares(value, relation, str(operand) if relation == "above" else known.get(operand, "1"))


def _compares(value: str, relation: str, other: str) -> bool:
    if not (value.isdigit() and other.isdigit()):
        return False
    number, bound = int(value), int(other)
    if relation == "above":
        return number > bound
    dividend, divisor = (bound, number) if relation == "not dividing" else (number, bound)
    return divisor > 0 and dividend % divisor != 0


def _advice(rule: Mapping[str, Any], holders: list[Any], known: Mapping[str, str], flags: Mapping[str, str]) -> Advice:
    blamed = next(name for name in _given_first(holders, known) if name != "architecture")
    name = "quantization" if blamed == "quantization of the model" else blamed
    kind = "environment" if name.isupper() and name not in flags else "flags"
    words = {**known, "value": known.get(blamed, ""), "architecture": known.get("architecture", "").upper()}
    # A size that is not given is 1.
    what, todo = (re.sub(r"{([^}]+)}", lambda word: words.get(word[1], "1"), rule[key]) for key in ("what", "todo"))
    return Advice(rule["severity"], (kind, name), what, todo, rule["source"])


def _given_first(holders: list[Any], known: Mapping[str, str]) -> Iterator[str]:
    """What was written can be shown with its line; what is missing cannot."""
    yield from (name for name in holders if name in known)
    yield from (name for name in holders if name not in known)
