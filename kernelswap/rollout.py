"""In which order and how many at a time the hosts of a run swap, when it stops, and how that is told. Pure.

Sizes of waves are written as Ansible's `serial`: counts, or percent of the hosts that swap, rounded down and one at
least; the last is repeated until every host has its wave.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from kernelswap.agent.processes import hide_secrets
from kernelswap.errors import ConfigError, Fault
from kernelswap.profile import Layer, check, nearest
from kernelswap.spec import HostData, plain

EXAMPLE = 'write e.g. {"waves": [1, 5, "20%"], "max_failed": 0}'


def _size(value: Any) -> Any:
    count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    share = isinstance(value, str) and re.fullmatch(r"(100|[1-9][0-9]?)%", value)
    if not (count or share):
        context = {"what": "is not the size of a wave", "todo": 'write a number of hosts, or a share, e.g. "20%"'}
        raise PydanticCustomError("kernelswap", "{what}", context)
    return value


class Rollout(BaseModel):
    """How a run goes through its hosts.

    canary: who goes first, in this order. waves: their sizes; without them the canaries (or one host), then all others.
    max_failed: so many hosts may fail; one more, and no further host is touched. pause: seconds between waves. on_stop:
    what was committed before the stop stays, or goes back. unreachable: whether a host that cannot be reached or read
    counts as failed.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)

    canary: Annotated[tuple[str, ...], Field(strict=False)] = ()
    waves: Annotated[tuple[Annotated[Any, AfterValidator(_size)], ...], Field(strict=False)] = ()
    max_failed: Annotated[int, Field(ge=0)] = 0
    pause: Annotated[float, Field(ge=0, le=86400)] = 0
    on_stop: Literal["keep", "revert"] = "keep"
    unreachable: Literal["fail", "skip"] = "fail"

    def order(self, hosts: Collection[str]) -> tuple[str, ...]:
        """The named canaries, then the others by name, numbers by value."""
        first = [name for name in self.canary if name in hosts]
        return (*first, *sorted(set(hosts) - set(first), key=natural))

    def cut(self, hosts: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """The waves of these hosts, all of which swap."""
        queue = self.order(hosts)
        sizes = self.waves or (max(1, len(set(self.canary) & set(hosts))), "100%")
        waves: list[tuple[str, ...]] = []
        for size in chain(sizes, repeat(sizes[-1])):
            done = sum(map(len, waves))
            if done == len(queue):
                break
            waves.append(queue[done : done + _count(size, len(queue))])
        return tuple(waves)

    def stop(self, failed: Collection[str]) -> str:
        """Why no further host may be touched; "" if the run goes on."""
        if len(failed) <= self.max_failed:
            return ""
        return f"{many(len(failed), 'host')} failed ({listed(failed)}), and max_failed is {self.max_failed}"


def _count(size: int | str, total: int) -> int:
    return size if isinstance(size, int) else max(1, total * int(size.rstrip("%")) // 100)


def natural(name: str) -> tuple[list[str | int], str]:
    """A key that sorts gpu2 before gpu10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name


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
    return Rollout.model_validate(next(iter(different.values()), {}))


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
    yield from check(Rollout, layer)
    canary = value.get("canary")
    names = [name for name in canary if isinstance(name, str)] if isinstance(canary, list) else []
    for name in dict.fromkeys(names):
        if name not in known:
            yield Fault(layer.where(("canary",)), f"there is no host `{name}`", nearest(name, known))
        if names.count(name) > 1:
            yield Fault(layer.where(("canary",)), f"names `{name}` twice", "name each host once")
    if value.get("waves") == []:
        yield Fault(layer.where(("waves",)), "is empty", 'leave it out, or give sizes, e.g. [1, 5, "20%"]')


def again(words: Sequence[str], hosts: Sequence[str]) -> str:
    """The command that goes on with these hosts: the one that was typed, without its choice of hosts and secrets."""
    kept: list[str] = []
    skip = False
    for word in words:
        choice = word in ("--limit", "--exclude")
        if not (skip or choice or word.startswith(("--limit=", "--exclude="))):
            kept.append(word)
        skip = choice and not skip
    return shlex.join([*hide_secrets(kept), *(word for host in hosts for word in ("--limit", host))])


def many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names, key=natural))


def about(seconds: float | None) -> str:
    """A duration for people."""
    if seconds is None:
        return "time unknown"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True)
class Move:
    """What one host is about to do. what: a line for each instance; details: what changes by it; seconds: how long the
    host's own history lets expect, None if it tells nothing. follows: its swap runs already."""

    what: tuple[str, ...]
    details: tuple[str, ...] = ()
    seconds: float | None = None
    follows: bool = False


def waves_of(rollout: Rollout, moves: Mapping[str, Move]) -> tuple[tuple[str, ...], ...]:
    """The waves of a run; swaps that run already are followed before any begins."""
    running = [name for name, move in moves.items() if move.follows]
    first = [tuple(sorted(running, key=natural))] if running else []
    return (*first, *rollout.cut(moves.keys() - set(running)))


def plan_text(
    rollout: Rollout, waves: Sequence[Sequence[str]], moves: Mapping[str, Move], hosts: Mapping[str, str]
) -> list[str]:
    """The plan of a run, wave by wave, for people; nothing if no host moves.

    hosts: all of the run, and why one of them cannot swap; "" if it could.
    """
    if not moves:
        return []
    known = [move.seconds for move in moves.values() if move.seconds is not None]

    def seconds(wave: Sequence[str]) -> float | None:
        """Of its slowest host; one that nothing is known of is taken for the slowest of all."""
        times = [moves[name].seconds for name in wave]
        return None if not known else max(max(known) if each is None else each for each in times)

    whole = None if not known else sum(seconds(wave) or 0 for wave in waves) + rollout.pause * (len(waves) - 1)
    pause = f", {rollout.pause:g} s between them" if rollout.pause else ""
    then = ", and what was committed then goes back" if rollout.on_stop == "revert" else ""
    lines = [
        f"--> Rollout: {many(len(moves), 'host')} in {many(len(waves), 'wave')}{pause}, {about(whole)}; "
        f"it stops when more than {rollout.max_failed} failed{then}"
    ]
    for name in rollout.canary:
        if name not in moves:
            why = hosts.get(name, "it is not in this run (--limit, --exclude)") or "it has nothing to swap"
            lines.append(f"canary {name}: {why}; {waves[0][0]} goes first")
    for number, wave in enumerate(waves, start=1):
        lines.append(f"wave {number} of {len(waves)}: {many(len(wave), 'host')}, {about(seconds(wave))}")
        for what, names in groupby(wave, key=lambda name: moves[name].what):
            lines += _block(f"  {', '.join(names)}:", what)
    for what, details in dict.fromkeys((move.what, move.details) for move in moves.values() if move.details):
        lines += _block("what changes by", what) + [f"  {line}" for line in details]
    return lines


def still_text(moves: Mapping[str, Move]) -> list[str]:
    """The hosts on which nothing swaps, together where the same is to be said; by name where files are renewed."""
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for name, move in moves.items():
        groups.setdefault((move.what, move.details), []).append(name)
    lines: list[str] = []
    for (what, details), names in groups.items():
        lines += _block(f"{listed(names) if details else many(len(names), 'host')}:", what)
        lines += [f"  {line}" for line in details]
    return lines


def way_out(rollout: Rollout, failed: Collection[str], mute: Collection[str]) -> str:
    """What to do where more hosts failed than may before anything has begun."""
    ways = ["correct what is said above"]
    ways.append("leave them out: " + " ".join(f"--exclude {name}" for name in sorted(failed, key=natural)))
    ways.append(f"let more fail: --data rollout='{{\"max_failed\": {len(failed)}}}'")
    if mute and rollout.unreachable == "fail":
        ways.append('go on without whom cannot be reached: "unreachable": "skip"')
    return ", or ".join(ways)


def _block(head: str, lines: Sequence[str]) -> list[str]:
    return [f"{head} {lines[0]}"] if len(lines) == 1 else [head, *(f"    {line}" for line in lines)]
