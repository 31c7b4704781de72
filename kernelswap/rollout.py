"""In which order and how many at a time the hosts of a run swap, when it stops, and how that is told. Pure.

Sizes of waves are written as Ansible's `serial`: counts, or percent of the hosts that swap, rounded down and one at
least; the last is repeated until every host has its wave.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat

from kernelswap.agent.redaction import hide_secrets
from kernelswap.host_names import listed, many, natural


@dataclass(frozen=True)
class Rollout:
    """How a run goes through its hosts.

    canary: who goes first, in this order. waves: their sizes; without them the canaries (or one host), then all others.
    max_failed: so many hosts may fail; one more, and no further host is touched. pause: seconds between waves. on_stop:
    what was committed before the stop stays, or goes back. unreachable: whether a host that cannot be reached or read
    counts as failed.
    """

    canary: tuple[str, ...] = ()
    waves: tuple[int | str, ...] = ()
    max_failed: int = 0
    pause: float = 0
    on_stop: str = "keep"
    unreachable: str = "fail"

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


def outages(
    waves: Sequence[Collection[str]],
    routers: Mapping[str, Collection[tuple[str, str]]],
    moving: Collection[tuple[str, str]],
) -> list[str]:
    """Warnings about waves that may leave a router without a server. A host swaps its servers one after the other.

    routers: URL -> the servers that serve it now; moving: those that swap. A server is a host and an instance.
    """
    lines = []
    for number, wave in enumerate(waves, start=1):
        for url, serving in routers.items():
            out = {server[0] for server in serving if server in moving and server[0] in wave}
            if len(out) == len(serving) > 1:
                lines.append(
                    f"wave {number} takes all that serve {url} out of it at once: {listed(out)}; "
                    "its users may find nobody: give smaller `waves`"
                )
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
