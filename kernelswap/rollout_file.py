"""A rollout as people write it, checked strictly: in an inventory's data or by --data."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from kernelswap.errors import ConfigError, Fault
from kernelswap.layers import Layer, check
from kernelswap.rollout import Rollout
from kernelswap.spec import HostData, plain
from kernelswap.wording import nearest

EXAMPLE = 'write e.g. {"waves": [1, 5, "20%"], "max_failed": 0}'


def _size(value: Any) -> Any:
    count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    share = isinstance(value, str) and re.fullmatch(r"(100|[1-9][0-9]?)%", value)
    if not (count or share):
        context = {"what": "is not the size of a wave", "todo": 'write a number of hosts, or a share, e.g. "20%"'}
        raise PydanticCustomError("kernelswap", "{what}", context)
    return value


class RolloutFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)

    canary: Annotated[tuple[str, ...], Field(strict=False)] = ()
    waves: Annotated[tuple[Annotated[Any, AfterValidator(_size)], ...], Field(strict=False)] = ()
    max_failed: Annotated[int, Field(ge=0)] = 0
    pause: Annotated[float, Field(ge=0, le=86400)] = 0
    on_stop: Literal["keep", "revert"] = "keep"
    unreachable: Literal["fail", "skip"] = "fail"


def read(said: Mapping[str, Any], known: Collection[str]) -> Rollout:
    """The one rollout that is said. Raises ConfigError.

    said: who says it, e.g. `host gpu1` -> what; None where nothing is said. known: the names of the inventory's hosts.
    """
    different = _different(said)
    found = faults(said, known)
    if len(different) > 1:
        sides = "; ".join(f"{who} says {json.dumps(value, default=str)}" for who, value in different.items())
        todo = "say it once for all hosts of a run, choose among them with --limit, or give --data rollout='{...}'"
        found.append(Fault("rollout", f"there is more than one: {sides}", todo))
    if found:
        raise ConfigError(found)
    return Rollout(**dict(RolloutFile.model_validate(next(iter(different.values()), {}))))


def faults(said: Mapping[str, Any], known: Collection[str]) -> list[Fault]:
    """The faults of each rollout that is said, told of the first who says it."""
    return [fault for who, value in _different(said).items() for fault in _faults(who, value, known)]


def _different(said: Mapping[str, Any]) -> dict[str, Any]:
    """Who says it first -> what, for each that is said."""
    first: dict[str, str] = {}
    for who, value in said.items():
        if value is not None:
            first.setdefault(json.dumps(plain(value), sort_keys=True, default=str), who)
    return {who: plain(said[who]) for who in first.values()}


def _faults(who: str, value: Any, known: Collection[str]) -> Iterator[Fault]:
    if not isinstance(value, Mapping):
        yield Fault(f"{who}: rollout", "is not a map", EXAMPLE)
        return
    layer = Layer(HostData(who), value, ("rollout",))
    yield from check(RolloutFile, layer)
    canary = value.get("canary")
    names = [name for name in canary if isinstance(name, str)] if isinstance(canary, list) else []
    for name in dict.fromkeys(names):
        if name not in known:
            yield Fault(layer.where(("canary",)), f"there is no host `{name}`", nearest(name, known))
        if names.count(name) > 1:
            yield Fault(layer.where(("canary",)), f"names `{name}` twice", "name each host once")
    if value.get("waves") == []:
        yield Fault(layer.where(("waves",)), "is empty", 'leave it out, or give sizes, e.g. [1, 5, "20%"]')
